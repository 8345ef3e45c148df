"""Writes models of paths in other formats."""

from __future__ import annotations


def convert(
    path: str,
    target: str,
    *,
    format: str | None = None,
    dtype: str | None = None,
    base: str | None = None,
    trust: bool = False,
) -> str:
    """Writes the model at a path in another format; arguments and errors as for `verbs.convert`."""
    from capibara.cli.composition.models import ModelReader
    from capibara.interop import conversion

    conversion.convert(path, target, format, dtype, base, ModelReader(trust=trust))
    return target
