"""From a record to the example that it tells: JSON, tf.train.Example, columns or plain text."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.shards import protobuf
from capibara.data.shards.formats import Record
from capibara.data.sources import disk
from capibara.data.sources.sources import LINE_VALUES, Example


class RecordFormat(enum.StrEnum):
    """What a record of a TFRecord or ArrayRecord file is.

    AUTO: JSON where it begins with a brace, else a tf.train.Example where it is one, else text.
    JSON: an object with the fields.
    EXAMPLE: a tf.train.Example with the fields as features.
    TEXT: the document itself, in UTF-8.
    """

    AUTO = "auto"
    JSON = "json"
    EXAMPLE = "example"
    TEXT = "text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """Where an example's parts are in a record.

    Attributes:
      record_format: what a record is.
      text, inputs, domain: the fields of these; of text records nothing but the text is there.
      default_domain: of records that name none.
    """

    record_format: RecordFormat
    text: str
    inputs: str | None
    domain: str | None
    default_domain: str | None

    def example(self, record: Record, where: str) -> Example:
        """The example of a record; `where` is its file and place, for errors.

        Raises:
          UserError: the record is not what it should be, or has no such field.
        """
        values = self._values(record, where)
        if isinstance(values, str):
            return Example(values, domain=self.default_domain)
        domain = values.get(self.domain) if self.domain is not None else None
        return Example(
            self._string(values, self.text, "field", where),
            None if self.inputs is None else self._string(values, self.inputs, "inputs_field", where),
            self.default_domain if domain is None else _text(domain) or str(domain),
        )

    def _values(self, record: Record, where: str) -> Mapping[str, Any] | str:
        if isinstance(record, Mapping):
            return record
        record_format = self.record_format
        if record_format is RecordFormat.AUTO and record.lstrip()[:1] == b"{":
            record_format = RecordFormat.JSON
        if record_format in (RecordFormat.AUTO, RecordFormat.EXAMPLE):
            try:
                found = protobuf.example(record)
                if found or record_format is RecordFormat.EXAMPLE:
                    return {name: value[0] if len(value) == 1 else value for name, value in found.items()}
            except protobuf.Malformed as error:
                if record_format is RecordFormat.EXAMPLE:
                    raise UserError(f"{where} is no tf.train.Example ({error}): set ShardedSource.record") from None
        if record_format is RecordFormat.JSON:
            try:
                values = limits.parse_json(record, values=LINE_VALUES, finite=False)
            except ValueError as error:
                raise UserError(f"{where} is not JSON ({limits.cause(error)}): {disk.excerpt(record)}") from error
            if not isinstance(values, dict):
                raise UserError(f"{where} is no JSON object but {type(values).__name__}: name files of objects")
            return values
        return record.decode("utf-8", errors="replace")

    @staticmethod
    def _string(values: Mapping[str, Any], field: str, parameter: str, where: str) -> str:
        if field not in values:
            known = limits.shortened(", ".join(map(str, values)))[1:-1]
            raise UserError(f"{where} has no field {field!r} (it has: {known}): set ShardedSource.{parameter}")
        text = _text(values[field])
        if text is None:
            raise UserError(f"{where}: field {field!r} must be text, not {type(values[field]).__name__}")
        return text


def _text(value: Any) -> str | None:
    return (
        value.decode("utf-8", errors="replace")
        if isinstance(value, bytes)
        else value
        if isinstance(value, str)
        else None
    )
