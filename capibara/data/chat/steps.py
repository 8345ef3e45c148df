"""A source of solutions whose steps are labelled, for process reward models, from JSON lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from capibara.config import configurable
from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.data.chat.answers import ChatLines, Lines
from capibara.data.chat.formats import read_prompt
from capibara.data.sources.sources import DataFormat, Documents, Example


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsJsonlSource(ChatLines):
    """JSON lines, one solution per line: a prompt as for `read_prompt`, `steps` (or `completions`) and `labels`.

    Each label says whether its step is right; it is read at the end of the separator behind the step, as in TRL's PRM trainer.

    Attributes:
      separator: what ends a step.
    """

    separator: str = "\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator:
            raise UserError("StepsJsonlSource.separator is empty, must end each step: try '\\n'")

    @property
    def has_labels(self) -> bool:
        return True

    @property
    def data_format(self) -> DataFormat:
        return DataFormat.STEPS

    def open(self, split: str) -> Documents:
        return self._open(split, _Steps)


class Solution(NamedTuple):
    """The steps of a solution, and whether each is right."""

    steps: list[str]
    labels: list[bool]


def read_solution(record: Mapping[str, object], where: str) -> Solution:
    """Reads the steps of a record; raises UserError if they and their labels are not there, or are not as many."""
    key = "completions" if "completions" in record and "steps" not in record else "steps"
    steps, labels = record.get(key), record.get("labels")
    # A blank step and its separator may be part of the token that ends the step before.
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise UserError(f"{where}: {key} is {short(steps)}, must be a list of texts, one for each step")
    if not isinstance(labels, list) or not all(isinstance(label, bool) for label in labels):
        raise UserError(f"{where}: labels is {short(labels)}, must be a list of true and false, one for each step")
    if len(labels) != len(steps):
        raise UserError(f"{where}: {key} are {len(steps)} and labels {len(labels)}, must be as many: label each step")
    return Solution(steps, labels)


class _Steps(Lines):
    """One solution per line."""

    def __init__(self, paths: Any, ranges: np.ndarray, source: StepsJsonlSource):
        super().__init__(paths, ranges, source)
        self._separator = source.separator

    def check(self, i: int) -> None:
        read_prompt(self.record(i), self.where(i))
        read_solution(self.record(i), self.where(i))

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "separator": self._separator}

    def example(self, i: int) -> Example:
        record, where = self.record(i), self.where(i)
        solution, prompt = read_solution(record, where), read_prompt(record, where)
        text, ranges = self._template.render(prompt, where, add_generation_prompt=True).text, []
        for step in solution.steps:
            text += step + self._separator
            ranges.append((len(text) - len(self._separator), len(text)))
        return Example(text, loss=tuple(ranges), labels=tuple(map(float, solution.labels)))
