"""Records of Python as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping

from capibara.core import limits
from capibara.core.types import UserError


def line(number: int, row: object) -> str:
    """A record as a line; a text becomes {"text": ...}, and keys without a value are left out.

    Args:
      number: of the record, for errors.
      row: a dict or a text.

    Raises:
      UserError: it is neither, or JSON cannot hold it.
    """
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise UserError(f"record {number} of the data is {limits.shortened(row)}, must be a dict or a text")
    # Arrow fills the keys that a row lacks with null.
    retained = {key: value for key, value in row.items() if value is not None}
    try:
        return json.dumps(retained, ensure_ascii=False, allow_nan=False, default=_plain) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(
            f"record {number} of the data cannot be written as JSON ({limits.cause(error)}): leave it out, or make it a text"
        ) from None


def _plain(value: object) -> object:
    """A number of NumPy, or a time, as JSON has it."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no value of JSON")
