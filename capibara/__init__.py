"""capibara: trains, fine-tunes and merges language models on TPU slices from one Gin file.

In Python `import capibara as cb` gives what a Gin file can name, under the same names (`cb.Trainer`), and the verbs as functions
(`cb.train`). Each is imported when it is first used; `__init__.pyi` lists them.
"""

import functools as _functools
import importlib as _importlib
import pathlib as _pathlib
import sys as _sys
import types as _types

from capibara.core import user_modules as _user_modules

__version__ = "0.1.0"
_user_modules.without_working_directory()  # before anything else is imported


class _Package(_types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if (result := _listed().get(name)) is None:
            raise AttributeError(f"module 'capibara' has no attribute {name!r}", name=name, obj=self)  # "Did you mean"
        return self.__dict__.setdefault(name, getattr(_importlib.import_module(result[0]), result[1]))

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, _types.ModuleType) and name in _listed()):  # the module of `python -m capibara.train`
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *_listed()})


@_functools.cache
def _listed() -> dict[str, tuple[str, str]]:
    """Name -> its module, and its name there."""
    rows = map(str.split, _pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines())
    return {row[5]: (row[1], row[3]) for row in rows if len(row) == 6 and row[1].startswith("capibara")}


_sys.modules[__name__].__class__ = _Package
