"""Vocabularies: text to token ids and back, without loss.

Every vocabulary knows the bytes of each of its ids, so `decode` returns exactly the text that was encoded (bytes of a
model's sample that are not UTF-8 become U+FFFD), and a loss per token can be converted to bits per byte.

Ids 0, 1 and 2 of the byte vocabulary are padding, end of document and unknown; the bytes follow (ByT5,
https://arxiv.org/abs/2105.13626). As in T5X, the padding id also begins a document if a vocabulary has no beginning token.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from capibara.config import configurable
from capibara.core import limits, user_modules
from capibara.core.fields import FilePath, short
from capibara.core.types import UserError
from capibara.data.tokenizers import added, decoding
from capibara.data.tokenizers import limits as tokenizer_limits
from capibara.data.tokenizers.files import (
    CONFIG_FILE,
    FILES,
    GENERATION_FILE,
    OWN,
    SENTENCEPIECE_FILES,
    TOKENIZER_FILE,
    carried,
    contents,
    end_ids,
    file_of,
    folder_of,
    is_folder,
    one_line,
    place_of,
    read_bytes,
    read_json,
    special_tokens,
)

_SPACE = "\u2581"  # SentencePiece's character for a space
# A Unicode noncharacter, which texts do not contain: inside the text of a special token it prevents its recognition.
GUARD = "\ufdd0"


_DECIDING = tuple(name for name in FILES if name != GENERATION_FILE)  # training does not read the end tokens


class OwnFiles(NamedTuple):
    """Copies of a tokenizer's files for a run folder.

    Attributes:
      files: name -> content of the files in the run folder's tokenizer/.
      places: path in the Gin configuration -> path of its copy in the run folder: "tokenizer", or "tokenizer/NAME".
      deciding: names of the files that must not change during a run.
    """

    files: dict[str, bytes]
    places: dict[str, str]
    deciding: Sequence[str]


def _check_ids(ids: object, size: int, name: str) -> None:
    """Raises UserError if what a vocabulary of the user's has returned is no list of ids."""
    result = np.asarray(ids)
    if result.ndim != 1 or result.size and not np.issubdtype(result.dtype, np.integer):
        raise UserError(f"{name}.encode returned {short(ids)}, must return a list of ids: see docs/extending.md")
    if result.size and not 0 <= result.min() <= result.max() < size:
        wrong = next(int(i) for i in result if not 0 <= i < size)
        raise UserError(
            f"{name}.encode returned the id {wrong}, must return ids from 0 to {size - 1} (its size less 1)"
        )


