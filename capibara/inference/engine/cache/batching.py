"""Configuration of batching, and the sizes that programs are compiled for."""

from __future__ import annotations

import dataclasses
import enum

from capibara import sharding
from capibara.config import configurable
from capibara.core.types import UserError

SMALLEST_BUCKET = 32
PREFILL_TOKENS, PART_TOKENS = 1024, 128
"""Prompt tokens to read between decode steps; and where parts of a prompt are read into its slot, on a CPU."""
LEAST_PART = 16
"""A prompt that does not fit among the tokens of a step is cut if so many tokens of it do."""
MIXED_ROWS = 8
"""Slots of the smaller of the two programs that read prompts beside the next tokens of texts."""


class WhenFull(enum.StrEnum):
    """What happens to a row that fills its slot: it ends, or its last tokens are reread for every new one."""

    STOP = "stop"
    SLIDE = "slide"


class CacheDtype(enum.StrEnum):
    """Dtype of keys and values in slots: the compute dtype, bfloat16, or 8 bits with a scale per token and head."""

    COMPUTE = "compute"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class Drafts(enum.StrEnum):
    """What guesses a row's next tokens: its own text, or the model's modules for multi-token prediction."""

    LOOKUP = "lookup"
    MTP = "mtp"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How requests are batched.

    Attributes:
      slots: number of requests that are decoded together.
      when_full: what happens when a row is full.
      prefix_cache_mib: memory for rows whose beginnings later prompts may share; 0: none. The results of a prompt that
        is read in two parts differ in the last bits from those of one read at once.
      prefill_tokens: approximate number of prompt tokens to read between decode steps: longer prompts are split, short
        ones are batched up to this size. None: 1024; 128 on a CPU with pages, where other texts would wait for long, and
        where parts are read into the slot.
      cache_dtype: dtype of cached keys and values.
      draft_tokens: how many tokens a step guesses for each row, and verifies at once (Leviathan et al. 2023,
        arXiv:2211.17192). The text is unaffected, with temperature too: a guess is accepted if the row's seed draws it.
        0: none.
      drafts: where the guesses come from. "lookup" repeats what followed an earlier occurrence of the row's last tokens
        (Saxena 2023): it pays if texts repeat their prompts, and rows are few. "mtp" takes them from the first module of
        DecoderConfig.mtp, which is applied to its own result for each further token.
      decode_steps: most tokens that a row gets in one program. With more than one, the host's work is done once for all
        of them, a stream gets them together, and the host processes them before the next program starts; with one, it
        processes the token while the next program runs. None: 4 on a CPU, where both would share the cores; up to 4
        that take 0.1 s together if the engine has its own thread (serve, chat); else 1. It is 1 while a prompt is read
        or tokens are guessed, and never more than any row's remaining tokens, or than the rest of a limited thought.
      page_size: tokens in a page of the cache (Kwon et al. 2023, arXiv:2309.06180): a row has as many pages as its
        tokens need, and gets more as it grows. 0: no pages; each slot has memory for its whole length.
      pages: size of the pool that all slots share; None: enough for full slots. With fewer there can be more slots than
        full rows would fit in memory: when no page is left, the latest request returns to the queue and is reread
        later, with the same text. A text ends if it would need more than all pages.
    """

    slots: int = 8
    when_full: WhenFull = WhenFull.STOP
    prefix_cache_mib: int = 256
    prefill_tokens: int | None = None
    cache_dtype: CacheDtype = CacheDtype.COMPUTE
    draft_tokens: int = 0
    drafts: Drafts = Drafts.LOOKUP
    decode_steps: int | None = None
    page_size: int = 0
    pages: int | None = None

    @property
    def most_steps(self) -> int:
        """Most tokens that a row gets in one program."""
        if self.draft_tokens:
            return 1
        return self.decode_steps or (4 if sharding.platform() == "cpu" else 1)

    @property
    def spare(self) -> int:
        """Extra positions of layers with a window, so that tokens can be taken back.

        These are wrong guesses, or tokens after an end: as many as a program yields, minus one, since a query with a
        window needs one earlier position fewer.
        """
        # Only rows in the prefix cache must be complete after their end.
        return self.draft_tokens or (self.most_steps - 1 if self.prefix_cache_mib else 0)

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise UserError(f"EngineConfig.slots is {self.slots}, must be at least 1")
        if self.prefill_tokens is not None and self.prefill_tokens < 1:
            raise UserError(
                f"EngineConfig.prefill_tokens is {self.prefill_tokens}, must be at least 1, or None: chosen by platform"
            )
        if self.decode_steps is not None and self.decode_steps < 1:
            raise UserError(
                f"EngineConfig.decode_steps is {self.decode_steps}, must be at least 1, or None: chosen by platform"
            )
        for name in ("prefix_cache_mib", "draft_tokens", "page_size"):
            if getattr(self, name) < 0:
                raise UserError(f"EngineConfig.{name} is {getattr(self, name)}, must be at least 0 (0: none)")
        if self.drafts is Drafts.MTP and not self.draft_tokens:
            raise UserError(
                "EngineConfig.drafts is 'mtp', and draft_tokens is 0 (no drafts): set EngineConfig.draft_tokens = 1"
            )
        if self.pages is not None and self.pages < 1:
            raise UserError(
                f"EngineConfig.pages is {self.pages}, must be at least 1, or None: as many as slots could need"
            )
        if self.pages is not None and not self.page_size:
            raise UserError(
                f"EngineConfig.pages is {self.pages}, but page_size is 0 (no pages): set EngineConfig.page_size = 32"
            )
        if self.page_size and self.when_full is WhenFull.SLIDE:
            raise UserError(
                f"EngineConfig.when_full ('slide') rereads whole rows, which pages (page_size {self.page_size}) do not support: "
                "set it to 'stop', or EngineConfig.page_size = 0"
            )


@dataclasses.dataclass
class Statistics:
    """Counters of an engine.

    Attributes:
      steps: programs that gave every row at least one token.
      tokens: of texts, including those after an end that was not known yet.
      drafted: guessed tokens.
      accepted: correct guesses.
      preempted: requests that lost their slot for lack of pages, and wait again.
      faults: programs that failed, and after which the engine went on.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    faults: int = 0

    def clear(self) -> None:
        """Resets the counters."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)

    @property
    def acceptance(self) -> float:
        """Share of correct guesses; 0 without guesses."""
        return self.accepted / max(1, self.drafted)


def bucket(count: int, length: int) -> int:
    """Padded size for `count` tokens in rows of up to `length`: few sizes, so that few programs are compiled."""
    if count == 1:  # the first token of an encoder-decoder's text
        return 1
    size = SMALLEST_BUCKET
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, length)


def buckets(length: int) -> list[int]:
    """All results of `bucket` for prompts of rows of up to `length`, except 1."""
    sizes = [bucket(2, length)]
    while sizes[-1] < length:
        sizes.append(bucket(sizes[-1] + 1, length))
    return sizes


def mixed_shapes(slots: int, tokens: int) -> list[tuple[int, int]]:
    """(tokens, slots) of the programs that read prompts beside the next tokens of texts.

    A step of some slots has as many tokens as a part of a prompt, since these texts wait for it; with all slots there are more
    prompts, and a step of twice as many tokens takes less time for each of them.

    Args:
      slots: of the engine.
      tokens: of a part of a prompt.
    """
    rows = [count for count in (MIXED_ROWS, 2 * MIXED_ROWS) if count < slots]
    shapes = []
    for count in (*rows, slots):
        most = max(2 * tokens if rows and count == slots else tokens, count + SMALLEST_BUCKET)
        shapes += [(size, count) for size in buckets(most) if size >= min(count + SMALLEST_BUCKET, most)]
    return shapes


def prompt_shapes(
    config: EngineConfig, length: int, encoder: bool, tokens: int, in_slot: bool, mixes: bool
) -> list[tuple[int, int, int]]:
    """(prompts read together, fewest tokens of each, whether likeliest tokens are requested) of all programs, those last.

    Args:
      config, length: of the engine.
      encoder: whether an encoder reads the prompts.
      tokens: most tokens that are read at a time.
      in_slot: whether the parts of longer prompts are read into the slot.
      mixes: whether prompts are read beside the next tokens of texts, and none together in rows of one size.
    """
    sizes = [1] if encoder else buckets(min(length, tokens) if in_slot else length)
    fewest = dict(zip(sizes, (min(2, length), *(size + 1 for size in sizes))))
    shapes = [(1, fewest[size], likeliest) for likeliest in (1, 0) for size in sizes]
    count = 2
    while count <= config.slots and not mixes:
        shapes += [(count, fewest[size], 0) for size in sizes if count * size <= tokens]
        count *= 2
    if in_slot:
        parts = [size for size in sizes if size & (size - 1) == 0 and tokens + size <= length]
        shapes += [(1, tokens + size, likeliest) for likeliest in (0, 1) for size in parts]
    return sorted(shapes, key=lambda shape: shape[2])
