"""Evaluation tasks in Gin: lines of JSON, the prompt made of each, and the metrics of the answers."""

from __future__ import annotations

import dataclasses
import enum
import string
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capibara.config import configurable
from capibara.core import limits
from capibara.core.fields import FilePath, did_you_mean, short
from capibara.core.types import UserError
from capibara.data.chat.formats import Preference, read_preference
from capibara.data.shards import tables
from capibara.data.text import disk
from capibara.data.text.splits import Use
from capibara.evaluation.metrics import choice_accuracy, name_of, pair_accuracy
from capibara.evaluation.remix.remixing import RemixExperts
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.inference.memory_agent.reading import check_sampling
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.thinking.strategy import Strategy
from capibara.retrieval import contexts
from capibara.retrieval.contexts import Retrieval
from capibara.retrieval.index import Index
from capibara.storage import packed

_LONGEST_GROUP = 200
_LINE_VALUES = 1_000_000  # largest number of JSON values in a line


class PromptFormat(enum.StrEnum):
    """The form of a prompt: a text to continue, or a user's message in the chat template."""

    PLAIN = "plain"
    CHAT = "chat"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTask:
    r"""A task; its name is the scope of its bindings: `qa/EvalTask.files = (...)` is the task qa.

    Attributes:
      files: paths or globs of .jsonl files, one JSON object per line; Parquet or CSV files; or data sets of the Hugging Face
        Hub (OWNER/NAME, OWNER/NAME:SPLIT, OWNER/NAME:CONFIG:SPLIT).
      metrics: functions of (targets, predictions), see `metrics`; None: the accuracy of choices or of pairs.
      prompt: the prompt, with keys of a line in braces: "Question: {question}\nAnswer:". Write {{ or }} for a brace.
      target: the key of the right answer, or of a list of right ones; a tuple of keys: the target is a dict of those
        that the line has.
      choices: the key of a list of answers, which are ranked by their probability; nothing is generated. The target is
        then the index of the right one from 0, its letter from A, or its text.
      before_choice: the text between prompt and choice.
      format: plain or chat.
      num_samples: number of answers to each prompt, with seeds from Sampling.seed on.
      sampling: sampling options of the answers.
      thinking: how several texts become one answer: SelfConsistency, BestOfN or Rounds; None: one text is the answer.
      retrieval: the index whose chunks stand where `prompt` has {context}; None: lines have all that a prompt needs.
      remix: how a prompt's experts are re-mixed when its choices are ranked; None: they are not.
      memory: reads the line's document chunk by chunk, with `prompt` as the question; None: lines have no documents.
      pairs: whether a line is a preference pair (`chosen`, `rejected` and their prompt, texts or messages), whose answers the
        model, a reward model, scores; nothing else is then asked of a line.
      group_by: the key of a line's group, such as "subset": metrics are reported for each group as well, with their mean over
        groups; None: they are not.
    """

    files: tuple[FilePath, ...]
    metrics: tuple[Callable[..., Any], ...] | None = None
    prompt: str = "{prompt}"
    target: str | tuple[str, ...] = "target"
    choices: str | None = None
    before_choice: str = " "
    format: PromptFormat = PromptFormat.PLAIN
    num_samples: int = 1
    sampling: Sampling = Sampling(temperature=0.0)
    thinking: Strategy | None = None
    retrieval: Retrieval | None = None
    memory: MemoryAgent | None = None
    remix: RemixExperts | None = None
    pairs: bool = False
    group_by: str | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise UserError(f"EvalTask.num_samples is {self.num_samples}, must be at least 1")
        if self.pairs:
            self._check_pairs()
        if not self.scored_by:
            raise UserError("EvalTask.metrics is empty: name some, e.g. (@exact_match, @token_f1)")
        if self.choices is not None and self.num_samples > 1:
            raise UserError(f"EvalTask.num_samples ({self.num_samples}) must be 1 with EvalTask.choices: set it to 1")
        if self.num_samples > 1 and self.sampling.temperature == 0:
            raise UserError(
                f"EvalTask.num_samples is {self.num_samples} and Sampling.temperature 0: all answers would be the same, set "
                "a temperature above 0"
            )
        if self.num_samples > 1 and self.sampling.beams is not None:
            raise UserError(
                f"EvalTask.num_samples is {self.num_samples} and Sampling.beams is set: all answers would be the same, set "
                "num_samples = 1"
            )
        if self.remix is not None and (shared := {*self.files} & {*self.remix.references}):
            raise UserError(
                f"RemixExperts.references has {min(shared)}, which is in EvalTask.files: the answers of a task must not be known, name "
                "others"
            )
        if self.remix is not None and self.choices is None:
            raise UserError(
                "EvalTask.remix is for choices, and EvalTask.choices is None: set it to their key, or leave remix out"
            )
        self._check_memory()
        if self.thinking is not None:
            self._check_thinking(self.thinking)
        try:
            fields = [part[1:] for part in string.Formatter().parse(self.prompt) if part[1] is not None]
        except ValueError as error:
            raise UserError(
                f"EvalTask.prompt ({self.prompt!r}) cannot be read ({error}): write {{{{ for a brace"
            ) from None
        if not all(name and name.isidentifier() and not form and not conversion for name, form, conversion in fields):
            raise UserError(f"EvalTask.prompt ({self.prompt!r}) must only have names of keys in its braces")
        if self.retrieval is not None and contexts.KEY not in [name for name, _, _ in fields]:
            raise UserError(
                f"EvalTask.retrieval is set and EvalTask.prompt ({self.prompt!r}) has no {{{contexts.KEY}}} where its chunks would "
                "stand: add it"
            )
        self._check_metrics()

    def _check_metrics(self) -> None:
        judged = "pairs" if self.pairs else "texts" if self.choices is None else "choices"
        for metric in self.scored_by:
            if (takes := getattr(metric, "judges", judged)) != judged:
                is_of_pairs = "pairs" in (takes, judged)
                option, value = ("pairs", self.pairs) if is_of_pairs else ("choices", self.choices)
                fix = {"choices": "set it to their key", "pairs": "set it to True"}.get(takes, "remove one of the two")
                raise UserError(
                    f"EvalTask.metrics has {name_of(metric)}, which is for {takes}, but EvalTask.{option} is {value!r}: "
                    f"{'remove one of the two' if self.pairs else fix}"
                )
            if hasattr(metric, "check"):
                metric.check(self.num_samples)

    def _check_pairs(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in ("files", "metrics", "pairs", "group_by"):
                continue
            if (value := getattr(self, field.name)) != field.default:
                raise UserError(
                    f"EvalTask.{field.name} is {short(str(value))}, and EvalTask.pairs True, whose lines are scored as they are: leave "
                    "one out"
                )

    def _check_memory(self) -> None:
        if self.memory is None:
            return
        if self.choices is not None:
            raise UserError(
                f"EvalTask.choices is {self.choices!r} and EvalTask.memory is set, which generates answers: leave one out"
            )
        if self.thinking is not None:
            name = type(self.thinking).__name__
            raise UserError(
                f"EvalTask.thinking is @{name}() and EvalTask.memory is set, which gives one answer: leave one out"
            )
        check_sampling(self.sampling)

    def _check_thinking(self, strategy: Strategy) -> None:
        name = type(strategy).__name__
        if self.choices is not None:
            raise UserError(f"EvalTask.thinking is @{name}(), and EvalTask.choices are ranked: leave one out")
        if self.num_samples > 1:
            raise UserError(
                f"EvalTask.thinking is @{name}(), which gives one answer, and EvalTask.num_samples {self.num_samples}: set it to 1"
            )
        strategy.check(self.sampling)

    @property
    def scored_by(self) -> tuple[Callable[..., Any], ...]:
        if self.metrics is not None:
            return self.metrics
        if self.pairs:
            return (pair_accuracy,)
        return () if self.choices is None else (choice_accuracy,)


@dataclasses.dataclass(frozen=True)
class Item:
    """A line of a task.

    Attributes:
      prompt: the prompt; of a pair empty.
      target: the right answer; of a pair None.
      choices: the choices; empty: the answer is generated.
      document: the document that is read, if the task has a memory.
      pair: the two conversations, if the task is of pairs.
      group: the group, if the task has groups.
    """

    prompt: str
    target: Any
    choices: tuple[str, ...] = ()
    document: str | None = None
    pair: Preference | None = None
    group: str | None = None


def read_items(name: str, task: EvalTask, limit: int | None = None, index: Index | None = None) -> list[Item]:
    """Reads the lines of a task, at most `limit`.

    Args:
      name: of the task.
      task: what is asked of a line.
      limit: the largest number of lines; None: all.
      index: of `task.retrieval`.

    Raises:
      UserError: a file is missing, empty or cut off, or a line lacks a key of the task.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = {path: file for file in task.files for path in tables.with_tables([file], folder, use=Use.EVALUATION)}
        paths, _ = disk.listed(f"{name}/EvalTask.files", tuple(names), disk.RECORDS, Use.EVALUATION)
        records, places = _records(paths, names, limit)
    if not records:
        raise UserError(f"{name}/EvalTask.files ({disk.shown(paths)}) have no lines: write at least one")
    if task.retrieval is not None:
        assert index is not None, "whoever reads a task with a retrieval opens its index"
        texts = task.retrieval.contexts(records, index, f"{name}/EvalTask.files")
        records = [{**record, contexts.KEY: text} for record, text in zip(records, texts)]
    items = [_item(task, record, where) for record, where in zip(records, places)]
    if task.group_by is None:
        return items
    groups = [_group(record, task.group_by, where) for record, where in zip(records, places)]
    return [dataclasses.replace(item, group=group) for item, group in zip(items, groups)]


def _records(
    paths: Sequence[str], names: Mapping[str, str], limit: int | None
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The objects of at most `limit` lines, and their files and numbers; `names` has what users call some files."""
    records: list[Mapping[str, Any]] = []
    places: list[str] = []
    for path in paths:
        name = names.get(path, path)
        try:
            for number, line in packed.lines(path):
                if limit is not None and len(records) >= limit:
                    break
                records.append(_record(line.decode(), f"{name}:{number}"))
                places.append(f"{name}:{number}")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name} cannot be read ({type(error).__name__}): name a .jsonl file in UTF-8") from None
    return records, places


