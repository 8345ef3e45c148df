"""`python -m capibara.compare`."""

import sys

from capibara.cli.compare import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
