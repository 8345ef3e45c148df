"""`python -m capibara.train`."""

import sys

from capibara.cli.train import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
