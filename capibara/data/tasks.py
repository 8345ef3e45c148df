"""SeqIO tasks and mixtures as a feed (https://github.com/google/seqio).

SeqIO brings TensorFlow, whose import takes seconds: it is imported inside functions, in a background thread where
`preload` was called in time, and never touches the accelerators.

The feed follows T5X: an example's `inputs`, if it has any, come before its `targets` and carry no loss; the first
input of an example is the padding id. Unlike T5X, an example longer than a row is not trimmed but cut.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara import extras
from capibara.data.feeds import Feed, Share, layout_of, one_stream
from capibara.data.packing import Document
from capibara.data.stream import RowStream, State
from capibara.data.vocabulary import Vocabulary, sentencepiece_pieces
from capibara.types import Batch, UserError

if TYPE_CHECKING:
    from capibara.data.loader import Dataset

_LOCK = threading.RLock()


def preload(task_module: str | None = None) -> threading.Thread:
    """Imports SeqIO, and `task_module`, in a background thread; import JAX and Flax before.

    A failure is not reported here: whoever needs the task imports again and meets it.
    """

    def work() -> None:
        try:
            load(task_module)
        except Exception:  # shown, as it deserves, by the call that needs the result
            pass

    thread = threading.Thread(target=work, name="capibara-seqio", daemon=True)
    thread.start()
    return thread


def load(task_module: str | None = None) -> Any:
    """The seqio module, after `task_module` has registered its tasks."""
    with _LOCK:
        # TensorFlow reads these when it is imported, and says much on stderr without them.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
        tf = extras.require("tensorflow", extra="seqio", why="SeqIO tasks")
        for kind in ("GPU", "TPU"):
            tf.config.set_visible_devices([], kind)
        # SeqIO advises against its own FunctionDataSource because a restart repeats data; ours does not.
        logging.getLogger("absl").addFilter(_is_no_restart_advice)
        seqio = extras.require("seqio", extra="seqio", why="SeqIO tasks")
        if task_module is not None:
            _import_task_module(task_module)
        return seqio


def _is_no_restart_advice(record: logging.LogRecord) -> bool:
    return "uncached FunctionDataset" not in record.getMessage()


def get(name: str, task_module: str | None = None) -> Any:
    """The seqio.Task or seqio.Mixture called `name`.

    Raises:
      UserError: there is no module or no task of that name; the nearest names are shown.
    """
    seqio = load(task_module)
    if name in seqio.MixtureRegistry.names():
        return seqio.MixtureRegistry.get(name)
    if name in seqio.TaskRegistry.names():
        return seqio.TaskRegistry.get(name)
    known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known[:10]) or 'none'}"
    where = f" after importing {task_module}" if task_module else " (Dataset.task_module is not set)"
    raise UserError(f"mixture_or_task_name ({name!r}) is not registered{where}: {hint}")


def _import_task_module(task_module: str) -> None:
    try:
        importlib.import_module(task_module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{task_module}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"task_module ({task_module!r}) cannot be imported: no module {error.name!r} (is its folder on PYTHONPATH?)"
        ) from error


def vocabulary_of(task: Any, feature: str = "targets") -> Vocabulary:
    """The vocabulary of a task's or mixture's output feature."""
    if feature not in task.output_features:
        names = ", ".join(task.output_features)
        raise UserError(f"SeqIO task {task.name!r} has no output feature {feature!r} (it has: {names})")
    return SeqioVocabulary(vocabulary=task.output_features[feature].vocabulary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioVocabulary(Vocabulary):
    """A seqio.Vocabulary; as in T5X the padding id begins a document."""

    vocabulary: Any
    size_multiple: int = 128

    @property
    def pad_id(self) -> int:
        return self.vocabulary.pad_id

    @property
    def bos_id(self) -> int:
        return self.vocabulary.pad_id

    @property
    def eos_id(self) -> int:
        eos_id = self.vocabulary.eos_id
        if eos_id is None:
            raise UserError(f"the SeqIO vocabulary {self.vocabulary} has no end token: give it an eos_id")
        return eos_id

    def encode(self, text: str) -> list[int]:
        return list(self.vocabulary.encode(text))

    @functools.cached_property
    def _pieces(self) -> Sequence[bytes]:
        seqio, vocabulary = load(), self.vocabulary
        if isinstance(vocabulary, seqio.ByteVocabulary):
            pieces = [b""] * 3 + [bytes([i]) for i in range(256)]
        elif isinstance(vocabulary, seqio.SentencePieceVocabulary):
            # seqio appends its sentinels to the model, as pieces with text; they are special all the same.
            pieces = sentencepiece_pieces(vocabulary.tokenizer)[: vocabulary.vocab_size - vocabulary.extra_ids]
        elif isinstance(vocabulary, seqio.PassThroughVocabulary):
            pieces = []
        else:
            special = (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id)
            pieces = [
                b"" if i in special else str(vocabulary.decode([i])).encode() for i in range(vocabulary.vocab_size)
            ]
        return pieces + [b""] * (vocabulary.vocab_size - len(pieces))


class TaskFeed(Feed):
    """Rows of a SeqIO task or mixture: one stream a host, over its seqio.ShardInfo."""

    def __init__(self, dataset: Dataset, share: Share):
        super().__init__(dataset, share)
        self._task = get(dataset.mixture_or_task_name, dataset.task_module)
        self._endless = share.epochs is None
        self.first_row = share.shard_index if self._endless else 0
        if share.split not in self._task.splits:
            splits = ", ".join(sorted(self._task.splits))
            raise UserError(f"SeqIO task {self._task.name!r} has no split {share.split!r} (it has: {splits})")
        _check_same(vocabulary_of(self._task), dataset.get_vocabulary(), self._task.name)

    def initial_state(self) -> list[State]:
        return [State()]

    def settings(self) -> dict[str, Any]:
        # Examples of a task are dealt out by host, so a state means the same only on as many hosts.
        return {**super().settings(), "hosts": self.share.shard_count if self._endless else 1}

    def data_fingerprint(self) -> dict[str, Any]:
        tasks = getattr(self._task, "tasks", [self._task])
        return {"task": self._task.name, "sources": {task.name: self._source_fingerprint(task) for task in tasks}}

    def _source_fingerprint(self, task: Any) -> dict[str, Any]:
        split = self.share.split
        if split not in task.splits:
            return {}
        digest = hashlib.blake2b(digest_size=8)
        for shard in task.source.list_shards(split):
            digest.update(f"{os.path.basename(shard)}\0".encode())
            if os.path.isfile(shard):
                digest.update(f"{os.path.getsize(shard)}\0{os.stat(shard).st_mtime_ns}\0".encode())
        return {"examples": task.num_input_examples(split), "shards": digest.hexdigest()}

    def batches(self, states: Sequence[State]) -> Iterator[tuple[Batch, Sequence[State]]]:
        seeds = (self.dataset.seed, self.share.shard_index) if self.shuffles else None
        stream = RowStream(self._documents, layout_of(self.dataset, 1, seeds), state=states[0])
        return one_stream(stream, self.share, self.dataset, private=self._endless)

    def _documents(self, begin: int) -> Iterator[Document]:
        bos_id = self.dataset.get_vocabulary().bos_id
        for example in self._examples().skip(begin).as_numpy_iterator():
            targets, inputs = _ids(example, "targets", self._task.name), example.get("inputs")
            if inputs is None or not len(inputs):
                yield Document(targets, None, bos_id)
                continue
            inputs = _ids(example, "inputs", self._task.name)
            weights = np.ones(len(inputs) + len(targets), np.float32)
            weights[: len(inputs)] = 0
            yield Document(np.concatenate([inputs, targets]), weights, bos_id)

    def _examples(self) -> Any:
        """The tf.data.Dataset of this host's examples, in an order that depends on the seed alone."""
        seqio, share = load(), self.share
        by_host = self._endless and share.shard_count > 1
        arguments = dict(
            sequence_length={name: self.dataset.length for name in self._task.output_features},
            split=share.split,
            use_cached=self.dataset.use_cached,
            shuffle=self.shuffles,
            seed=self.dataset.seed,
            shard_info=seqio.ShardInfo(share.shard_index, share.shard_count) if by_host else None,
            num_epochs=share.epochs,
            trim_output_features=False,
        )
        try:
            if self._endless or isinstance(self._task, seqio.Task):
                return self._task.get_dataset(**arguments)
            # A mixture stops at its first exhausted task: a pass over all examples takes one task after the other.
            parts = [task.get_dataset(**arguments) for task in self._task.tasks if share.split in task.splits]
            features = tuple(self._task.output_features)
            parts = [part.map(lambda example: {name: example[name] for name in features}) for part in parts]
            return functools.reduce(lambda first, second: first.concatenate(second), parts)
        except ValueError as error:
            raise UserError(f"SeqIO task {self._task.name!r}: {' '.join(str(error).split())}") from error


def _ids(example: dict[str, Any], feature: str, name: str) -> np.ndarray:
    ids = example[feature]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(
            f"SeqIO task {name!r}: {feature} must be a list of token ids, not {ids.dtype} {ids.shape}: "
            "add seqio.preprocessors.tokenize"
        )
    return ids.astype(np.int32, copy=False)


def _check_same(task: Vocabulary, given: Vocabulary, name: str) -> None:
    """The task's ids must mean the same in the vocabulary that was given in Gin (which may have unused ids more)."""
    common = min(task.size, given.size)
    same = (
        np.array_equal(task.token_bytes()[:common], given.token_bytes()[:common])
        and not task.token_bytes()[common:].any()
        and (task.pad_id, task.eos_id) == (given.pad_id, given.eos_id)
        and task.decode(range(common)) == given.decode(range(common))
    )
    if not same:
        raise UserError(
            f"Dataset.vocabulary ({given}) differs from the one of SeqIO task {name!r} "
            f"(sizes {given.size} and {task.size}): leave Dataset.vocabulary out, or give the same"
        )
