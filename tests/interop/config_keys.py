"""Changes of one key of a config.json, as the peer program and the tests of config.json name them."""

from __future__ import annotations

import json
from typing import Any


def changed(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A config.json with one change.

    Args:
      base: the whole file.
      key: "a.b": this key of the object a; "a+c.b": of both; "-a": without a; "a<-b": b under the name a; "": the file as it
        is.
      value: of the key.
    """
    result: dict[str, Any] = json.loads(json.dumps(base))  # no object of it is part of another
    *path, name = key.lstrip("-").split(".")
    places = [result]
    for part in path:
        places = [place[inner] for place in places for inner in part.split("+")]
    for values in places:
        if key.startswith("-"):
            del values[name]
        elif "<-" in name:
            alias, old = name.split("<-")
            del values[old]
            values[alias] = value
        elif key:
            values[name] = value
    return result


def name_of(key: str) -> str:
    """The key that a change is of, without the objects around it."""
    return key.lstrip("-").split(".")[-1].split("<-")[0]
