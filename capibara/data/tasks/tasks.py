"""SeqIO tasks and mixtures by name (https://github.com/google/seqio), and their vocabularies.

SeqIO imports TensorFlow, which takes seconds: it is imported inside functions, or by `preload` in a background thread, and
never uses the accelerators.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import difflib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from capibara.core import extras, user_modules
from capibara.core.types import UserError
from capibara.data.tasks.quiet import without_cpp_logs
from capibara.data.tokenizers.vocabulary import Vocabulary, sentencepiece_pieces

_LOCK = threading.RLock()
# Held while a pipeline is built: SeqIO keeps the next seed of its preprocessors in a global variable.
BUILDING = threading.RLock()


def preload(task_module: str | None = None) -> threading.Thread:
    """Imports SeqIO, and `task_module`, in a background thread; import JAX and Flax before.

    A failure is logged (level info); the next use of the task imports again and raises the error.
    """

    def work() -> None:
        try:
            load(task_module)
        except Exception:  # raised again by the call that needs the result
            logging.getLogger(__name__).info("SeqIO or the task module failed to import early", exc_info=True)

    thread = threading.Thread(target=work, name="capibara-seqio", daemon=True)
    thread.start()
    return thread


def load(task_module: str | None = None) -> Any:
    """The seqio module, after `task_module` has registered its tasks."""
    with _LOCK:
        # TensorFlow reads these when it is imported, and prints a lot on stderr without them.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
        with contextlib.nullcontext() if "tensorflow" in sys.modules else without_cpp_logs():
            tf = extras.require("tensorflow", extra="seqio", why="SeqIO tasks")
            for kind in ("GPU", "TPU"):
                tf.config.set_visible_devices([], kind)
        # SeqIO warns that its FunctionDataSource repeats data after a restart; here it does not.
        logging.getLogger("absl").addFilter(_is_no_restart_advice)
        with contextlib.nullcontext() if "seqio" in sys.modules else _lazy_imports_of_this_thread():
            seqio = extras.require("seqio", extra="seqio", why="SeqIO tasks")
        if task_module is not None:
            _import_task_module(task_module)
        return seqio


@contextlib.contextmanager
def _lazy_imports_of_this_thread() -> Iterator[None]:
    """Within it, `etils.epy.lazy_imports` postpones imports of this thread only.

    TFDS uses it. It replaces `builtins.__import__`, so an import in any other thread would fail meanwhile, such as those of
    gcsfs when it opens a file of a checkpoint.
    """
    from etils.epy import lazy_imports_utils

    if not hasattr(lazy_imports_utils, "_lazy_import"):  # another version of etils
        yield
        return
    postpone, import_now, here = lazy_imports_utils._lazy_import, builtins.__import__, threading.get_ident()

    def imported(name: str, *rest: Any, **options: Any) -> Any:
        if threading.get_ident() == here:
            return postpone(name, *rest, **options)
        for callback in ("error_callback", "success_callback"):
            options.pop(callback, None)
        return import_now(name, *rest, **options)

    lazy_imports_utils._lazy_import = imported
    try:
        yield
    finally:
        lazy_imports_utils._lazy_import = postpone


def _is_no_restart_advice(record: logging.LogRecord) -> bool:
    return "uncached FunctionDataset" not in record.getMessage()


def get(name: str, task_module: str | None = None) -> Any:
    """The seqio.Task or seqio.Mixture called `name`.

    Raises:
      UserError: there is no such module or task; the message has the most similar names.
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
        user_modules.load(task_module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{task_module}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"task_module ({task_module!r}) cannot be imported: no module {error.name!r} (is its folder on PYTHONPATH?)"
        ) from error


def add_cache_dirs(folders: Sequence[str]) -> None:
    """Adds folders in which SeqIO searches the caches of tasks."""
    seqio = load()
    for folder in folders:
        if folder not in seqio.get_global_cache_dirs():
            seqio.add_global_cache_dirs([folder])


def parts(task: object, split: str) -> list[str]:
    """The names of a mixture's tasks, or of the task itself, if they have the split."""
    return [part.name for part in getattr(task, "tasks", [task]) if split in splits_of(part)]


def lengths(task: Any, length: int, encoder_length: int | None, inputs_length: int | None) -> dict[str, int]:
    """Positions of each feature; the arguments are fields of Dataset."""
    inputs, targets = encoder_length or inputs_length or length, length - (inputs_length or 0)
    return {name: inputs if name == "inputs" else targets for name in task.output_features}


def splits_of(task: Any) -> Sequence[str]:
    """The splits of a task or mixture.

    Raises:
      UserError: its source is a TFDS dataset that is not prepared on this machine.
    """
    try:
        return tuple(task.splits)
    except (ValueError, OSError) as error:
        result = [part.source for part in getattr(task, "tasks", [task])]
        named = [
            f"{item.tfds_dataset.name} in {item.tfds_dataset.data_dir}"
            for item in result
            if hasattr(item, "tfds_dataset")
        ]
        reason = " ".join(str(error).split("\n")[0].split())
        raise UserError(
            f"SeqIO task {task.name!r} has no splits ({reason}): is its dataset ({', '.join(named) or 'its source'}) prepared "
            "on this machine, and tfds_data_dir its folder?"
        ) from error


def vocabulary_of(task: Any, feature: str = "targets") -> Vocabulary:
    """The vocabulary of a task's or mixture's output feature."""
    if feature not in task.output_features:
        names = ", ".join(task.output_features)
        raise UserError(f"SeqIO task {task.name!r} has no output feature {feature!r} (it has: {names})")
    return SeqioVocabulary(vocabulary=task.output_features[feature].vocabulary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioVocabulary(Vocabulary):
    """A seqio.Vocabulary; as in T5X, the padding id begins a document."""

    vocabulary: Any
    size_multiple: int = 128
    extra_ids: int = 0

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
            raise UserError(f"the SeqIO vocabulary {self.vocabulary} has no end token: set its eos_id")
        return eos_id

    @property
    def sentinel_ids(self) -> Sequence[int]:
        """SeqIO's extra ids from the top, as in T5; if there are none, the unused ids above the others."""
        size, extra = self.vocabulary.vocab_size, self.vocabulary.extra_ids
        return range(size - 1, size - extra - 1, -1) if extra else super().sentinel_ids

    def encode(self, text: str) -> list[int]:
        return list(self.vocabulary.encode(text))

    @functools.cached_property
    def pieces(self) -> Sequence[bytes]:
        seqio, vocabulary = load(), self.vocabulary
        if isinstance(vocabulary, seqio.ByteVocabulary):
            pieces = [b""] * 3 + [bytes([i]) for i in range(256)]
        elif isinstance(vocabulary, seqio.SentencePieceVocabulary):
            # seqio appends its sentinels to the model as pieces with text, but they are special.
            pieces = sentencepiece_pieces(vocabulary.tokenizer)[: vocabulary.vocab_size - vocabulary.extra_ids]
        elif isinstance(vocabulary, seqio.PassThroughVocabulary):
            pieces = []
        else:
            special = (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id)
            pieces = [
                b"" if i in special else str(vocabulary.decode([i])).encode() for i in range(vocabulary.vocab_size)
            ]
        return pieces + [b""] * (vocabulary.vocab_size - len(pieces))
