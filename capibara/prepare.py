"""`python -m capibara.prepare`."""

import sys

from capibara.cli.prepare import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
