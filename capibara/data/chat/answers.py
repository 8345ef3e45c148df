"""Sources of preferences, paired or not, and of prompts, from JSON lines that a chat template renders."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from capibara.config import configurable
from capibara.core.fields import FilePath, short
from capibara.core.types import UserError
from capibara.data.chat.conversations import TrainOn, render_example
from capibara.data.chat.formats import Conversation, Preference, Unpaired, read_preference, read_prompt, read_unpaired
from capibara.data.chat.template import ChatTemplate
from capibara.data.sources.sources import DataFormat, Documents, Example, LineDocuments, Source, open_lines
from capibara.data.text import disk
from capibara.data.tokenizers.vocabulary import GUARD

_RENDERED_FIRST = 200  # lines of a split that are rendered before the run starts, to find errors early


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatLines(Source):
    """JSON lines that a chat template renders.

    Attributes:
      files: paths or globs of the training files.
      template: renders the conversations.
      validation_files: paths or globs of the validation files; empty: a fraction of the lines is held out.
      validation_fraction: the fraction that is held out if there are no validation files.
    """

    files: tuple[FilePath, ...]
    template: ChatTemplate
    validation_files: tuple[FilePath, ...] = ()
    validation_fraction: float = 0.03

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction, type(self).__name__)

    @property
    def has_conversations(self) -> bool:
        return True

    def _open(self, split: str, make: Callable[..., LineDocuments]) -> Documents:
        files = self.files, self.validation_files
        documents = open_lines(
            type(self).__name__, files, self.validation_fraction, split, lambda *lines: make(*lines, self)
        )
        for i in np.unique(np.linspace(0, len(documents) - 1, _RENDERED_FIRST).astype(int)):
            documents.example(i)  # raises here if the template cannot render it
        return documents


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceJsonlSource(ChatLines):
    """JSON lines, one preference pair per line: `chosen`, `rejected` and their prompt (see `read_preference`).

    Attributes:
      scored: whether rows are for reward models: an answer's last token is an input too, and a line may have a `margin`, by
        which the score of the chosen answer should exceed the other.
    """

    scored: bool = False

    @property
    def has_labels(self) -> bool:
        return self.scored

    @property
    def data_format(self) -> DataFormat:
        return DataFormat.PREFERENCES

    def open(self, split: str) -> Documents:
        return self._open(split, _Preferences)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class UnpairedJsonlSource(ChatLines):
    """JSON lines, one answer per line: a conversation and its `label`, true or false (see `read_unpaired`).

    Attributes:
      mismatched: whether each prompt also gets the answer of the line before it in the split (the first one that of the
        last), from which KTO estimates the KL divergence of the model from the reference.
    """

    mismatched: bool = False

    @property
    def data_format(self) -> DataFormat:
        return DataFormat.UNPAIRED

    @property
    def has_labels(self) -> bool:
        return True

    def open(self, split: str) -> Documents:
        documents = self._open(split, functools.partial(_Unpaired, mismatched=self.mismatched))
        if self.mismatched and len(documents) < 2:
            raise UserError(
                f"the {split} split has one answer, and UnpairedJsonlSource.mismatched needs that of another line: add "
                "lines, or raise UnpairedJsonlSource.validation_fraction"
            )
        return documents


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptJsonlSource(ChatLines):
    """JSON lines, one prompt per line (see `read_prompt`), with further fields for rewards, such as an answer or a test."""

    @property
    def data_format(self) -> DataFormat:
        return DataFormat.PROMPTS

    def open(self, split: str) -> Documents:
        return self._open(split, _Prompts)


class Lines(LineDocuments, abc.ABC):
    """Lines of a `ChatLines`."""

    def __init__(self, paths: Sequence[str], ranges: np.ndarray, source: ChatLines):
        super().__init__(paths, ranges, [None] * len(paths))
        self._template = source.template

    def __getitem__(self, i: int) -> str:
        return self.example(i).text.replace(GUARD, "")

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "template": self._template.fingerprint()}


class _Preferences(Lines):
    """One preference pair per line."""

    def __init__(self, paths: Sequence[str], ranges: np.ndarray, source: PreferenceJsonlSource):
        super().__init__(paths, ranges, source)
        self._scored = source.scored

    def check(self, i: int) -> None:
        self._pair(i)
        if self._scored:
            self._margin(i)

    def example(self, i: int) -> Example:
        chosen, rejected = (
            render_example(self._template, side, TrainOn.LAST, f"{self.where(i)}: {name}")
            for name, side in self._pair(i)._asdict().items()
        )
        return chosen._replace(rejected=rejected, label=self._margin(i) if self._scored else None)

    def _margin(self, i: int) -> float:
        margin = self.record(i).get("margin", 0.0)
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
            raise UserError(f"{self.where(i)}: margin is {short(margin)}, must be a finite number: leave it out for 0")
        return float(margin)

    def _pair(self, i: int) -> Preference:
        pair = read_preference(self.record(i), self.where(i))
        if pair.chosen == pair.rejected:
            raise UserError(f"{self.where(i)}: chosen and rejected are the same answer: remove the line")
        return pair


class _Unpaired(Lines):
    """One labelled answer per line."""

    def __init__(self, paths: Sequence[str], ranges: np.ndarray, source: ChatLines, *, mismatched: bool):
        super().__init__(paths, ranges, source)
        self._mismatched = mismatched

    def check(self, i: int) -> None:
        self._unpaired(i)

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "mismatched": self._mismatched}

    def example(self, i: int) -> Example:
        (conversation, label), rejected = self._unpaired(i), None
        if self._mismatched:
            answer = self._unpaired(i - 1 if i else len(self) - 1).conversation.messages[-1]
            rejected = self._rendered(conversation._replace(messages=[*conversation.messages[:-1], answer]), i)
        return self._rendered(conversation, i)._replace(rejected=rejected, label=float(label))

    def _rendered(self, conversation: Conversation, i: int) -> Example:
        return render_example(self._template, conversation, TrainOn.LAST, self.where(i))

    def _unpaired(self, i: int) -> Unpaired:
        return read_unpaired(self.record(i), self.where(i))


class _Prompts(Lines):
    """One prompt per line."""

    def check(self, i: int) -> None:
        self._conversation(i)

    def example(self, i: int) -> Example:
        rendered = self._template.render(self._conversation(i), self.where(i), add_generation_prompt=True)
        return Example(rendered.text, loss=())

    def _conversation(self, i: int) -> Conversation:
        return read_prompt(self.record(i), self.where(i))
