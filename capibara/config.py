"""Gin: the only module that imports it."""

from __future__ import annotations

from typing import TypeVar

import gin

T = TypeVar("T")


def configurable(cls: T) -> T:
    """Lets Gin files bind the fields of a frozen dataclass; calling the class from Python is unaffected."""
    return gin.register(cls)
