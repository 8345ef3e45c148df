"""`python -m capibara.evaluate`."""

import sys

from capibara.cli.evaluate import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
