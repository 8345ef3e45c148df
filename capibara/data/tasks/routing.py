"""The SeqIO task of a routing set (`capibara prepare routing`): `targets`, and the `domain` that hints the router.

In Gin, as gin/tasks/routing.gin has it:

  Dataset.mixture_or_task_name = @routing_task()
  Dataset.task_module = "capibara.data.routing_tasks"
  routing_task.folder = "data/routing"

In a task module of your own: `register(RoutingTask(folder="data/routing"))`, for mixtures with other tasks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.tasks import tasks
from capibara.data.tokenizers.vocabulary import ByteVocabulary, SentencePieceVocabulary, Vocabulary
from capibara.storage import stores

MODULE = "capibara.data.routing_tasks"
SCHEMA = 1  # version of the records
_SPLITS = ("train", "validation", "test")
_wanted: dict[str, RoutingTask] = {}  # the tasks that Gin has named
_registered: dict[str, RoutingTask] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingTask:
    """A SeqIO task of a routing set.

    Attributes:
      folder: the output folder of `capibara prepare routing`, here or in a bucket.
      name: the task's name.
      vocabulary: bytes, or a SentencePiece model.
    """

    folder: str
    name: str = "routing"
    vocabulary: Vocabulary = ByteVocabulary()

    @functools.cached_property
    def files(self) -> dict[str, dict[str, int]]:
        """By split that has examples: its files, and how many examples each has.

        Raises:
          UserError: the folder is no routing set, or has records of another schema.
        """
        path = f"{self.folder.rstrip('/')}/manifest.json"
        fix = "name the output folder of `capibara prepare routing`"
        try:
            result = limits.parse_json(stores.of(path).read(path, limits.TEXT_BYTES))
        except (OSError, ValueError) as error:
            raise UserError(f"routing_task.folder: {path} cannot be read ({limits.cause(error)}): {fix}") from None
        if not isinstance(result, Mapping) or result.get("kind") != "routing":
            raise UserError(f"routing_task.folder: {path} is not that of a routing set: {fix}")
        try:
            schema, files = (
                result["config"].get("schema"),
                {item["name"]: int(item["records"]) for item in result["files"]},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"routing_task.folder: {path} is corrupted ({limits.cause(error)}): {fix}") from None
        if schema != SCHEMA:
            raise UserError(f"routing_task.folder: {path} has schema {schema}, must be {SCHEMA}: prepare it again")
        splits: dict[str, dict[str, int]] = {}
        for name, records in files.items():
            split = name.partition(".")[0].partition("-")[0]
            if split in _SPLITS and name.endswith(".jsonl") and records:
                splits.setdefault(split, {})[limits.inside(self.folder, name, path)] = records
        return splits


@configurable
def routing_task(folder: str, name: str = "routing", vocabulary: Vocabulary = ByteVocabulary()) -> str:
    """Names the task of a routing set, which is registered when SeqIO is imported; returns its name.

    Args:
      folder: the output folder of `capibara prepare routing`.
      name: the task's name.
      vocabulary: bytes, or a SentencePiece model.

    Raises:
      UserError: the folder is no routing set, or the vocabulary is of another kind.
    """
    task = RoutingTask(folder=folder, name=name, vocabulary=vocabulary)
    if not task.files:
        raise UserError(f"routing_task.folder ({folder}) has no examples: prepare it again")
    if not isinstance(vocabulary, ByteVocabulary | SentencePieceVocabulary | tasks.SeqioVocabulary):
        raise UserError(
            f"routing_task.vocabulary ({type(vocabulary).__name__}) is none of SeqIO's, must be ByteVocabulary or "
            "SentencePieceVocabulary: or read train.jsonl with @JsonlSource()"
        )
    _wanted[name] = task
    if MODULE in sys.modules:
        register(task)
    return name


def register_wanted() -> None:
    """Registers the tasks that Gin has named; `Dataset.task_module` does it.

    Raises:
      UserError: there are none.
    """
    if not _wanted:
        raise UserError(
            f"Dataset.task_module ({MODULE!r}) needs a folder: set Dataset.mixture_or_task_name = @routing_task() and "
            "routing_task.folder"
        )
    for task in _wanted.values():
        register(task)


def register(task: RoutingTask) -> None:
    """Adds a task to SeqIO's registry; one of the same name gives way if it was of another routing set."""
    if _registered.get(task.name) == task:
        return
    seqio = tasks.load()
    if task.name in _registered:
        seqio.TaskRegistry.remove(task.name)
    files = task.files
    seqio.TaskRegistry.add(
        task.name,
        source=seqio.TextLineDataSource(
            split_to_filepattern={split: list(result) for split, result in files.items()},
            num_input_examples={split: sum(result.values()) for split, result in files.items()},
        ),
        preprocessors=[
            _records,
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos,
        ],
        output_features={"targets": seqio.Feature(_of_seqio(task.vocabulary), add_eos=True)},
        shuffle_buffer_size=1024,
    )
    _registered[task.name] = task


def _of_seqio(vocabulary: Vocabulary) -> Any:
    seqio = tasks.load()
    if isinstance(vocabulary, tasks.SeqioVocabulary):
        return vocabulary.vocabulary
    if isinstance(vocabulary, SentencePieceVocabulary):
        return seqio.SentencePieceVocabulary(vocabulary.path)
    return seqio.ByteVocabulary()


def _records(lines: Any) -> Any:
    """Examples with `targets` and `domain`, as text, of lines of JSON."""
    import tensorflow as tf

    def parsed(line: bytes) -> tuple[bytes, bytes]:
        record = json.loads(line)
        return record["text"].encode(), record["domain"].encode()

    def example(line: object) -> dict[str, Any]:
        text, domain = tf.numpy_function(parsed, [line], [tf.string, tf.string])
        return {"targets": tf.ensure_shape(text, []), "domain": tf.ensure_shape(domain, [])}

    return lines.map(example, num_parallel_calls=tf.data.AUTOTUNE)
