"""Changes of one key of a config.json, as the peer program and the tests of config.json name them."""

from __future__ import annotations

import copy
from typing import Any


def changed(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A config.json with one change.

    Args:
      base: the whole file.
      key: "a.b": this key of the object a; "-a": without a; "a<-b": b under the name a; "": the file as it is.
      value: of the key.
    """
    result = copy.deepcopy(base)
    *path, name = key.lstrip("-").split(".")
    values = result
    for part in path:
        values = values[part]
    if key.startswith("-"):
        del values[name]
    elif "<-" in name:
        alias, name = name.split("<-")
        del values[name]
        values[alias] = value
    elif key:
        values[name] = value
    return result


def name_of(key: str) -> str:
    """The key that a change is of, without the objects around it."""
    return key.lstrip("-").split(".")[-1].split("<-")[0]
