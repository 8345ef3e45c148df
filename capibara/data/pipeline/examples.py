"""Makes the units of packing from tokenized examples: documents for decoders and encoders, pairs for encoder-decoders."""

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
from capibara.data.packing.rows import PackedDocuments, PackedRow
from capibara.data.sources.sources import DataFormat, Example
from capibara.data.tokenizers.vocabulary import Vocabulary

_EMPTY = Document(np.zeros(0, np.int32), np.zeros(0, np.float32), 0)


class Tally:
    """Counts the conversations that this process has read, and logs how many of them were cut or dropped.

    Attributes:
      noun: their name in messages.
      read: number of conversations.
      long: number of them that are longer than a row.
      longest: tokens of the longest.
      silent: number of them that fit a row but have no token with loss.
    """

    def __init__(self, noun: str = "conversations") -> None:
        self.noun = noun
        self.read = self.long = self.longest = self.silent = 0

    def add(self, tokens: int, dataset: Dataset, *, carries_loss: bool) -> None:
        """Counts a conversation; logs the 1st, 10th, 100th, ... that is cut or dropped."""
        self.read += 1
        self.longest = max(self.longest, tokens)
        if tokens > dataset.length:
            self.long += 1
            if _is_power_of_ten(self.long):
                fate = {TooLong.DROP: "dropped", TooLong.CUT: "cut"}[dataset.too_long]
                line = f"of {self.read} {self.noun} read so far {self.long} longer than Dataset.length"
                logging.getLogger(__name__).warning("%s (%d) were %s, see Dataset.too_long", line, dataset.length, fate)
        elif not carries_loss:
            self.silent += 1
            if _is_power_of_ten(self.silent):
                line = f"of {self.read} {self.noun} read so far {self.silent} without loss were dropped"
                logging.getLogger(__name__).warning(line)

    def nothing_left(self, dataset: Dataset) -> UserError:
        """The error for data of which no conversation is left."""
        room, fix = f"Dataset.length ({dataset.length})", f"raise Dataset.length to {self.longest}"
        if dataset.data_format is DataFormat.PROMPTS:
            room = f"what Dataset.length leaves them beside the answer's max_new_tokens ({dataset.length})"
            fix = f"raise Dataset.length by {self.longest - dataset.length}"
        reason = f"of {self.read} {self.noun} {self.long} are longer than {room}"
        if dataset.data_format is DataFormat.TEXTS:
            fix += " or set Dataset.too_long = 'cut'"
        if not self.long:
            reason, fix = f"{self.read} {self.noun} have no loss", "give messages of the assistant a weight of 1"
        return UserError(f"no {self.noun.rstrip('s')} of a row can be trained on ({reason}): {fix}")


