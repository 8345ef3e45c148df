"""The source that reads datasets of the Hugging Face library."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any

import numpy as np

from capibara.config import configurable
from capibara.core import extras, limits
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.data.packing.shuffle import mix
from capibara.data.sources.sources import Documents, Example, Source, skipped, tell_skipped
from capibara.data.text import counts, disk
from capibara.data.text.counts import Counts


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(Source):
    """A dataset of the `datasets` library: a saved folder, local files, or a hub name.

    Attributes:
      path: a folder written by `save_to_disk`, or the first argument of `datasets.load_dataset`.
      name: the dataset's configuration, if it has several.
      field: the column with the text (or with the targets, of pairs).
      inputs_field: the column with the inputs; None: there are none.
      domain_field: the column with the document's domain; None: there is none.
      data_files: files for the generic builders ("json", "csv", "parquet", "text").
      train_split: name of the training split.
      validation_split: name of the validation split; None: a fraction of the training split is held out.
      validation_fraction: the fraction that is held out if there is no validation split.
      domain: the domain of all documents, if no column has it.
    """

    path: FilePath
    name: str | None = None
    field: str = "text"
    inputs_field: str | None = None
    domain_field: str | None = None
    data_files: tuple[FilePath, ...] = ()
    train_split: str = "train"
    validation_split: str | None = None
    validation_fraction: float = 0.03
    domain: str | None = None

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction, type(self).__name__)

    def open(self, split: str) -> Documents:
        disk.check_split(split)
        explicit, chosen = self.validation_split is not None, self.train_split
        if self.validation_split is not None and split == "validation":
            chosen = self.validation_split
        table = self._load(chosen)
        for name in ("field", "inputs_field", "domain_field"):
            column = getattr(self, name)
            if column is not None and column not in table.column_names:
                raise UserError(f"HuggingFaceSource.{name} ({column!r}) is not one of {', '.join(table.column_names)}")
        if not len(table):
            raise UserError(f"HuggingFaceSource.path ({self.path!r}) has no rows: the corpus is empty")
        rows = self._with_text(table)
        total = len(rows)
        if not explicit:
            keys = mix(rows.astype(np.uint64))
            rows = rows[
                disk.split_by_hash(
                    keys, split, self.validation_fraction, "HuggingFaceSource", instead="validation_split"
                )
            ]
        documents = _TableDocuments(table, rows, self)
        arrow = [file["filename"] for file in table.cache_files]  # none, if the table is in memory
        of_files = {"files": len(arrow), "bytes": sum(map(os.path.getsize, arrow))} if arrow else {}
        nulls = len(table) - total
        documents.counts = Counts(**of_files, **counts.of_split(split, len(rows), total), skipped=skipped(nulls))
        return documents

    def _with_text(self, table: Any) -> np.ndarray:
        """The rows whose text is not null."""
        retained = np.ones(len(table), bool)
        for name in filter(None, (self.field, self.inputs_field)):
            if table.data.column(name).null_count:
                retained &= [value is not None for value in table[name]]
        tell_skipped("HuggingFaceSource.path", self.path, len(retained) - int(retained.sum()), len(retained))
        if not retained.any():
            raise UserError(f"HuggingFaceSource.path ({self.path!r}) has no row with a text: the corpus is empty")
        return np.flatnonzero(retained)

    def _load(self, split: str) -> Any:
        datasets = extras.require("datasets", extra="hf")
        if self.path.startswith((".", os.sep)) and not os.path.exists(self.path):  # else it is looked for on the hub
            raise UserError(
                f"HuggingFaceSource.path ({self.path!r}) does not exist: name a folder of save_to_disk, or a hub name"
            )
        try:
            if os.path.isfile(os.path.join(self.path, "dataset_dict.json")):
                return datasets.load_from_disk(self.path)[split]
            if os.path.isfile(os.path.join(self.path, "dataset_info.json")):
                return datasets.load_from_disk(self.path)
            files = {"data_files": list(self.data_files)} if self.data_files else {}
            return datasets.load_dataset(self.path, self.name, split=split, **files)
        # pyarrow, fsspec and datasets raise many classes of errors: treat all of them as a fault of the file.
        except Exception as error:
            message = f"{type(error).__name__}: {limits.cause(error, 200)}"
            raise UserError(f"HuggingFaceSource.path ({self.path!r}), split {split!r}: {message}") from error


class _TableDocuments(Documents):
    """Selected rows of a Hugging Face dataset."""

    def __init__(self, table: Any, rows: np.ndarray, source: HuggingFaceSource):
        self._table, self._rows, self._source = table, rows, source

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, i: int) -> Example:
        source, row = self._source, int(self._rows[i])
        record = self._table[row]
        for column in filter(None, (source.field, source.inputs_field)):
            if not isinstance(record[column], str):
                kind = type(record[column]).__name__
                raise UserError(f"row {row}: field {column!r} must be text, not {kind}")
        return Example(
            record[source.field],
            None if source.inputs_field is None else record[source.inputs_field],
            source.domain if source.domain_field is None else _domain(record[source.domain_field], source.domain),
        )

    def fingerprint(self) -> dict[str, Any]:
        digest = hashlib.blake2b(self._rows.tobytes(), digest_size=8).hexdigest()
        return {"documents": len(self), "table": getattr(self._table, "_fingerprint", ""), "digest": digest}


def _domain(value: object, default: str | None) -> str | None:
    return default if value is None else str(value)
