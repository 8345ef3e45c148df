"""What to train on, and how it is laid out in rows: the configuration of the data."""

from __future__ import annotations

import dataclasses
import functools

from capibara.config import configurable
from capibara.data.packing import Packing
from capibara.data.sources import Source
from capibara.data.vocabulary import Vocabulary
from capibara.types import UserError


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """What to train on, and how it is laid out in rows.

    Attributes:
      source: documents with random access; exactly one of this and `mixture_or_task_name` is given.
      mixture_or_task_name: a registered SeqIO task or mixture.
      task_module: the Python module that registers it.
      vocabulary: the tokenizer. A SeqIO task brings its own: naming it here as well lets the model be compiled before
        SeqIO is imported, and it is checked against the task's.
      length: positions in a row.
      packing: how documents share rows.
      append_eos: whether an end token follows every document (a SeqIO task decides this in its preprocessors).
      shuffle: whether training documents and rows come in a seeded order.
      seed: the seed.
      use_cached: take a SeqIO task's examples from its offline cache.
      workers: processes that tokenize and pack; 0 is a thread of this process. SeqIO has threads of its own.
      prefetch: batches kept ready; 0 makes each one when it is asked for.
      window_rows: packing looks at so many rows' worth of documents at a time.
      window_documents: and at so many documents of all rows together, whose rows are then mixed.
    """

    source: Source | None = None
    mixture_or_task_name: str | None = None
    task_module: str | None = None
    vocabulary: Vocabulary | None = None
    length: int = 1024
    packing: Packing = Packing.BEST_FIT
    append_eos: bool = True
    shuffle: bool = True
    seed: int = 0
    use_cached: bool = False
    workers: int = 0
    prefetch: int = 4
    window_rows: int = 64
    window_documents: int = 128

    def __post_init__(self) -> None:
        if (self.source is None) == (self.mixture_or_task_name is None):
            given = "neither" if self.source is None else "both"
            raise UserError(f"Dataset needs one of source and mixture_or_task_name ({given} given)")
        if self.source is not None and self.vocabulary is None:
            raise UserError("Dataset.vocabulary is not set: a source needs one, such as @ByteVocabulary()")
        least_values = {"length": 2, "workers": 0, "prefetch": 0, "window_rows": 1, "window_documents": 1}
        for name, least in least_values.items():
            if getattr(self, name) < least:
                raise UserError(f"Dataset.{name} ({getattr(self, name)}) must be at least {least}")

    @property
    def is_seqio(self) -> bool:
        return self.mixture_or_task_name is not None

    def preload(self) -> None:
        """Starts the imports that this dataset needs in a background thread; call it before a long compilation."""
        if self.is_seqio:
            from capibara.data import tasks

            tasks.preload(self.task_module)

    def get_vocabulary(self) -> Vocabulary:
        """The tokenizer; of a SeqIO task without `vocabulary` this imports SeqIO."""
        return self._task_vocabulary if self.vocabulary is None else self.vocabulary

    @functools.cached_property
    def _task_vocabulary(self) -> Vocabulary:
        from capibara.data import tasks

        return tasks.vocabulary_of(tasks.get(self.mixture_or_task_name, self.task_module))
