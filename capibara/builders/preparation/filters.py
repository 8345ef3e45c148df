"""Filters of documents: the quality filters of datatrove, and the language by py3langid; neither needs a network."""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from capibara.config import configurable
from capibara.core import extras, limits
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError

# Of datatrove's filters: those that need neither a network nor functions, and decide by the text alone.
_OF_DATATROVE = (
    "C4ParagraphFilter", "C4QualityFilter", "FineWebQualityFilter", "GopherQualityFilter", "GopherRepetitionFilter",
    "RegexFilter",
)  # fmt: skip
_REWRITES = ("C4QualityFilter",)


class Judged(NamedTuple):
    """What filters have decided about a document.

    Attributes:
      text: the document, which a filter may have rewritten; None: it is dropped.
      reason: why it is dropped.
    """

    text: str | None
    reason: str = ""


class Filter(abc.ABC):
    """Configuration of a filter; a new one is a frozen dataclass with `judge`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def rewrites(self) -> bool:
        """Whether it may change a text that it keeps."""
        return False

    @abc.abstractmethod
    def judge(self, text: str) -> Judged:
        """Keeps or drops a document.

        Raises:
          UserError: a library is not installed, or does not accept the options.
        """


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DatatroveFilter(Filter):
    """One of datatrove's filters, with the library's own defaults.

    Attributes:
      name: its class, such as "GopherQualityFilter" (https://arxiv.org/abs/2112.11446) or "FineWebQualityFilter".
      options: arguments of the class, such as {"min_doc_words": 20}.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in _OF_DATATROVE:
            hint = did_you_mean(self.name, _OF_DATATROVE, "filters")
            raise UserError(f"DatatroveFilter.name ({self.name!r}) must be one of {', '.join(_OF_DATATROVE)}{hint}")

    @property
    def rewrites(self) -> bool:
        return self.name in _REWRITES

    @functools.cached_property
    def _filter(self) -> tuple[Any, Any]:
        """The filter, and the class of its documents."""
        filters = extras.require("datatrove.pipeline.filters", extra="builders", why=self.name)
        documents = extras.require("datatrove.data", extra="builders", why=self.name)
        try:
            return getattr(filters, self.name)(**self.options), documents.Document
        except TypeError as error:
            raise UserError(
                f"DatatroveFilter.options ({limits.shortened(dict(self.options))}): {limits.cause(error)}: see "
                f"datatrove's {self.name}"
            ) from None

    def judge(self, text: str) -> Judged:
        judge, new_document = self._filter
        document = new_document(text=text, id="")
        try:
            result = judge.filter(document)
        except ImportError as error:  # spaCy, for its words
            raise UserError(f"{self.name}: {limits.cause(error)}: {extras.install_command('builders')}") from None
        except ZeroDivisionError:  # of the number of words, lines or characters
            result = False, "no_words"
        is_kept, reason = result if isinstance(result, tuple) else (result, "")
        return Judged(document.text) if is_kept else Judged(None, reason or self.name)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageFilter(Filter):
    """Keeps the documents that are in some languages, as py3langid finds it in 139 languages.

    Attributes:
      languages: ISO 639 codes, such as ("en", "de").
      least: the smallest probability of the language.
      characters: only the beginning of a document is looked at.
    """

    languages: tuple[str, ...]
    least: float = 0.65
    characters: int = 4096

    def __post_init__(self) -> None:
        if not self.languages:
            raise UserError("LanguageFilter.languages is empty: name at least one, such as 'en'")
        if not 0 <= self.least <= 1:
            raise UserError(f"LanguageFilter.least ({self.least}) must be from 0 to 1: try 0.65")
        if self.characters < 1:
            raise UserError(f"LanguageFilter.characters ({self.characters}) must be at least 1: try 4096")

    @functools.cached_property
    def _identifier(self) -> Any:
        result = _languages()
        if unknown := sorted(set(self.languages) - set(result.labels)):
            raise UserError(
                f"LanguageFilter.languages ({unknown[0]!r}) must be one of {', '.join(sorted(result.labels))}"
            )
        return result

    def judge(self, text: str) -> Judged:
        language, probability = self._identifier.classify(text[: self.characters])
        if language not in self.languages:
            return Judged(None, "language")
        return Judged(text) if probability >= self.least else Judged(None, "language_unsure")


@functools.cache
def _languages() -> Any:
    """The model of 139 languages."""
    langid = extras.require("py3langid.langid", extra="builders", why="LanguageFilter")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def judge(text: str, filters: Sequence[Filter], dropped: collections.Counter[str]) -> str | None:
    """Applies filters in their order; returns the text, or None and counts the reason.

    Raises:
      UserError: as `Filter.judge`.
    """
    for item in filters:
        judged = item.judge(text)
        if judged.text is None:
            dropped[judged.reason] += 1
            return None
        text = judged.text
    return text
