"""capibara: trains, fine-tunes and merges language models on TPU slices from one Gin file.

In Python `import capibara as cb` gives what a Gin file can name, under the same names (`cb.Trainer`, `cb.DecoderConfig`), and
`cb.train` and `cb.load`. Each is imported when it is first used; `__init__.pyi` lists them.
"""

import functools as _functools
import importlib as _importlib
import pathlib as _pathlib
import re as _re
import sys as _sys

from capibara.core import user_modules as _user_modules

__version__ = "0.1.0"

_user_modules.without_working_directory()  # before anything else is imported


def __getattr__(name: str) -> object:
    """Imports what `__init__.pyi` lists, on first use."""
    found = _listed().get(name)
    if found is None:
        # Python's own traceback adds "Did you mean" from these.
        raise AttributeError(f"module 'capibara' has no attribute {name!r}", name=name, obj=_sys.modules[__name__])
    module, own_name = found
    value = globals()[name] = getattr(_importlib.import_module(module), own_name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_listed()})


@_functools.cache
def _listed() -> dict[str, tuple[str, str]]:
    """Name -> its module, and its name there."""
    text = _pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    rows = _re.findall(r"^from (capibara\S*) import (\w+) as (\w+)$", text, _re.MULTILINE)
    return {name: (module, own_name) for module, own_name, name in rows}
