"""Retrieved chunks as a part of a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from capibara.config import configurable
from capibara.core.fields import FilePath, did_you_mean
from capibara.core.types import UserError
from capibara.retrieval.index import Hit, Index

KEY = "context"  # of a prompt, where the chunks go


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Chunks that are retrieved for each line of a task, and stand where its prompt has {context}.

    Attributes:
      index: a folder of `capibara prepare index`.
      k: chunks for each line.
      query: the key of a line that is searched for.
      model: path of the model that has embedded the index; None: where it was then.
    """

    index: FilePath
    k: int = 4
    query: str = "question"
    model: FilePath | None = None

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"Retrieval.k is {self.k}, must be at least 1: try 4")

    def contexts(self, records: Sequence[Mapping[str, object]], index: Index, where: str) -> list[str]:
        """The text of the retrieved chunks for each record.

        Args:
          records: lines of a file.
          index: of the folder.
          where: the lines' task or file, for errors.

        Raises:
          UserError: a record has no text to search for.
        """
        queries = []
        for number, record in enumerate(records, 1):
            query = record.get(self.query)
            if not isinstance(query, str) or not query.strip():
                hint = did_you_mean(self.query, map(str, record), "its keys")
                raise UserError(
                    f"{where}, line {number} has no text in {self.query!r}, which Retrieval.query names{hint}"
                )
            queries.append(query)
        return [numbered([hit.text for hit in hits]) for hits in index.search_many(queries, self.k)]


def numbered(texts: Sequence[str]) -> str:
    """Chunks with the numbers by which an answer cites them."""
    return "\n\n".join(f"[{number}] {text.strip()}" for number, text in enumerate(texts, 1))


def shown(hits: Sequence[Hit]) -> str:
    """Chunks with the files where they are, for a model that has searched."""
    return "\n\n".join(f"[{number}] {hit.path}:\n{hit.text.strip()}" for number, hit in enumerate(hits, 1))
