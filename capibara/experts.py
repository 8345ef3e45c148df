"""`python -m capibara.experts`."""

import sys

from capibara.cli.experts import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
