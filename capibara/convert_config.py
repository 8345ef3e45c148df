"""`python -m capibara.convert_config`."""

import sys

from capibara.cli.convert_config import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
