"""`python -m capibara.doctor`."""

import sys

from capibara.cli.doctor import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
