"""Times as text."""

from __future__ import annotations


def seconds(value: float) -> str:
    """A time in seconds, or in milliseconds if short."""
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.2g} ms"
