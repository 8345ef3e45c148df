"""`python -m capibara.train`; imported, the module can be called as the function of its name: `capibara.train(trainer)`."""

import sys
import types

from capibara.api.training import train
from capibara.cli.train import main
from capibara.multihost.exits import run_process


class _CallableModule(types.ModuleType):
    __call__ = staticmethod(train)


if __name__ == "__main__":
    sys.exit(run_process(main))
sys.modules[__name__].__class__ = _CallableModule
