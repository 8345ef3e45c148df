"""Writes models of paths in other formats."""

from __future__ import annotations

from capibara.core.fields import did_you_mean
from capibara.core.types import UserError


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

    if not isinstance(target, str) or not target:
        raise UserError(f"the target is {target!r}, must be a new path: try 'mine.gguf'")
    if format is not None and format not in conversion.FORMATS:
        raise UserError(
            f"format is {format!r}, must be one of {', '.join(conversion.FORMATS)}{did_you_mean(str(format), conversion.FORMATS)}"
        )
    conversion.convert(path, target, format, dtype, base, ModelReader(trust=trust))
    return target
