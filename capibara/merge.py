"""`python -m capibara.merge`."""

import sys

from capibara.cli.merge import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