def _joined(ids: np.ndarray, inputs: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Concatenates inputs, without loss, and text."""
    if inputs is None or not len(inputs):
        return ids, None
    weights = np.ones(len(inputs) + len(ids), np.float32)
    weights[: len(inputs)] = 0
    return np.concatenate([inputs, ids]), weights


def _with_end(
    first: int | None, ids: np.ndarray, weights: np.ndarray, pad_id: int
) -> tuple[int | None, np.ndarray, np.ndarray]:
    """A tokenized conversation whose last token is an input, too, with a target that has no weight."""
    return first, np.append(ids, np.int32(pad_id)), np.append(weights, np.float32(0))


def _solution(example: Example, vocabulary: Vocabulary, number: int, position: tuple[int, ...]) -> Answers:
    """A tokenized solution, with weights and labels at the tokens that end a step, which are inputs."""
    assert example.loss is not None, "it is rendered"
    ids, offsets = vocabulary.encode_rendered(example.text)
    # The last token that begins before the end of the separator.
    ends = np.searchsorted(offsets[:, 0], [end for _, end in example.loss]) - 1
    weights, labels = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    weights[ends], labels[ends] = 1.0, example.labels
    targets = np.append(ids[1:], np.int32(vocabulary.pad_id))
    document = Document(targets, weights, int(ids[0]), position=position)
    return Answers(document, _EMPTY, number, position, labels)


def _is_power_of_ten(count: int) -> bool:
    return count == 10 ** (len(str(count)) - 1)


def _check_packed(row: PackedRow, dataset: Dataset, fingerprint: str) -> None:
    """Raises UserError if a row was packed for another model, length or vocabulary."""
    if dataset.kind is not Kind.CAUSAL:
        raise UserError(f"Dataset.kind ({str(dataset.kind)!r}) cannot be trained on packed rows: only 'causal' can")
    if row.length != dataset.length:
        raise UserError(
            f"Dataset.length ({dataset.length}) must be {row.length}, for which the rows were packed: set it"
        )
    if row.vocabulary != fingerprint:
        raise UserError(
            f"Dataset.vocabulary ({fingerprint}) must be the one of the packed rows ({row.vocabulary}): set it, or "
            "prepare the corpus again"
        )


@dataclasses.dataclass(frozen=True)
class Assembler:
    """Makes documents or pairs from token ids, according to `Dataset.kind`.

    Attributes:
      dataset: the configuration.
      adds_end: whether to append the end token to texts.
      tally: counts conversations.
    """

    dataset: Dataset
    adds_end: bool
    tally: Tally = dataclasses.field(default_factory=Tally)

    def __call__(
        self, ids: np.ndarray, inputs: np.ndarray | None, domain: str | None, position: tuple[int, ...]
    ) -> Document | Pairs:
        """Makes a document or pairs from an example.

        Args:
          ids: [n] int32, the text, or the targets if there are `inputs`.
          inputs: [m] int32, or None.
          domain: the text's domain; None: unknown.
          position: the example's position in the data; it seeds the choice of spans and masks.
        """
        number = self._domains.get(domain, 0)
        if self.dataset.kind in (Kind.CAUSAL, Kind.PREFIX):
            prefix = 0
            if self.dataset.kind is Kind.PREFIX and inputs is not None and len(inputs):
                prefix = len(inputs) + len(self._vocabulary.begin_ids)  # which come before the inputs
            document = Document.after(*_joined(self._ended(ids), inputs), self._vocabulary.begin_ids)
            return document._replace(domain=number, position=position, prefix=prefix)
        seeds = (self.dataset.seed, *position)
        if self.dataset.kind is Kind.MASKED:
            document = self._masked(_joined(self._ended(ids), inputs)[0], number, seeds)
            return document._replace(position=position)
        if inputs is None:
            return Pairs(self._spans(ids, seeds), number, position)
        pair = Pair(self._ended(inputs), self._ended(ids))
        return Pairs([pair] if len(pair.targets) else [], number, position)

    def rendered(self, example: Example, number: int, position: tuple[int, ...]) -> Document | Answers:
        """Makes a document or answers from an example rendered by a chat template.

        Args:
          example: a conversation, a preference pair, an unpaired answer or a prompt.
          number: the example's number in its split, from 1.
          position: the example's position in the data.
        """
        match self.dataset.data_format:
            case DataFormat.PREFERENCES | DataFormat.UNPAIRED:
                return self._answers(example, number, position)
            case DataFormat.PROMPTS:
                return self._prompt(example, number, position)
            case DataFormat.STEPS:
                solution = _solution(example, self._vocabulary, number, position)
                self.tally.add(solution.need, self.dataset, carries_loss=True)
                return (
                    solution if solution.need <= self.dataset.length else solution._replace(chosen=_EMPTY, label=None)
                )
        return self.conversation(example, position)

    def packed(self, row: PackedRow, position: tuple[int, ...]) -> PackedDocuments:
        """Takes a row that was packed before.

        Args:
          row: the row.
          position: its position in the data.

        Raises:
          UserError: it was packed for another model, length or vocabulary.
        """
        _check_packed(row, self.dataset, self._fingerprint)
        domains = None
        if row.domains and self._domains:
            domains = np.array([self._domains.get(domain, 0) for domain in row.domains], np.int32)
        return PackedDocuments(row, domains, position)

    def conversation(self, example: Example, position: tuple[int, ...]) -> Document:
        """Makes a document from a rendered conversation; an empty one if the conversation is dropped."""
        first, ids, weights = self._read(example)
        if first is None:
            return Document(ids, None, self._vocabulary.bos_id, position=position)
        self.tally.add(len(ids), self.dataset, carries_loss=bool(weights.any()))
        if len(ids) > self.dataset.length:
            retained = self.dataset.length if self.dataset.too_long is TooLong.CUT else 0
            ids, weights = ids[:retained], weights[:retained]
        if not weights.any():
            ids, weights = ids[:0], weights[:0]
        return Document(ids, weights, first, self._domains.get(example.domain, 0), position=position)

    def _answers(self, example: Example, number: int, position: tuple[int, ...]) -> Answers:
        """Both answers of a pair, the second empty if there is none; both if they do not fit a row, or one has no loss."""
        read = [self._read(side) for side in (example, example.rejected) if side is not None]
        if self.dataset.scores_answers:
            read = [_with_end(*answer, self._vocabulary.pad_id) for answer in read]
        size, counts = sum(len(ids) for _, ids, _ in read), all(weights.any() for _, _, weights in read)
        self.tally.add(size, self.dataset, carries_loss=counts)
        retained = size if counts and size <= self.dataset.length else 0
        bos_id = self._vocabulary.bos_id
        documents = [
            Document(ids[:retained], weights[:retained], bos_id if first is None else first, position=position)
            for first, ids, weights in read
        ]
        chosen, rejected = (*documents, _EMPTY)[:2]
        return Answers(chosen, rejected, number, position, example.label)

    def _prompt(self, example: Example, number: int, position: tuple[int, ...]) -> Document:
        """A prompt's tokens; empty if they do not fit a row."""
        ids, _ = self._vocabulary.encode_rendered(example.text)
        self.tally.add(len(ids), self.dataset, carries_loss=bool(len(ids)))
        retained = ids if len(ids) <= self.dataset.length else ids[:0]
        return Document(retained, None, self._vocabulary.bos_id, position=position, number=number)

    def _read(self, example: Example) -> tuple[int | None, np.ndarray, np.ndarray]:
        """Tokenizes a rendered conversation: its first token (an input only), the other tokens, and their weights.

        No beginning token is added, as in `transformers`. A token has loss if any of its characters has. If one begins in
        the prompt and ends in the answer (" It" after a generation prompt that ends with a space), it is the answer's
        first token and must be learned.
        """
        ids, offsets = self._vocabulary.encode_rendered(example.text)
        if not len(ids):
            return None, ids, np.zeros(0, np.float32)
        assert example.loss is not None, "it is rendered"
        begins = np.array([first for first, _ in example.loss], np.int64)
        ends = np.array([last for _, last in example.loss], np.int64)
        # Ranges ascend: a token overlaps one if more ranges begin before its end than end at or before its start.
        started, ended = np.searchsorted(begins, offsets[:, 1]), np.searchsorted(ends, offsets[:, 0], "right")
        weights = ((started > ended) & (offsets[:, 0] < offsets[:, 1])).astype(np.float32)[1:]
        return int(ids[0]), ids[1:], weights

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return self.dataset.get_vocabulary()

    @functools.cached_property
    def _fingerprint(self) -> str:
        return self._vocabulary.fingerprint()

    @functools.cached_property
    def _domains(self) -> dict[str | None, int]:
        return {name: number for number, name in enumerate(self.dataset.domains, 1)}

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        return np.append(ids, np.int32(self._vocabulary.eos_id)) if self.adds_end else ids

    def _masked(self, ids: np.ndarray, domain: int, seeds: tuple[int, ...]) -> Document:
        vocabulary = self._vocabulary
        special = (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id)
        if len(ids) and vocabulary.bos_id in vocabulary.begin_ids and vocabulary.pad_id != vocabulary.bos_id != ids[0]:
            ids = np.insert(ids, 0, np.int32(vocabulary.bos_id))  # BERT's [CLS]
        read, weights = self.dataset.masking.apply(
            ids, special=special, mask_id=vocabulary.mask_id, random_ids=self._text_ids, seeds=seeds
        )
        return Document(ids, weights, vocabulary.bos_id, domain, read)

    @functools.cached_property
    def _text_ids(self) -> np.ndarray:
        """The ids that stand for text, not for special tokens."""
        return np.flatnonzero(self._vocabulary.token_bytes()).astype(np.int32)

    def _spans(self, ids: np.ndarray, seeds: tuple[int, ...]) -> list[Pair]:
        """Splits a text into chunks that fit the rows after span corruption, and makes a pair of each.

        A last chunk of a single token is dropped: it cannot be both input and target.
        """
        end = np.array([self._vocabulary.eos_id] if self.dataset.append_eos else [], np.int32)
        if len(end) and len(ids) and ids[-1] == end[0]:
            ids = ids[:-1]  # the end token of a task's text: it is appended to inputs and targets instead
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
