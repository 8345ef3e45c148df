"""`python -m capibara.coordinate`."""

import sys

from capibara.cli.coordinate import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
