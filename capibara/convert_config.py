"""`python -m capibara.convert_config`."""

import sys

from capibara.cli.convert_config import main
from capibara.core.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
