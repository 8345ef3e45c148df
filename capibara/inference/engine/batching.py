"""How requests are batched, and the sizes that programs are compiled for."""

from __future__ import annotations

import dataclasses
import enum

from capibara import sharding
from capibara.config import configurable
from capibara.core.types import UserError

_SMALLEST_BUCKET = 32


class WhenFull(enum.StrEnum):
    """What happens to a row that is as long as its slot: it ends, or its last tokens are read again for every new one."""

    STOP = "stop"
    SLIDE = "slide"


class CacheDtype(enum.StrEnum):
    """Of keys and values in slots: that of the model's products, bfloat16, or 8 bits with a scale for each token's head."""

    COMPUTE = "compute"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How requests are batched.

    Attributes:
      slots: requests that are decoded together.
      when_full: what happens when a row is full.
      prefix_cache_mib: memory for rows whose beginnings later prompts may share; 0: none. A prompt that was read in two
        parts differs in the last bits of its numbers from one that was read at once.
      prefill_tokens: about how many tokens of prompts are read before the rows that have begun get their next token: a
        longer prompt is read in parts, and short ones together up to so many.
      cache_dtype: of the keys and values that are kept.
      draft_tokens: how many tokens a step guesses for each row, by what followed the row's last tokens where they stood
        before in it (prompt look-up; Saxena 2023, Leviathan et al. 2023, arXiv:2211.17192), and verifies at once. The
        text stays what it is without, with temperature too: a guess counts where it is what the row's seed draws. 0:
        none. It is worth it where texts repeat their prompts, and rows are few.
      decode_steps: how many tokens a row gets in one program, at most. With more than one the host's work is done once
        for all of them, a stream has them together, and the host looks at them before the next program begins; after
        one it looks while the next is made. None: on a CPU, where both would share the cores, 4, or with a thread of the
        engine's own (serve, chat) up to 4 that take 0.1 s together; 1 elsewhere. It is one where a prompt is being read
        and where tokens are guessed, and no more than any of the rows may still have, or than the rest of a limited
        thought.
      page_size: tokens of a page of the cache (Kwon et al. 2023, arXiv:2309.06180): a row has as many pages as its tokens
        need, and takes more as it grows. 0: none; each slot has the memory of its whole length.
      pages: of the pool, from which all slots take theirs; None: as many as all slots could need. With fewer, slots may be
        more than memory would hold of whole rows: where no page is left, the request that came last goes back to the
        queue and is read again later, and its text is the same. A text ends where it would need more than all pages.
    """

    slots: int = 8
    when_full: WhenFull = WhenFull.STOP
    prefix_cache_mib: int = 256
    prefill_tokens: int = 1024
    cache_dtype: CacheDtype = CacheDtype.COMPUTE
    draft_tokens: int = 0
    decode_steps: int | None = None
    page_size: int = 0
    pages: int | None = None

    @property
    def most_steps(self) -> int:
        """Tokens that a row gets in one program, at most."""
        if self.draft_tokens:
            return 1
        return self.decode_steps or (4 if sharding.platform() == "cpu" else 1)

    @property
    def spare(self) -> int:
        """Positions that a layer with a window has beside it, so that tokens can be taken back.

        Those are wrong guesses, or what was read beyond an end: as many as a program gives, but one, as whoever sees a
        window needs one position fewer of what was before.
        """
        # Only rows that are kept have to be whole after their end.
        return self.draft_tokens or (self.most_steps - 1 if self.prefix_cache_mib else 0)

    def __post_init__(self) -> None:
        for name in ("slots", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"EngineConfig.{name} is {getattr(self, name)}, must be at least 1")
        if self.decode_steps is not None and self.decode_steps < 1:
            raise UserError(
                f"EngineConfig.decode_steps is {self.decode_steps}, must be at least 1, or None: what suits the devices"
            )
        for name in ("prefix_cache_mib", "draft_tokens", "page_size"):
            if getattr(self, name) < 0:
                raise UserError(f"EngineConfig.{name} is {getattr(self, name)}, must be at least 0 (0: none)")
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
                f"EngineConfig.when_full ('slide') reads whole rows anew, which pages (page_size {self.page_size}) are not "
                "for: set it to 'stop', or EngineConfig.page_size = 0"
            )


@dataclasses.dataclass
class Statistics:
    """What an engine has done so far.

    Attributes:
      steps: programs that gave every row a token or more.
      tokens: of texts, those after an end that was not known yet too.
      drafted: tokens that were guessed.
      accepted: those of them that were right.
      preempted: requests that lost their slot for want of a page, and wait again.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0

    def clear(self) -> None:
        """Counts from nothing."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)

    @property
    def acceptance(self) -> float:
        """Share of the guesses that were right; 0 where there were none."""
        return self.accepted / max(1, self.drafted)


def bucket(count: int, length: int) -> int:
    """Positions for so many tokens of rows of up to `length`: few sizes, so that few programs are compiled."""
    if count == 1:  # what an encoder-decoder's text begins with
        return 1
    size = _SMALLEST_BUCKET
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, length)


def buckets(length: int) -> list[int]:
    """All that `bucket` gives for prompts of rows of up to `length`, but 1."""
    sizes = [bucket(2, length)]
    while sizes[-1] < length:
        sizes.append(bucket(sizes[-1] + 1, length))
    return sizes


def prompt_shapes(config: EngineConfig, length: int, encoder: bool) -> list[tuple[int, int, int]]:
    """(prompts that are read together, fewest tokens of each, whether likeliest tokens are asked for) of all programs."""
    sizes = [1] if encoder else buckets(length)
    fewest = dict(zip(sizes, (min(2, length), *(size + 1 for size in sizes))))
    shapes = [(1, fewest[size], likeliest) for likeliest in (1, 0) for size in sizes]
    count = 2
    while count <= config.slots:
        shapes += [(count, fewest[size], 0) for size in sizes if count * size <= config.prefill_tokens]
        count *= 2
    return shapes
