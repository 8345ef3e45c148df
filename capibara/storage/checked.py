"""Checks what a store of the user's returns, so that a wrong value ends where it arises."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from typing import cast

from capibara.core import user_modules
from capibara.core.types import UserError
from capibara.storage.store import Store

# Method -> the type that it returns, and how an error names it.
RETURNS: dict[str, tuple[type | types.UnionType, str]] = {
    "read": (bytes, "bytes"),
    "read_range": (bytes, "bytes"),
    "lock": (contextlib.AbstractContextManager, "a context manager"),
    "size": (int, "int"),
    "list": (dict, "dict"),
    "matching": (Sequence, "a sequence"),
    "is_link": (bool, "bool"),
    "absolute": (str, "str"),
    "free_bytes": (int | None, "int or None"),
    "write_hashed": (str, "str"),
    "read_version": (tuple, "tuple"),
    "write_version": (str, "str"),
}
_SHOWN = 60  # characters of a returned value that the error quotes


def checked(store: Store) -> Store:
    """A store whose methods (RETURNS) raise UserError if they return another type than `Store` asks for.

    Capibara's own stores are returned as they are.
    """
    name = user_modules.own_class(store)
    return store if name is None else cast(Store, _Checked(store, name))


class _Checked:
    """Passes everything on to a store."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name

    def __getattr__(self, name: str) -> object:
        if name == "_store":  # as pickle and copy ask before it is there
            raise AttributeError(name)
        result = getattr(self._store, name)
        return functools.partial(self._call, result, name) if name in RETURNS else result

    def _call(self, method: Callable[..., object], name: str, *args: object, **named: object) -> object:
        value, (kind, needed) = method(*args, **named), RETURNS[name]
        if isinstance(value, kind):
            return value
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        raise UserError(
            f"{self._name}.{name} returned {shown}, must be {needed}: mend it as capibara.storage.store says"
        )
