"""The configuration of the training data and of how it is packed into rows."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import numpy as np

from capibara.config import MODULE, configurable
from capibara.core import user_modules
from capibara.core.fields import FilePath, as_json, returned
from capibara.core.types import UserError
from capibara.data.packing import packing as packed
from capibara.data.packing.masking import Masking, SpanCorruption
from capibara.data.packing.packing import Packing
from capibara.data.sources.sources import Blocks, DataFormat, Documents, Source
from capibara.data.tokenizers.vocabulary import Vocabulary


class Kind(enum.StrEnum):
    """What a model predicts, and from what.

    CAUSAL: every token from the tokens before it; an example's inputs, if it has any, have no loss.
    PREFIX: as CAUSAL, but an example's inputs attend to each other in both directions; batches mark their positions.
    ENCODER_DECODER: an example's targets from its inputs; span corruption makes a pair of a text without inputs.
    MASKED: the masked tokens of a text from the other tokens.
    """

    CAUSAL = "causal"
    PREFIX = "prefix"
    ENCODER_DECODER = "encoder_decoder"
    MASKED = "masked"


class TooLong(enum.StrEnum):
    """What happens to a conversation that is longer than a row.

    DROP: it is dropped.
    CUT: its end is cut off; if no token with loss is left, it is dropped.
    """

    DROP = "drop"
    CUT = "cut"


class CachedOrder(enum.StrEnum):
    """The order in which the examples of a cached SeqIO task are read for training.

    AUTO: BLOCKS if the task's preprocessors after its cache only map examples, otherwise SEQIO.
    BLOCKS: blocks of the cache's files in a seeded order, with the examples of some blocks mixed. A resumed run seeks to
      its position. Preprocessors that combine examples only see those of some blocks.
    SEQIO: SeqIO's order. A resumed run reads again all examples before its position.
    """

    AUTO = "auto"
    BLOCKS = "blocks"
    SEQIO = "seqio"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The training data and how it is packed into rows.

    Attributes:
      source: the documents; set exactly one of this and `mixture_or_task_name`.
      mixture_or_task_name: a registered SeqIO task or mixture.
      task_module: the Python module that registers it.
      vocabulary: the tokenizer. A SeqIO task has its own; if it is set here as well, the model can be compiled before
        SeqIO is imported, and it is checked against the task's.
      kind: what the model predicts, and from what; it must fit the model.
      length: positions in a row; for an encoder-decoder, of the decoder.
      encoder_length: positions in a row of the encoder.
      inputs_length: for a decoder on a SeqIO task: positions of a row for an example's inputs; the rest are for its
        targets, and both are trimmed, as in T5X. None: an example is only limited, and cut, by the row.
      packing: how documents share rows.
      append_eos: whether to append the end token to every document. SeqIO tasks do so in their preprocessors, chat
        templates in their text.
      shuffle: whether training documents and rows are shuffled.
      seed: seed of the shuffling.
      use_cached: read a SeqIO task's examples from its offline cache, as seqio_cache_tasks writes it.
      cache_dirs: folders or addresses in which caches are searched, in addition to those of the task module.
      cached_order: the order in which cached examples are read for training.
      task_shards: number of streams of a SeqIO task's training data (seqio.ShardInfo). It decides the batches; the number
        of hosts does not. Each stream fills the same number of rows of a batch. If there are more hosts than streams,
        several hosts read and preprocess the same examples: use the largest number of hosts that the run will have, or a
        multiple of it.
      workers: processes that tokenize and pack; 0: a thread of this process; None: one process per chip of this host if
        it has more cores than chips, a thread if it has no chips. SeqIO has threads of its own.
      prefetch: number of batches to prefetch; 0: none.
      window_rows: packing considers documents for at least so many rows at a time.
      window_documents: and for at least so many documents, of all rows together; the rows of a window are shuffled.
      span_corruption: the spans that an encoder-decoder learns to predict in a text without inputs.
      masking: which tokens of a text are masked.
      too_long: what happens to a conversation longer than a row; other documents are cut according to `packing`.
        Preference pairs (a row holds both answers) and prompts are never cut.
      pairs_per_row: the largest number of preference pairs, or of unpaired answers, in a row.
      domains: names of the domains that are marked in the batches, from number 1; empty: none.
    """

    source: Source | None = None
    mixture_or_task_name: str | None = None
    task_module: str | None = dataclasses.field(default=None, metadata=MODULE)
    vocabulary: Vocabulary | None = None
    kind: Kind = Kind.CAUSAL
    length: int = 1024
    encoder_length: int | None = None
    inputs_length: int | None = None
    packing: Packing = Packing.BEST_FIT
    append_eos: bool = True
    shuffle: bool = True
    seed: int = 0
    use_cached: bool = False
    cache_dirs: tuple[FilePath, ...] = ()
    cached_order: CachedOrder = CachedOrder.AUTO
    task_shards: int = 1
    workers: int | None = None
    prefetch: int = 4
    window_rows: int = 64
    window_documents: int = 128
    span_corruption: SpanCorruption = SpanCorruption()
    masking: Masking = Masking()
    too_long: TooLong = TooLong.DROP
    pairs_per_row: int = 8
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.source is None) == (self.mixture_or_task_name is None):
            result = "neither is set" if self.source is None else "both are set"
            raise UserError(f"Dataset needs exactly one of source and mixture_or_task_name: {result}")
        if self.source is not None and self.vocabulary is None:
            raise UserError("Dataset.vocabulary is not set: a source needs one, such as @ByteVocabulary()")
        least_values = {"length": 2, "workers": 0, "prefetch": 0, "window_rows": 1, "window_documents": 1}
        least_values |= {"pairs_per_row": 1, "task_shards": 1}
        for name, least in least_values.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise UserError(f"Dataset.{name} ({getattr(self, name)}) must be at least {least}")
        if self.source is not None and self.task_shards != 1:
            raise UserError(
                f"Dataset.task_shards ({self.task_shards}) is only for SeqIO tasks, and Dataset.source is set: leave it out"
            )
        if (self.kind is Kind.ENCODER_DECODER) != (self.encoder_length is not None):
            fix = f"set it, e.g. to {4 * self.length}" if self.encoder_length is None else "leave it out"
            raise UserError(f"Dataset.encoder_length ({self.encoder_length}) with kind {str(self.kind)!r}: {fix}")
        if self.encoder_length is not None and self.encoder_length < 2:
            raise UserError(f"Dataset.encoder_length ({self.encoder_length}) must be at least 2")
        if self.inputs_length is not None:
            if not self.is_seqio or self.kind not in (Kind.CAUSAL, Kind.PREFIX):
                raise UserError(
                    f"Dataset.inputs_length ({self.inputs_length}) is only for a decoder on a SeqIO task: leave it out"
                )
            if not 0 < self.inputs_length < self.length:
                raise UserError(
                    f"Dataset.inputs_length ({self.inputs_length}) must be from 1 to below Dataset.length ({self.length}), "
                    f"which holds inputs and targets: try {self.length // 2}"
                )
        if self.kind is Kind.ENCODER_DECODER and self.packing is Packing.CONCAT:
            raise UserError("Dataset.packing ('concat') would separate inputs from targets: try 'best_fit' or 'none'")
        if self.source is not None and self.source.has_conversations:
            if self.kind is not Kind.CAUSAL:
                raise UserError(
                    f"Dataset.kind ({str(self.kind)!r}) cannot be trained on conversations: only 'causal' can"
                )
            if self.packing is Packing.CONCAT:
                raise UserError("Dataset.packing ('concat') would cut conversations: try 'best_fit' or 'none'")
        if self.data_format is not DataFormat.TEXTS and self.too_long is TooLong.CUT:
            raise UserError(f"Dataset.too_long ('cut') is not supported for {self.data_format}: set 'drop'")
        if len(set(self.domains)) != len(self.domains) or not all(self.domains):
            raise UserError(f"Dataset.domains ({self.domains}) must be distinct names, and none may be empty")

    @property
    def is_seqio(self) -> bool:
        return self.mixture_or_task_name is not None

    @property
    def data_format(self) -> DataFormat:
        """What the documents are."""
        return DataFormat.TEXTS if self.source is None else self.source.data_format

    def documents(self, split: str) -> Documents | Blocks:
        """Of `source`, of "train" or "validation"; raises as Source.open."""
        assert self.source is not None, "a SeqIO task has no documents to open"
        name = type(self.source).__name__
        result = self.source.open(split)
        returned(result, (Documents, Blocks), f"{name}.open")
        if user_modules.own_class(result) is not None:
            as_json(result.fingerprint(), f"{type(result).__name__}.fingerprint")
            with user_modules.attributed("the number of documents", result):
                count = len(result)
            if count == 0:
                raise UserError(f"{name}.open returned no document for {split!r}: hold some out, or add data")
        return result

    @property
    def has_answers(self) -> bool:
        """Whether the documents are answers, paired or not, or solutions."""
        return self.data_format in (DataFormat.PREFERENCES, DataFormat.UNPAIRED, DataFormat.STEPS)

    @property
    def has_labels(self) -> bool:
        """Whether batches have `labels`."""
        return self.source is not None and self.source.has_labels

    @property
    def scores_answers(self) -> bool:
        """Whether the documents are pairs for a reward model."""
        return self.data_format is DataFormat.PREFERENCES and self.has_labels

    @property
    def most_pairs(self) -> int:
        """The largest number of preference pairs, or of unpaired answers, in a row."""
        return 1 if self.packing is Packing.NONE else self.pairs_per_row

    def batch_spec(self, rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every array of a batch of `rows` rows, by its key."""
        return packed.batch_spec(rows, self.length, **self._entries)

    def empty_batch(self, rows: int) -> dict[str, np.ndarray]:
        """A batch of `rows` rows of padding."""
        return packed.empty_batch(rows, self.length, self.get_vocabulary().pad_id, **self._entries)

    @property
    def _entries(self) -> dict[str, Any]:
        """Options of `packing.batch_spec`."""
        numbers = self.data_format is not DataFormat.TEXTS
        marks = {
            "domains": bool(self.domains),
            "numbers": numbers,
            "prefix": self.kind is Kind.PREFIX,
            "labels": self.has_labels,
        }
        return {"encoder_length": self.encoder_length} | marks

    def preload(self) -> None:
        """Starts the imports that this dataset needs in a background thread; call it before a long compilation."""
        if self.is_seqio:
            from capibara.data.tasks import tasks

            tasks.preload(self.task_module)

    def get_vocabulary(self) -> Vocabulary:
        """The tokenizer; of a SeqIO task without `vocabulary` this imports SeqIO."""
        return self._task_vocabulary if self.vocabulary is None else self.vocabulary

    @functools.cached_property
    def _task_vocabulary(self) -> Vocabulary:
        from capibara.data.tasks import tasks

        assert self.mixture_or_task_name is not None
        return tasks.vocabulary_of(tasks.get(self.mixture_or_task_name, self.task_module))
