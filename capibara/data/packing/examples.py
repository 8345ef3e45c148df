"""From tokenized examples to what is packed: documents for a decoder or an encoder, pairs for an encoder-decoder."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

import numpy as np

from capibara.core.types import UserError
from capibara.data.dataset import Dataset, Kind, TooLong
from capibara.data.packing.packing import Document
from capibara.data.packing.pairs import Pair, Pairs
from capibara.data.packing.preferences import Answers
from capibara.data.sources.sources import DataFormat, Example
from capibara.data.tokenizers.vocabulary import Vocabulary


class Tally:
    """Conversations read in this process since its start; says in the log how many of them were not taken whole.

    Attributes:
      noun: what they are called.
      read: how many there were.
      long: of these, longer than a row.
      longest: tokens of the longest.
      silent: of these, without loss although they are not too long.
    """

    def __init__(self, noun: str = "conversations") -> None:
        self.noun = noun
        self.read = self.long = self.longest = self.silent = 0

    def add(self, tokens: int, dataset: Dataset, *, carries_loss: bool) -> None:
        """Counts a conversation; the log has the 1st, 10th, 100th, ... that is not as it was."""
        self.read += 1
        self.longest = max(self.longest, tokens)
        if tokens > dataset.length:
            self.long += 1
            if _is_power_of_ten(self.long):
                fate = {TooLong.DROP: "left out", TooLong.CUT: "cut"}[dataset.too_long]
                said = f"of {self.read} {self.noun} read so far {self.long} longer than Dataset.length"
                logging.getLogger(__name__).warning("%s (%d) were %s, see Dataset.too_long", said, dataset.length, fate)
        elif not carries_loss:
            self.silent += 1
            if _is_power_of_ten(self.silent):
                said = f"of {self.read} {self.noun} read so far {self.silent} without loss were left out"
                logging.getLogger(__name__).warning(said)

    def nothing_left(self, dataset: Dataset) -> UserError:
        """Where no conversation is left."""
        room, fix = f"Dataset.length ({dataset.length})", f"raise Dataset.length to {self.longest}"
        if dataset.data_format is DataFormat.PROMPTS:
            room = f"what Dataset.length leaves them beside the answer's max_new_tokens ({dataset.length})"
            fix = f"raise Dataset.length by {self.longest - dataset.length}"
        reason = f"of {self.read} {self.noun} {self.long} are longer than {room}"
        if dataset.data_format is DataFormat.TEXTS:
            fix += " or set Dataset.too_long = 'cut'"
        if not self.long:
            reason, fix = f"{self.read} {self.noun} carry no loss", "give messages of the assistant a weight of 1"
        return UserError(f"no {self.noun.rstrip('s')} of a row can be trained on ({reason}): {fix}")


def _is_power_of_ten(count: int) -> bool:
    return count == 10 ** (len(str(count)) - 1)


@dataclasses.dataclass(frozen=True)
class Assembler:
    """Makes documents or pairs of token ids, as `Dataset.kind` says.

    Attributes:
      dataset: says what is to be predicted.
      adds_end: whether texts come without their end token and get it here.
      tally: counts conversations.
    """

    dataset: Dataset
    adds_end: bool
    tally: Tally = dataclasses.field(default_factory=Tally)

    def __call__(
        self, ids: np.ndarray, inputs: np.ndarray | None, domain: str | None, place: tuple[int, ...]
    ) -> Document | Pairs:
        """One example.

        Args:
          ids: [n] int32, the text, or what is to be predicted from `inputs`.
          inputs: [m] int32, or None.
          domain: of the text, where it is known.
          place: where the example is in the data, which chooses spans and masks.
        """
        number = self._domains.get(domain, 0)
        if self.dataset.kind in (Kind.CAUSAL, Kind.PREFIX):
            prefix = 0
            if self.dataset.kind is Kind.PREFIX and inputs is not None and len(inputs):
                prefix = len(inputs) + 1  # the beginning token is read before the inputs
            ids, weights = self._joined(self._ended(ids), inputs)
            return Document(ids, weights, self._vocabulary.bos_id, number, place=place, prefix=prefix)
        seeds = (self.dataset.seed, *place)
        if self.dataset.kind is Kind.MASKED:
            document = self._masked(self._joined(self._ended(ids), inputs)[0], number, seeds)
            return document._replace(place=place)
        if inputs is None:
            return Pairs(self._spans(ids, seeds), number, place)
        pair = Pair(self._ended(inputs), self._ended(ids))
        return Pairs([pair] if len(pair.targets) else [], number, place)

    def rendered(self, example: Example, number: int, place: tuple[int, ...]) -> Document | Answers:
        """One example of what a chat template rendered: a conversation, a preference pair or a prompt.

        Args:
          example: of the source.
          number: of the example in its split, counted from 1.
          place: as in a call.
        """
        match self.dataset.data_format:
            case DataFormat.PREFERENCES:
                return self._answers(example, number, place)
            case DataFormat.PROMPTS:
                return self._prompt(example, number, place)
        return self.conversation(example, place)

    def conversation(self, example: Example, place: tuple[int, ...]) -> Document:
        """One rendered conversation; without tokens where it is longer than a row and such are left out."""
        first, ids, weights = self._read(example)
        if first is None:
            return Document(ids, None, self._vocabulary.bos_id, place=place)
        self.tally.add(len(ids), self.dataset, carries_loss=bool(weights.any()))
        if len(ids) > self.dataset.length:
            kept = self.dataset.length if self.dataset.too_long is TooLong.CUT else 0
            ids, weights = ids[:kept], weights[:kept]
        if not weights.any():
            ids, weights = ids[:0], weights[:0]
        return Document(ids, weights, first, self._domains.get(example.domain, 0), place=place)

    def _answers(self, example: Example, number: int, place: tuple[int, ...]) -> Answers:
        """Both answers of a preference pair; without tokens where a row does not hold them, or one carries no loss."""
        assert example.rejected is not None, "a preference pair has both"
        read = [self._read(side) for side in (example, example.rejected)]
        size, counts = sum(len(ids) for _, ids, _ in read), all(weights.any() for _, _, weights in read)
        self.tally.add(size, self.dataset, carries_loss=counts)
        kept = size if counts and size <= self.dataset.length else 0
        bos_id = self._vocabulary.bos_id
        chosen, rejected = (
            Document(ids[:kept], weights[:kept], bos_id if first is None else first, place=place)
            for first, ids, weights in read
        )
        return Answers(chosen, rejected, number, place)

    def _prompt(self, example: Example, number: int, place: tuple[int, ...]) -> Document:
        """A prompt's own tokens; none where a row does not hold them."""
        ids, _ = self._vocabulary.encode_rendered(example.text)
        self.tally.add(len(ids), self.dataset, carries_loss=bool(len(ids)))
        kept = ids if len(ids) <= self.dataset.length else ids[:0]
        return Document(kept, None, self._vocabulary.bos_id, place=place, number=number)

    def _read(self, example: Example) -> tuple[int | None, np.ndarray, np.ndarray]:
        """Of a rendered conversation the first token, which nothing predicts, the others, and their weights.

        The model reads its tokens as they are, the first one included: so does `transformers`.
        A token carries loss if any of its characters do. One that begins in the prompt and ends in the answer (" It",
        where the generation prompt ends with a space) is the answer's first word, and there is no other to learn.
        """
        ids, offsets = self._vocabulary.encode_rendered(example.text)
        if not len(ids):
            return None, ids, np.zeros(0, np.float32)
        assert example.loss is not None, "it is rendered"
        begins = np.array([first for first, _ in example.loss], np.int64)
        ends = np.array([last for _, last in example.loss], np.int64)
        # Ranges are ascending: a token is within one if more have begun before its end than have ended at its start.
        begun, ended = np.searchsorted(begins, offsets[:, 1]), np.searchsorted(ends, offsets[:, 0], "right")
        weights = ((begun > ended) & (offsets[:, 0] < offsets[:, 1])).astype(np.float32)[1:]
        return int(ids[0]), ids[1:], weights

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return self.dataset.get_vocabulary()

    @functools.cached_property
    def _domains(self) -> dict[str | None, int]:
        return {name: number for number, name in enumerate(self.dataset.domains, 1)}

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        return np.append(ids, np.int32(self._vocabulary.eos_id)) if self.adds_end else ids

    @staticmethod
    def _joined(ids: np.ndarray, inputs: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Inputs and text in one, the inputs without loss."""
        if inputs is None or not len(inputs):
            return ids, None
        weights = np.ones(len(inputs) + len(ids), np.float32)
        weights[: len(inputs)] = 0
        return np.concatenate([inputs, ids]), weights

    def _masked(self, ids: np.ndarray, domain: int, seeds: tuple[int, ...]) -> Document:
        vocabulary = self._vocabulary
        special = (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id)
        if len(ids) and vocabulary.bos_id != vocabulary.pad_id and ids[0] != vocabulary.bos_id:
            ids = np.insert(ids, 0, np.int32(vocabulary.bos_id))  # BERT's [CLS]
        read, weights = self.dataset.masking.apply(
            ids, special=special, mask_id=vocabulary.mask_id, random_ids=self._text_ids, seeds=seeds
        )
        return Document(ids, weights, vocabulary.bos_id, domain, read)

    @functools.cached_property
    def _text_ids(self) -> np.ndarray:
        """The ids that stand for text."""
        return np.flatnonzero(self._vocabulary.token_bytes()).astype(np.int32)

    def _spans(self, ids: np.ndarray, seeds: tuple[int, ...]) -> list[Pair]:
        """Chunks of a text, as long as fits the rows once corrupted, each as a pair of its own.

        A single last token makes no chunk: it could not be both kept and told.
        """
        end = np.array([self._vocabulary.eos_id] if self.dataset.append_eos else [], np.int32)
        if len(end) and len(ids) and ids[-1] == end[0]:
            ids = ids[:-1]  # a task's end of the text: it ends inputs and targets now
        length, sentinel_ids = self._chunk_length, self._sentinel_ids
        pairs = []
        for chunk, start in enumerate(range(0, len(ids) - 1, length)):
            text = ids[start : start + length]
            parts = self.dataset.span_corruption.apply(text, sentinel_ids, (*seeds, chunk))
            pairs.append(Pair(*(np.concatenate([part, end]) for part in parts)))
        return pairs

    @functools.cached_property
    def _chunk_length(self) -> int:
        dataset, end = self.dataset, int(self.dataset.append_eos)
        assert dataset.encoder_length is not None, "pairs have an encoder"
        length = dataset.span_corruption.longest_text(dataset.encoder_length - end, dataset.length - end)
        if length < 2:
            raise UserError(
                f"Dataset.encoder_length ({dataset.encoder_length}) and length ({dataset.length}) leave no room for "
                "a removed span: try 512 and 114"
            )
        return length

    @functools.cached_property
    def _sentinel_ids(self) -> Sequence[int]:
        ids, need = self._vocabulary.sentinel_ids, self.dataset.span_corruption.counts(self._chunk_length)[1]
        if len(ids) < need:
            name = type(self._vocabulary).__name__
            raise UserError(
                f"{name} has {len(ids)} unused ids, span corruption of {self._chunk_length} tokens needs {need} for "
                f"its sentinels: set {name}.extra_ids = {max(need, 100)}"
            )
        return ids
