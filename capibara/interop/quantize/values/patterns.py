"""Regular expressions of a quantization_config: it may come from anyone, and each is compared with every module."""

from __future__ import annotations

import re
from collections.abc import Collection

from capibara.core import limits
from capibara.core.types import UserError

_MOST = 256


def compiled(patterns: Collection[str], where: str = "quantization_config") -> dict[str, re.Pattern[str]]:
    """The patterns, by their text.

    Args:
      patterns: regular expressions.
      where: what has them, for errors.

    Raises:
      UserError: one is no regular expression, or may take too long, or they are too many.
    """
    if len(patterns) > _MOST:
        raise UserError(f"{where} has {len(patterns):,} patterns, must have at most {_MOST}")
    result = {}
    for pattern in patterns:
        try:
            limits.check_pattern(pattern)
            result[pattern] = re.compile(pattern)
        except (limits.Refused, re.error, RecursionError, OverflowError) as error:
            shown = limits.shortened(pattern)
            raise UserError(f"{where} has the pattern {shown}, which cannot be used: {error}") from None
    return result
