"""What to train on, and how it is laid out in rows: the configuration of the data."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import numpy as np

from capibara.config import MODULE, configurable
from capibara.core.types import UserError
from capibara.data.packing import packing as packed
from capibara.data.packing.masking import Masking, SpanCorruption
from capibara.data.packing.packing import Packing
from capibara.data.sources.sources import Blocks, DataFormat, Documents, Source
from capibara.data.tokenizers.vocabulary import Vocabulary


class Kind(enum.StrEnum):
    """What a model reads and predicts.

    CAUSAL: every token from those before it; an example's inputs, where it has some, carry no loss.
    PREFIX: as CAUSAL, and the batches say which places read an example's inputs, which see each other both ways.
    ENCODER_DECODER: an example's targets from its inputs; a text without inputs becomes a pair by span corruption.
    MASKED: the masked tokens of a text from those around them.
    """

    CAUSAL = "causal"
    PREFIX = "prefix"
    ENCODER_DECODER = "encoder_decoder"
    MASKED = "masked"


class TooLong(enum.StrEnum):
    """What becomes of a conversation that is longer than a row.

    DROP: it is left out.
    CUT: its end is; what is left is left out as well if nothing in it carries loss.
    """

    DROP = "drop"
    CUT = "cut"


class CachedOrder(enum.StrEnum):
    """In which order the examples of a cached SeqIO task are read for training.

    AUTO: as BLOCKS where the task's preprocessors after its cache only map, else as SEQIO.
    BLOCKS: blocks of the cache's files in a seeded order, the examples of some of them mixed: a run resumes by position.
      Preprocessors that combine examples do so within some blocks.
    SEQIO: as SeqIO reads them: a run that resumes reads all that was before.
    """

    AUTO = "auto"
    BLOCKS = "blocks"
    SEQIO = "seqio"


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
      kind: what is read and predicted: it must fit the model.
      length: positions in a row; of an encoder-decoder, of its decoder.
      encoder_length: positions in a row of its encoder.
      inputs_length: of a SeqIO task that a decoder reads, tokens of an example's inputs, the rest of a row being for its
        targets: each is trimmed to its part, as in T5X. None: only the row limits them, and what is longer is cut.
      packing: how documents share rows.
      append_eos: whether an end token follows every document (a SeqIO task decides this in its preprocessors, a chat
        template by what it writes).
      shuffle: whether training documents and rows come in a seeded order.
      seed: the seed.
      use_cached: take a SeqIO task's examples from its offline cache, as seqio_cache_tasks writes it.
      cache_dirs: folders or addresses in which such caches are looked for, beside those that the task module names.
      cached_order: in which order they are read for training.
      task_shards: streams of a SeqIO task's training data: how many there are decides the batches, not the number of
        hosts. Each is a seqio.ShardInfo and has as many rows of a batch; hosts that are more than the streams read and
        preprocess the same examples, so the most hosts that a run will have, or a multiple of them, is best.
      workers: processes that tokenize and pack; 0 is a thread of this process, None one process a chip of this host where
        it has more cores than chips, and a thread where there is none. SeqIO has threads of its own.
      prefetch: batches kept ready; 0 makes each one when it is asked for.
      window_rows: packing looks at so many rows' worth of documents at a time.
      window_documents: and at so many documents of all rows together, whose rows are then mixed.
      span_corruption: which spans of a text an encoder-decoder is to tell.
      masking: which tokens of a text are masked.
      too_long: what becomes of a conversation longer than a row; other documents are cut as `packing` says. Preference
        pairs, of which a row holds both answers, and prompts are never cut.
      pairs_per_row: preference pairs that may share a row, at most.
      domains: domains whose documents are marked in the batches: number i + 1 is the i-th of these; empty: no marks.
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
    cache_dirs: tuple[str, ...] = ()
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
            given = "neither" if self.source is None else "both"
            raise UserError(f"Dataset needs one of source and mixture_or_task_name ({given} given)")
        if self.source is not None and self.vocabulary is None:
            raise UserError("Dataset.vocabulary is not set: a source needs one, such as @ByteVocabulary()")
        least_values = {"length": 2, "workers": 0, "prefetch": 0, "window_rows": 1, "window_documents": 1}
        least_values |= {"pairs_per_row": 1, "task_shards": 1}
        for name, least in least_values.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise UserError(f"Dataset.{name} ({getattr(self, name)}) must be at least {least}")
        if self.source is not None and self.task_shards != 1:
            raise UserError(
                f"Dataset.task_shards ({self.task_shards}) is for SeqIO tasks, and each row of a source has a stream of its "
                "own: leave it out"
            )
        if (self.kind is Kind.ENCODER_DECODER) != (self.encoder_length is not None):
            fix = f"set it, e.g. to {4 * self.length}" if self.encoder_length is None else "leave it out"
            raise UserError(f"Dataset.encoder_length ({self.encoder_length}) with kind {str(self.kind)!r}: {fix}")
        if self.encoder_length is not None and self.encoder_length < 2:
            raise UserError(f"Dataset.encoder_length ({self.encoder_length}) must be at least 2")
        if self.inputs_length is not None:
            if not self.is_seqio or self.kind not in (Kind.CAUSAL, Kind.PREFIX):
                raise UserError(
                    f"Dataset.inputs_length ({self.inputs_length}) is of SeqIO tasks that a decoder reads: leave it out"
                )
            if not 0 < self.inputs_length < self.length:
                raise UserError(
                    f"Dataset.inputs_length ({self.inputs_length}) must be from 1 to below Dataset.length ({self.length}), "
                    f"which holds inputs and targets: try {self.length // 2}"
                )
        if self.kind is Kind.ENCODER_DECODER and self.packing is Packing.CONCAT:
            raise UserError("Dataset.packing ('concat') would cut inputs off their targets: try 'best_fit' or 'none'")
        if self.source is not None and self.source.has_conversations:
            if self.kind is not Kind.CAUSAL:
                raise UserError(
                    f"Dataset.kind ({str(self.kind)!r}) cannot be trained on conversations: only 'causal' can"
                )
            if self.packing is Packing.CONCAT:
                raise UserError("Dataset.packing ('concat') would cut conversations: try 'best_fit' or 'none'")
        if self.data_format is not DataFormat.TEXTS and self.too_long is TooLong.CUT:
            raise UserError(f"Dataset.too_long ('cut') cannot be done with {self.data_format}: only 'drop' can")
        if len(set(self.domains)) != len(self.domains) or not all(self.domains):
            raise UserError(f"Dataset.domains ({self.domains}) must be different names, none of them empty")

    @property
    def is_seqio(self) -> bool:
        return self.mixture_or_task_name is not None

    @property
    def data_format(self) -> DataFormat:
        """What the documents are for."""
        return DataFormat.TEXTS if self.source is None else self.source.data_format

    def documents(self, split: str) -> Documents | Blocks:
        """Of `source`, of "train" or "validation"; raises as Source.open."""
        assert self.source is not None, "a SeqIO task has no documents to open"
        return self.source.open(split)

    @property
    def most_pairs(self) -> int:
        """Preference pairs in a row, at most."""
        return 1 if self.packing is Packing.NONE else self.pairs_per_row

    def batch_spec(self, rows: int) -> dict[str, tuple[tuple[int, int], np.dtype]]:
        """Shape and dtype of every array of a batch of `rows` rows, by its key."""
        return packed.batch_spec(rows, self.length, **self._entries)

    def empty_batch(self, rows: int) -> dict[str, np.ndarray]:
        """A batch of `rows` rows of padding."""
        return packed.empty_batch(rows, self.length, self.get_vocabulary().pad_id, **self._entries)

    @property
    def _entries(self) -> dict[str, Any]:
        """What batches have besides."""
        numbers = self.data_format is not DataFormat.TEXTS
        marks = {"domains": bool(self.domains), "numbers": numbers, "prefix": self.kind is Kind.PREFIX}
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