class Vocabulary(abc.ABC):
    """The interface of a tokenizer for the loader, the metrics and the sampler.

    A new one is a frozen dataclass with `encode`, `pieces` and the attributes here; if it reads files, also with
    `path_fields` and `own_files`. See examples/extend/my_tokenizer.py.

    Attributes:
      path_fields: fields whose values are paths; a run reads the copies in its folder if the originals are gone.
      size: number of ids, padded to `size_multiple` so that tensor axes divide the embedding.
      extra_ids: number of ids without text that are added at the end; `size` includes them.
      pad_id, eos_id, bos_id: padding, end of a document, and its beginning (see `begin_ids`).
    """

    path_fields: ClassVar[tuple[str, ...]] = ()
    size_multiple: int
    extra_ids: int
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # every subclass is a dataclass

    if TYPE_CHECKING:  # fields in some subclasses, properties in others

        @property
        def pad_id(self) -> int: ...

        @property
        def eos_id(self) -> int: ...

        @property
        def bos_id(self) -> int: ...

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """The ids before every text that a decoder reads; none if the tokenizer adds none."""
        return (self.bos_id,)

    @property
    def closing_ids(self) -> tuple[int, ...]:
        """The ids after a text that is read as a whole, such as one that is embedded; none if the tokenizer adds none."""
        return ()

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids that were added to the tokenizer: plain text never becomes one of them."""
        return frozenset()

    def beginning(self) -> str:
        """How texts begin and what sets it, in one line; empty for a vocabulary without such a setting."""
        name = "add_bos_token"
        if name not in self.__dataclass_fields__:
            return ""
        begin = "".join(self.spelling(i) or f"token {i}" for i in self.begin_ids)
        why = ", as the tokenizer says" if getattr(self, name) is None else ""
        return f"texts begin with {begin or 'no beginning token'} ({type(self).__name__}.{name} = {getattr(self, name)}{why})"

    def tell_beginning(self) -> None:
        """Prints `beginning` on standard error, once in a process."""
        if note := self.beginning():
            _tell(f"note: {note}")

    def prompt_ids(self, text: str) -> list[int]:
        """The ids of a prompt for a decoder: those of its beginning and its text; the beginning token if there are none."""
        return [*self.begin_ids, *self.encode(text)] or [self.bos_id]

    @property
    def size(self) -> int:
        return -(-(len(self.pieces) + self.extra_ids) // self.size_multiple) * self.size_multiple

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All ids that end a text: `eos_id` first, then those of generation_config.json beside the tokenizer."""
        return (self.eos_id,)

    def _end_ids_of(self, folder: str) -> tuple[int, ...]:
        stated = end_ids(folder)
        if outside := [token for token in stated if not 0 <= token < self.size]:
            _tell(
                f"note: {folder} has eos_token_id = {limits.shortened(outside)}, which never ends a text: the tokenizer has "
                f"ids from 0 to {self.size - 1}"
            )
        return tuple(dict.fromkeys((self.eos_id, *(token for token in stated if token not in outside))))

    @property
    def sentinel_ids(self) -> Sequence[int]:
        """Ids for removed spans, in the order of the spans: the extra ids, or else the unused ids, from the top."""
        text = len(self.pieces)
        return range((text + self.extra_ids if self.extra_ids else self.size) - 1, text - 1, -1)

    @property
    def mask_id(self) -> int:
        """The id of the mask token of a masked language model; without one, the first of `sentinel_ids`.

        Raises:
          UserError: every id stands for text.
        """
        if not self.sentinel_ids:
            raise UserError(
                f"{type(self).__name__} has no unused id that could be the mask (size {self.size}): "
                f"set {type(self).__name__}.extra_ids = 1"
            )
        return self.sentinel_ids[0]

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without beginning and end tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, as int32 arrays."""
        encoded = [self.encode(text) for text in texts]
        if (user_class := user_modules.own_class(self)) is not None:
            for ids in encoded:
                _check_ids(ids, self.size, user_class)
        return [np.asarray(ids, np.int32) for ids in encoded]

    def encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a conversation that a chat template rendered.

        Args:
          text: special tokens in it become their ids, unless a `GUARD` interrupts their text; guards are removed.

        Returns:
          ids [n] int32, and the offsets in `text` where each token begins and ends, [n, 2] int64; tokens with parts of
          the same character share its offsets.

        Raises:
          UserError: the vocabulary does not recognise special tokens in text.
        """
        raise UserError(
            f"Dataset.vocabulary ({type(self).__name__}) does not read the special tokens of chat templates: "
            "use @TokenizerJsonVocabulary()"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, without special and unused ids; invalid UTF-8 becomes U+FFFD."""
        return self.bytes_of(ids).decode("utf-8", errors="replace")

    def gap(self, before: Sequence[int], after: Sequence[int]) -> str:
        """The white space between two parts of a text that decoding each of them alone leaves out."""
        both, first, second = map(self.decode, ([*before, *after], before, after))
        middle = both.removeprefix(first).removesuffix(second)
        return middle if middle.isspace() and first + middle + second == both else ""

    def stream(self) -> decoding.TokenStream:
        """Decodes tokens one by one: what it returns joins to the text of `decode`."""
        return decoding.ByteStream(self.bytes_of)

    def spelling(self, token: int) -> str:
        """How the tokenizer spells an id that has no text, such as "</s>"; empty for other and unused ids."""
        return ""

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, without special and unused ids; a single id may be incomplete UTF-8."""
        pieces = self.pieces
        known = len(pieces)
        return b"".join(pieces[i] for i in map(int, ids) if 0 <= i < known)

    def token_bytes(self) -> np.ndarray:
        """The number of bytes of each id, [V] int32; 0 for special and unused ids."""
        lengths = np.zeros(self.size, np.int32)
        lengths[: len(self.pieces)] = [len(piece) for piece in self.pieces]
        return lengths

    def fingerprint(self) -> str:
        """A hash that changes if any id has other bytes, or if texts begin with other ids."""
        digest = hashlib.blake2b(digest_size=8)
        for piece in self.pieces:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        begin = "" if self.begin_ids == (self.bos_id,) else f":{','.join(map(str, self.begin_ids))}"
        return f"{self.size}:{self.pad_id}:{self.eos_id}:{self.bos_id}:{digest.hexdigest()}{begin}"

    @property
    @abc.abstractmethod
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every id; b"" for special ids."""

    def own_files(self) -> OwnFiles:
        """The files that a run folder keeps, so that it does not depend on the original paths.

        Raises:
          OSError, UserError: a file of the tokenizer cannot be read.
        """
        return OwnFiles({}, {}, _DECIDING)

    def __getstate__(self) -> dict[str, Any]:
        # Tokenizer objects are cached properties and not pickled: a worker process loads its own.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _ids_around(
    encode: Callable[[str], list[int]], encode_whole: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer's post-processor puts before and after a text."""
    for text in ("a", "0", "."):
        if plain := encode(text):
            whole = encode_whole(text)
            starts = range(len(whole) - len(plain) + 1)
            start = next((i for i in starts if whole[i : i + len(plain)] == plain), None)
            return ((), ()) if start is None else (tuple(whole[:start]), tuple(whole[start + len(plain) :]))
    return (), ()


@functools.cache
def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_sizes(vocabulary: Vocabulary) -> None:
    if vocabulary.size_multiple < 1:
        raise UserError(f"size_multiple ({vocabulary.size_multiple}) must be at least 1: try 128")
    if vocabulary.extra_ids < 0:
        raise UserError(f"extra_ids ({vocabulary.extra_ids}) must be at least 0: try 100")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteVocabulary(Vocabulary):
    """UTF-8 bytes: 0 padding and beginning, 1 end, 2 unknown, then the 256 bytes (the ids of seqio.ByteVocabulary).

    Attributes:
      size_multiple: `size` is rounded up to a multiple of it, so that the embedding's rows can be sharded.
      extra_ids: sentinels of removed spans, the last ids.
    """

    size_multiple: int = 128
    extra_ids: int = 0

    pad_id = 0
    bos_id = 0
    eos_id = 1
    _OFFSET = 3

    def __post_init__(self) -> None:
        _check_sizes(self)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # surrogatepass: a lone surrogate in a JSON string is ordinary data and must not stop a run.
        return [
            np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32) + np.int32(self._OFFSET)
            for text in texts
        ]

    def spelling(self, token: int) -> str:
        return ("<pad>", "</s>", "<unk>")[token] if 0 <= token < self._OFFSET else ""

    @functools.cached_property
    def pieces(self) -> Sequence[bytes]:
        return [b""] * self._OFFSET + [bytes([i]) for i in range(256)]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model file, such as `python -m capibara.prepare vocabulary` writes.

    Attributes:
      path: the .model file, a folder with tokenizer.model or spiece.model, or a run folder with such a tokenizer.
      add_bos_token: whether texts begin with the beginning token; None: as add_bos_token of tokenizer_config.json in the
        folder says, or else they do.
      size_multiple: the size is rounded up to a multiple of this.
      extra_ids: ids without text added after the model's (T5 has 100, for the sentinels of removed spans).
    """

    path_fields = ("path",)

    path: FilePath
    add_bos_token: bool | None = None
    size_multiple: int = 128
    extra_ids: int = 0

    def __post_init__(self) -> None:
        _check_sizes(self)

    def own_files(self) -> OwnFiles:
        name = SENTENCEPIECE_FILES[0]
        carried_files = carried(os.path.dirname(self.file))
        files = {other: content for other, content in carried_files.items() if other not in SENTENCEPIECE_FILES}
        return OwnFiles(files | {name: read_bytes(self.file)}, {self.path: f"{OWN}/{name}"}, (name,))

    @property
    def file(self) -> str:
        """The .model file."""
        return file_of(self.path, *SENTENCEPIECE_FILES)

    @functools.cached_property
    def processor(self) -> Any:
        import sentencepiece

        content = _content(self.file, "SentencePieceVocabulary.path")
        tokenizer_limits.check_sentencepiece(content, self.path)
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError) as error:
            raise UserError(f"{self.path} is not a SentencePiece model: {one_line(error)}") from error

    @property
    def pad_id(self) -> int:
        return max(0, self.processor.pad_id())

    @property
    def eos_id(self) -> int:
        eos = self.processor.eos_id()
        if eos < 0:
            raise UserError(f"{self.path} has no end token (eos_id is -1): train one with capibara.prepare vocabulary")
        return eos

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        return self._end_ids_of(folder_of(self.path))

    @property
    def bos_id(self) -> int:
        bos = self.processor.bos_id()
        return bos if bos >= 0 else self.pad_id

    @functools.cached_property
    def begin_ids(self) -> tuple[int, ...]:
        adds = self.add_bos_token
        if adds is None:
            adds = (read_json(os.path.join(folder_of(self.path), CONFIG_FILE)) or {}).get("add_bos_token")
        return () if adds is False else (self.bos_id,)

    @property
    def mask_id(self) -> int:
        result = map(self.processor.piece_to_id, ("[MASK]", "<mask>"))
        return next((i for i in result if i != self.processor.unk_id()), None) or super().mask_id

    def encode(self, text: str) -> list[int]:
        if _SPACE not in text or self._adds_space:
            return self.processor.encode(text)
        # The model would read this character as a space: encode it as bytes instead, if the model has them.
        mark = [self._byte_ids[byte] for byte in _SPACE.encode() if byte in self._byte_ids]
        ids: list[int] = []
        for i, part in enumerate(text.split(_SPACE)):
            ids += (mark if i else []) + self.processor.encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if any(_SPACE in text for text in texts) and not self._adds_space:
            return super().encode_batch(texts)
        return [np.asarray(ids, np.int32) for ids in self.processor.encode(list(texts), num_threads=1)]

    @functools.cached_property
    def _adds_space(self) -> bool:
        """Whether the model puts a space before a text, so that parts of one cannot be encoded on their own."""
        return self.processor.encode("a", out_type=str)[0].startswith(_SPACE)

    @functools.cached_property
    def _byte_ids(self) -> dict[int, int]:
        processor = self.processor
        pieces = (
            (decoding.byte_piece(processor.id_to_piece(i)), i) for i in range(len(processor)) if processor.is_byte(i)
        )
        return {byte: i for byte, i in pieces if byte is not None}

    def decode(self, ids: Iterable[int]) -> str:
        return self.processor.decode([i for i in map(int, ids) if self._is_decoded(i)])

    def stream(self) -> decoding.TokenStream:
        runs = frozenset(self._byte_ids.values())
        return decoding.WindowStream(self.decode, self._is_decoded, decoding.Lookahead(runs))

    def _is_decoded(self, token: int) -> bool:
        return 0 <= token < len(self.processor)

    def spelling(self, token: int) -> str:
        return self.processor.id_to_piece(token) if self._is_decoded(token) and not self.pieces[token] else ""

    @functools.cached_property
    def pieces(self) -> Sequence[bytes]:
        return sentencepiece_pieces(self.processor)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerJsonVocabulary(Vocabulary):
    """A tokenizer.json file of Hugging Face `tokenizers`.

    Attributes:
      path: the tokenizer.json file, its folder, or a run folder with one.
      eos_token: the end token; None: that of tokenizer_config.json in the folder (or special_tokens_map.json, see
        files.special_tokens), or else one with a common name. If `path` is a file, only common names are tried. The same
        holds for the tokens below.
      bos_token: the beginning token; None: as for eos_token, or else the end token (as in GPT-2).
      add_bos_token: whether texts begin with the beginning token; None: as the tokenizer.json says (its post-processor).
      pad_token: the padding token; None: as for eos_token, or else the end token.
      mask_token: the mask token of a masked language model; None: as for eos_token, or else an unused id.
      size_multiple: the size is rounded up to a multiple of this.
      extra_ids: ids without text added after the tokenizer's.
    """

    path_fields = ("path",)

    path: FilePath
    eos_token: str | None = None
    bos_token: str | None = None
    add_bos_token: bool | None = None
    pad_token: str | None = None
    mask_token: str | None = None
    size_multiple: int = 128
    extra_ids: int = 0

    def __post_init__(self) -> None:
        _check_sizes(self)

    def own_files(self) -> OwnFiles:
        return OwnFiles(contents(self.path), {self.path: place_of(self.path)}, _DECIDING)

    @property
    def folder(self) -> str:
        """The folder of the tokenizer's files."""
        return folder_of(self.path)

    @property
    def file(self) -> str:
        """The tokenizer.json file."""
        return file_of(self.path, TOKENIZER_FILE)

    @functools.cached_property
    def tokenizer(self) -> Any:
        content = _content(self.file, "TokenizerJsonVocabulary.path")
        tokenizer = tokenizer_limits.load_json(content, self.path)
        if is_folder(self.path):
            added.complete(tokenizer, added.of_folder(self.folder), self.path)
        return tokenizer

    @functools.cached_property
    def eos_id(self) -> int:
        usual = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]", "<|eot_id|>")
        result = self._special("eos_token", self.eos_token, usual)
        if result is None:
            raise UserError(f"{self.path} has no end token of a common name: set TokenizerJsonVocabulary.eos_token")
        return result

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        return self._end_ids_of(self.folder)

    @functools.cached_property
    def bos_id(self) -> int:
        result = self._special("bos_token", self.bos_token, ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]"))
        return self.eos_id if result is None else result

    @functools.cached_property
    def begin_ids(self) -> tuple[int, ...]:
        return self._around[0] if self.add_bos_token is None else (self.bos_id,) * self.add_bos_token

    @property
    def closing_ids(self) -> tuple[int, ...]:
        return self._around[1]

    @functools.cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _ids_around(self.encode, lambda text: self.tokenizer.encode(text).ids)

    @functools.cached_property
    def pad_id(self) -> int:
        result = self._special("pad_token", self.pad_token, ("<pad>", "<|pad|>", "<|finetune_right_pad_id|>", "[PAD]"))
        return self.eos_id if result is None else result

    @functools.cached_property
    def mask_id(self) -> int:
        result = self._special("mask_token", self.mask_token, ("[MASK]", "<mask>", "<|mask|>"))
        return super().mask_id if result is None else result

    @functools.cached_property
    def sentinel_ids(self) -> Sequence[int]:
        names = map("<extra_id_{}>".format, itertools.count())
        named = itertools.takewhile(lambda i: i is not None, map(self.tokenizer.token_to_id, names))
        return tuple(named) or super().sentinel_ids

    def _special(self, field: str, name: str | None, usual: Sequence[str]) -> int | None:
        if name is None:
            name = self._special_tokens.get(field)
        if name is None:
            return next((i for i in map(self.tokenizer.token_to_id, usual) if i is not None), None)
        token_id = self.tokenizer.token_to_id(name)
        if token_id is None:
            raise UserError(f"{field} ({name!r}) is not a token of {self.path}")
        return token_id

    @functools.cached_property
    def _special_tokens(self) -> dict[str, str]:
        """Special tokens by their fields, from the files of the folder; empty if `path` is a file."""
        return special_tokens(self.folder) if is_folder(self.path) else {}

    def encode(self, text: str) -> list[int]:
        with _panics_as_user_errors(self.path):
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with _panics_as_user_errors(self.path):
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        with _panics_as_user_errors(self.path):
            encoding = self._rendered_tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for at, token in enumerate(encoding.ids):
            if token in self._greedy:  # exclude the white space from its offsets: it may belong to another message
                name, start = self._greedy[token], offsets[at, 0]
                start += text[start : offsets[at, 1]].index(name)
                offsets[at] = start, start + len(name)
        return np.asarray(encoding.ids, np.int32), offsets

    @functools.cached_property
    def _greedy(self) -> dict[int, str]:
        """The added tokens that include white space beside them (lstrip, rstrip)."""
        tokens = json.loads(self.tokenizer.to_str()).get("added_tokens", [])
        return {token["id"]: token["content"] for token in tokens if token["lstrip"] or token["rstrip"]}

    @functools.cached_property
    def _rendered_tokenizer(self) -> Any:
        """The tokenizer with a normalizer that removes guards, which runs after the search for special tokens."""
        import tokenizers

        spec = json.loads(self.tokenizer.to_str())
        unguard = {"type": "Replace", "pattern": {"String": GUARD}, "content": ""}
        before = spec.get("normalizer")
        spec["normalizer"] = {"type": "Sequence", "normalizers": [unguard, *([before] if before else [])]}
        spec["post_processor"] = None  # some exclude the space before a word from its token's offsets
        for token in spec.get("added_tokens", []):
            if token.get("special"):
                token["normalized"] = False  # search for it in the original text, with guards
        return tokenizers.Tokenizer.from_str(json.dumps(spec))

    def decode(self, ids: Iterable[int]) -> str:
        with _panics_as_user_errors(self.path):
            return self.tokenizer.decode([i for i in map(int, ids) if self._is_decoded(i)])

    def stream(self) -> decoding.TokenStream:
        bytes_only = decoding.is_byte_level(self._parts["decoder"])
        return super().stream() if bytes_only else decoding.WindowStream(self.decode, self._is_decoded, self._lookahead)

    def _is_decoded(self, token: int) -> bool:
        return token in self._spelled and token not in self._special_ids

    def spelling(self, token: int) -> str:
        return self._spelled.get(token, "") if token in self._special_ids else ""

    @functools.cached_property
    def _parts(self) -> dict[str, Any]:
        """The tokenizer.json, without its model."""
        spec = json.loads(self.tokenizer.to_str())
        return {name: part for name, part in spec.items() if name != "model"}

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(token["id"] for token in self._parts["added_tokens"] if token["special"])

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        plain = self.tokenizer.get_vocab(with_added_tokens=False).values()
        return frozenset(token["id"] for token in self._parts["added_tokens"]) - frozenset(plain)

    @functools.cached_property
    def _spelled(self) -> dict[int, str]:
        """The token of every id, as the tokenizer.json spells it."""
        tokens = {i: token for token, i in self.tokenizer.get_vocab(with_added_tokens=False).items()}
        return tokens | {token["id"]: token["content"] for token in self._parts["added_tokens"]}

    @functools.cached_property
    def _lookahead(self) -> decoding.Lookahead:
        return decoding.lookahead_of(self._parts["decoder"], self.tokenizer.get_vocab(with_added_tokens=True))

    @functools.cached_property
    def pieces(self) -> Sequence[bytes]:
        decoder, special = self._parts["decoder"], self._special_ids
        byte_level = '"ByteLevel"' in json.dumps([decoder, self._parts["pre_tokenizer"]])
        pieces = [b""] * (max(self._spelled) + 1)
        for i, token in self._spelled.items():
            if i not in special:
                pieces[i] = decoding.token_bytes(token, decoder, byte_level=byte_level)
        return pieces


def sentencepiece_pieces(processor: Any) -> list[bytes]:
    """The bytes of every id of a SentencePieceProcessor."""
    pieces = []
    for i in range(len(processor)):
        piece = processor.id_to_piece(i)
        if processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i):
            pieces.append(b"")
        elif processor.is_byte(i) and (byte := decoding.byte_piece(piece)) is not None:
            pieces.append(bytes([byte]))
        else:
            pieces.append(piece.replace(_SPACE, " ").encode())
    return pieces


def _content(path: str, name: str) -> bytes:
    """The bytes of a tokenizer's file."""
    try:
        return limits.read(path)
    except FileNotFoundError:
        where = "" if os.path.isabs(path) else f" (relative to {os.getcwd()})"
        raise UserError(f"{name} ({path!r}) does not exist or is not a file{where}") from None


@contextlib.contextmanager
def _panics_as_user_errors(path: str) -> Iterator[None]:
    """A context that turns panics of a library in Rust into a UserError."""
    try:
        yield
    except BaseException as error:
        if not tokenizer_limits.is_panic(error):
            raise
        raise UserError(f"{path} cannot be used with this text: {one_line(error)}") from None
