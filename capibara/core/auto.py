"""AUTO: the value of a field that is not set, where that means more than a default."""

from __future__ import annotations

import enum


class Auto(enum.StrEnum):
    """The type of AUTO, which Gin files write as 'auto'."""

    AUTO = "auto"

    def __repr__(self) -> str:
        return "AUTO"


AUTO = Auto.AUTO
"""Not set: what uses the field chooses. A field set to the same value as that choice differs from it."""
