"""`python -m capibara.finetune`."""

import sys

from capibara.cli.finetune import main
from capibara.multihost.exits import run_process

if __name__ == "__main__":
    sys.exit(run_process(main))
