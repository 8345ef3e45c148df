"""The settings of a routing set."""

from __future__ import annotations

import dataclasses
import enum
import json

from capibara.builders.redaction.redact import Json, Redaction
from capibara.builders.routing.balance import Balance
from capibara.builders.routing.decontamination import Decontamination
from capibara.builders.routing.labelling.difficulty import Difficulty
from capibara.builders.routing.labelling.domains import BUILT_IN, Domain, resolved
from capibara.builders.routing.splits import Splits
from capibara.config import configurable
from capibara.core.types import UserError
from capibara.data.tasks.routing import SCHEMA

_UNKNOWN = ("", "general", "unknown", "other", "none")


class UnknownDomain(enum.StrEnum):
    """What happens to a record that declares a domain which is none of the set's.

    REFUSE: it is an error.
    INFER: its domain is found like that of a record that declares none.
    EXCLUDE: it is excluded.
    """

    REFUSE = "refuse"
    INFER = "infer"
    EXCLUDE = "exclude"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingSet:
    """How a routing set is made.

    Attributes:
      domains: names of built-in domains, and your own; in the order of Dataset.domains.
      unknown_domain: what happens to a record that declares another domain ("general" declares none).
      min_confidence: the least confidence of a label; other texts are ambiguous and excluded.
      min_characters, max_characters: the shortest and the longest text.
      min_examples: the fewest examples of a domain in train; 0: a domain may be empty.
      source_fields: members of documents and conversations that name their source; each that is there counts.
      difficulty: how it is computed.
      splits: their shares.
      balance: how many texts of each domain are kept.
      decontamination: which evaluation sets the texts must not share.
      shards: files of the split train, so that several hosts read it by SeqIO.
      redaction: what is replaced.
    """

    domains: tuple[str | Domain, ...] = tuple(BUILT_IN)
    unknown_domain: UnknownDomain = UnknownDomain.REFUSE
    min_confidence: float = 0.6
    min_characters: int = 20
    max_characters: int = 50_000
    min_examples: int = 1
    source_fields: tuple[str, ...] = ("source", "session", "session_id", "task_id")
    difficulty: Difficulty = Difficulty()
    splits: Splits = Splits()
    balance: Balance = Balance()
    decontamination: Decontamination = Decontamination()
    shards: int = 1
    redaction: Redaction = Redaction()

    def __post_init__(self) -> None:
        if len(resolved(self.domains)) < 2:
            raise UserError(f"RoutingSet.domains ({len(self.domains)}) must be at least 2: a router has to choose")
        if len(self.domains) > 200:
            raise UserError(f"RoutingSet.domains ({len(self.domains)}) must be at most 200")
        if not 0 <= self.min_confidence <= 1:
            raise UserError(f"RoutingSet.min_confidence ({self.min_confidence}) must be from 0 to 1: try 0.6")
        if not 1 <= self.min_characters <= self.max_characters:
            raise UserError(
                f"RoutingSet.min_characters ({self.min_characters}) and max_characters ({self.max_characters}) must be "
                "positive, in this order: try 20 and 50000"
            )
        if self.min_examples < 0:
            raise UserError(f"RoutingSet.min_examples ({self.min_examples}) must be at least 0: try 1")
        if not 1 <= self.shards <= 10_000:
            raise UserError(f"RoutingSet.shards ({self.shards}) must be from 1 to 10000: try 8")

    @property
    def resolved(self) -> tuple[Domain, ...]:
        """The domains, built-in ones by their name."""
        return resolved(self.domains)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the domains."""
        return tuple(item.name for item in self.resolved)

    def declares_none(self, domain: str) -> bool:
        """Whether a record's domain says nothing, such as "general", and is not the name of one of the set's."""
        return domain.strip().lower() in _UNKNOWN

    def as_json(self) -> dict[str, Json]:
        """All that decides what is written, as JSON; `schema` is the version of the records.

        Raises:
          UserError: a file of an evaluation set is missing.
        """
        result = {name: value for name, value in dataclasses.asdict(self).items()}
        result["domains"] = [dataclasses.asdict(item) for item in self.resolved]
        result["decontamination"] = self.decontamination.as_json()
        return {"schema": SCHEMA, **json.loads(json.dumps(result))}