def _record(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = limits.parse_json(line, values=_LINE_VALUES, finite=False)
    except ValueError as error:
        raise UserError(f"{where} is no JSON ({limits.cause(error)}): {line[:60]}") from None
    if not isinstance(record, Mapping):
        raise UserError(f"{where} must be a JSON object, not {type(record).__name__}")
    return record


def _item(task: EvalTask, record: Mapping[str, object], where: str) -> Item:
    if task.pairs:
        return Item("", None, pair=read_preference(record, where))
    used = {name for _, name, _, _ in string.Formatter().parse(task.prompt) if name is not None}
    values = {name: _value(record, name, "EvalTask.prompt", where) for name in used}
    prompt = task.prompt.format(**values)
    if task.choices is not None:
        choices = _value(record, task.choices, "EvalTask.choices", where)
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
            raise UserError(f"{where}: {task.choices!r} must be a list of at least two texts, not {str(choices)[:60]}")
        right = _value(record, task.target, "EvalTask.target", where) if isinstance(task.target, str) else None
        return Item(prompt, _number(right, choices, where), tuple(choices))
    document = None if task.memory is None else _document(record, task.memory, where)
    if isinstance(task.target, str):
        return Item(prompt, _value(record, task.target, "EvalTask.target", where), document=document)
    target = {key: record[key] for key in task.target if key in record}
    if not target:
        _value(record, task.target[0], "EvalTask.target", where)
    return Item(prompt, target, document=document)


def _group(record: Mapping[str, object], key: str, where: str) -> str:
    group = _value(record, key, "EvalTask.group_by", where)
    is_name = isinstance(group, (str, int)) and not isinstance(group, bool)
    if not is_name or not str(group).strip() or not str(group).isprintable() or len(str(group)) > _LONGEST_GROUP:
        raise UserError(
            f"{where}: {key!r} is {str(group)[:60]!r}, must be a name or a whole number, of at most {_LONGEST_GROUP} printable "
            "characters: give the line's group"
        )
    return str(group)


def _document(record: Mapping[str, object], memory: MemoryAgent, where: str) -> str:
    document = _value(record, memory.document, "MemoryAgent.document", where)
    if not isinstance(document, str) or not document.strip():
        raise UserError(
            f"{where}: {memory.document!r} is {str(document)[:60]!r}, must be a text: give the document to read"
        )
    return document


def _value(record: Mapping[str, object], key: str, asks: str, where: str) -> Any:
    if key not in record:
        raise UserError(f"{where} has no {key!r}, which {asks} needs{did_you_mean(key, map(str, record), 'its keys')}")
    return record[key]


def _number(right: object, choices: list[str], where: str) -> int:
    """The index of the right choice."""
    if isinstance(right, str):
        if right in choices:
            return choices.index(right)
        letter = right.strip().upper()
        right = string.ascii_uppercase.find(letter) if len(letter) == 1 else right
    if isinstance(right, int) and 0 <= right < len(choices):
        return int(right)
    raise UserError(
        f"{where}: the right choice is {right!r}, must be a number from 0 to {len(choices) - 1}, a letter or one of them"
    )
