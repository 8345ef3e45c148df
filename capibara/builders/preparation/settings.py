"""The settings of a corpus."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.builders.preparation.documents import Fields
from capibara.builders.preparation.filters import Filter
from capibara.builders.preparation.near import NearDuplicates
from capibara.config import configurable
from capibara.core.types import UserError
from capibara.data.packing.packing import Packing
from capibara.data.text import plain
from capibara.data.tokenizers.vocabulary import ByteVocabulary, Vocabulary


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusPreparation:
    """How a corpus is prepared.

    Attributes:
      field: the field of a JSON line, or the column of a Parquet file, with the text.
      domain_field: the one with the document's domain, which a record may lack; a text file's domain is its language, as in
        TextSource. None: domains are not kept.
      encoding: of JSON lines and texts, as Python names it, such as "utf-16" or "cp1252".
      document_bytes: a longer text file is cut into documents of at least so many bytes.
      filters: applied in this order to the documents that are no exact duplicates; the first that drops a document counts.
      near: what counts as a near duplicate; None: near duplicates are kept.
      vocabulary: the tokenizer.
      length: positions in a row; the Dataset.length of the training.
      packing: how documents share rows.
      append_eos: whether to append the end token to every document.
      part_bytes: bytes of the input that a worker reads at a time; of a corpus under 2 GiB fewer, but at least 4 MiB.
      shard_parts: parts whose documents share a shard.
    """

    field: str = "text"
    domain_field: str | None = "domain"
    encoding: str = plain.UTF_8
    document_bytes: int = 1 << 20
    filters: tuple[Filter, ...] = ()
    near: NearDuplicates | None = NearDuplicates()
    vocabulary: Vocabulary = ByteVocabulary()
    length: int = 2048
    packing: Packing = Packing.BEST_FIT
    append_eos: bool = True
    part_bytes: int = 32 << 20
    shard_parts: int = 4

    def __post_init__(self) -> None:
        least_values = {"document_bytes": 1, "length": 2, "part_bytes": 1, "shard_parts": 1}
        for name, least in least_values.items():
            if getattr(self, name) < least:
                raise UserError(f"CorpusPreparation.{name} ({getattr(self, name)}) must be at least {least}")
        plain.checked_encoding("CorpusPreparation.encoding", self.encoding)
        if self.packing is Packing.NONE:
            raise UserError("CorpusPreparation.packing ('none') would cut documents: try 'best_fit' or 'concat'")

    @property
    def fields(self) -> Fields:
        """Where the documents are."""
        return Fields(
            text=self.field, domain=self.domain_field, document_bytes=self.document_bytes, encoding=self.encoding
        )

    @property
    def sketches_at_once(self) -> bool:
        """Whether documents are read once for both kinds of duplicates: no filter comes between."""
        return self.near is not None and not self.filters

    def as_json(self) -> dict[str, Any]:
        """All that decides what is written, as JSON."""
        result = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return result | {
            "filters": [{"filter": type(item).__name__, **dataclasses.asdict(item)} for item in self.filters],
            "near": None if self.near is None else dataclasses.asdict(self.near),
            "vocabulary": self.vocabulary.fingerprint(),
            "packing": str(self.packing),
        }
