"""Converts records to examples: JSON, tf.train.Example, columns of a table or plain text."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.packing import rows
from capibara.data.shards.formats import Record
from capibara.data.sources.sources import LINE_VALUES, Example
from capibara.data.text import disk, protobuf


class RecordFormat(enum.StrEnum):
    """The format of a record in a TFRecord or ArrayRecord file.

    AUTO: JSON if it begins with a brace, otherwise tf.train.Example if it is one, otherwise text.
    JSON: an object with the fields.
    EXAMPLE: a tf.train.Example with the fields as features, or a packed row (capibara.data.packing.rows).
    TEXT: the document itself, in UTF-8.
    """

    AUTO = "auto"
    JSON = "json"
    EXAMPLE = "example"
    TEXT = "text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """Maps the fields of a record to an example.

    Attributes:
      record_format: the format of a record.
      text, inputs, domain: names of the fields; records in text format only have the text.
      default_domain: the domain of records without one.
    """

    record_format: RecordFormat
    text: str
    inputs: str | None
    domain: str | None
    default_domain: str | None

    def example(self, record: Record, where: str) -> Example | None:
        """Converts a record to an example; `where` is its file and position, for errors; None: its text is null.

        Raises:
          UserError: the record has another format, lacks a field, or is no text in UTF-8.
        """
        values = self._values(record, where)
        if isinstance(values, rows.PackedRow):
            return Example("", row=values)
        if isinstance(values, str):
            return Example(values, domain=self.default_domain)
        if values.get(self.text, "") is None or self.inputs is not None and values.get(self.inputs, "") is None:
            return None
        domain = values.get(self.domain) if self.domain is not None else None
        return Example(
            self._string(values, self.text, "field", where),
            None if self.inputs is None else self._string(values, self.inputs, "inputs_field", where),
            self.default_domain if domain is None else _text(domain, where) or str(domain),
        )

    def _values(self, record: Record, where: str) -> Mapping[str, Any] | rows.PackedRow | str:
        if isinstance(record, Mapping):
            return record
        record_format = self.record_format
        if record_format is RecordFormat.AUTO and record[:1] == b"{":
            record_format = RecordFormat.JSON
        if record_format in (RecordFormat.AUTO, RecordFormat.EXAMPLE):
            try:
                result = protobuf.example(record)
                if rows.MARK in result:
                    return self._row(result, where)
                if result or record_format is RecordFormat.EXAMPLE:
                    return {name: value[0] if len(value) == 1 else value for name, value in result.items()}
            except protobuf.Malformed as error:
                if record_format is RecordFormat.EXAMPLE:
                    raise UserError(f"{where} is no tf.train.Example ({error}): set ShardedSource.record") from None
        # Not before: an Example begins with a line feed and its length, which may be that of a brace or of white space.
        if record_format is RecordFormat.AUTO and record.lstrip()[:1] == b"{":
            record_format = RecordFormat.JSON
        if record_format is RecordFormat.JSON:
            try:
                values = limits.parse_json(record, values=LINE_VALUES, finite=False)
            except ValueError as error:
                raise UserError(f"{where} is not JSON ({limits.cause(error)}): {disk.excerpt(record)}") from error
            if not isinstance(values, dict):
                raise UserError(f"{where} is no JSON object but {disk.kind(values)}: name files of objects")
            return values
        return _decoded(record, where)

    @staticmethod
    def _row(features: Mapping[str, Any], where: str) -> rows.PackedRow:
        try:
            return rows.decode(features)
        except protobuf.Malformed as error:
            raise UserError(f"{where} is corrupted ({error}): copy it again") from None

    @staticmethod
    def _string(values: Mapping[str, object], field: str, parameter: str, where: str) -> str:
        if field not in values:
            known = limits.shortened(", ".join(map(str, values)))[1:-1]
            raise UserError(f"{where} has no field {field!r} (it has: {known}): set ShardedSource.{parameter}")
        text = _text(values[field], where)
        if text is None:
            raise UserError(f"{where}: field {field!r} must be text, not {type(values[field]).__name__}")
        return text


def _text(value: object, where: str) -> str | None:
    if isinstance(value, bytes):
        return _decoded(value, where)
    return value if isinstance(value, str) else None


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start:,} of the text"
        raise UserError(f"{where} is no text in UTF-8 ({reason}): write it in UTF-8") from None
