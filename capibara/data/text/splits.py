"""The splits of a data set's folder: by the `configs` of its card, or by the names of its folders and files.

The rules are those of Hugging Face's datasets 5.2 (data_files.py), with two differences: a file whose name says nothing is for
training where no other is, and upper case counts as lower case.
"""

from __future__ import annotations

import codecs
import enum
import fnmatch
import glob
import logging
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import stores

CARD = "README.md"
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Files beside the data that describe it."""
_WORDS = re.compile(r"[-._ 0-9]+")
_SHARDED = re.compile(r"data/([^/]*)-\d{5}-of-\d{5}[^/]*\.[^/]*", re.ASCII)
_GLOB = re.compile(r"[*?\[]")
_MOST_VALUES, _MOST_GLOBS, _DEPTH = 100_000, 1000, 6  # of a card's configurations
_MOST_NESTED = 100
_TRUE = ("true", "yes", "on")  # of YAML 1.1
_FRONT = re.compile(rb"\A---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)


class Split(enum.StrEnum):
    """A split of a data set; its keywords are parts of names, between dashes, dots, underscores, spaces and digits."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"

    @property
    def keywords(self) -> frozenset[str]:
        return _KEYWORDS[self]


class Use(enum.Enum):
    """What a folder is read for: the first of these splits that it has is read.

    A folder with none of them is read whole; for training without the files of other splits.
    """

    ALL = ()
    TRAINING = (Split.TRAIN,)
    VALIDATION = (Split.VALIDATION, Split.TEST)
    EVALUATION = (Split.TEST, Split.VALIDATION)


_KEYWORDS = {
    Split.TRAIN: frozenset(("train", "training")),
    Split.VALIDATION: frozenset(("validation", "valid", "dev", "val")),
    Split.TEST: frozenset(("test", "testing", "eval", "evaluation")),
}


def named(text: str) -> Split | None:
    """The split that a name such as "train_sft" says; None: it says none."""
    words = {*_WORDS.split(text.lower())}
    return next((split for split in Split if words & split.keywords), None)


def by_names(names: Sequence[str]) -> dict[str, Split | None]:
    """The split of each file that is one of the data set.

    If there are files such as data/train-00000-of-00004.parquet, they alone are the data set. Otherwise, if a folder is named
    after a split, folders decide for all files, and else the names of the files.

    Args:
      names: paths below the data set's folder, with slashes.
    """
    sharded = {name: named(match[1]) for name in names if (match := _SHARDED.fullmatch(name))}
    by_folder = {name: _of_folders(posixpath.dirname(name)) for name in names}
    if sharded or any(by_folder.values()):
        return sharded or by_folder
    return {name: named(posixpath.basename(name).rpartition(".")[0]) for name in names}


def by_card(parameter: str, folder: str, names: Sequence[str]) -> dict[str, Split | None]:
    """The split of each file that the configuration of a folder's card names; none: the card names none of these files.

    Args:
      parameter: names the folder, for errors.
      folder: the data set's folder, a path or address.
      names: paths below it, with slashes.

    Raises:
      UserError: the card has several configurations, and none is the default.
    """
    config = _config(parameter, folder)
    above = posixpath.normpath(str(config.get("data_dir") or "."))
    if config and not config.get("data_files"):
        inside = {
            posixpath.relpath(name, above): name for name in names if _is_match(name, posixpath.join(above, "**"))
        }
        return {inside[name]: split for name, split in by_names([*inside]).items()}
    result: dict[str, Split | None] = {}
    known = {*names}
    for split, patterns in _data_files(config.get("data_files")):
        for pattern in (posixpath.normpath(posixpath.join(above, pattern)) for pattern in patterns):
            matching = names if _GLOB.search(pattern) else known & {pattern}
            result |= {name: named(split) for name in matching if name not in result and _is_match(name, pattern)}
    return result


def of_folder(parameter: str, folder: str, names: Sequence[str]) -> dict[str, Split | None]:
    """The split of each file that is one of the data set, by its card or else by names; arguments as for `by_card`."""
    return by_card(parameter, folder, names) or by_names(names)


def of_use(parameter: str, folder: str, names: Sequence[str], use: Use) -> list[bool]:
    """Which files of a folder are read; arguments as for `chosen`."""
    if use is Use.ALL:
        return [True] * len(names)
    labels = of_folder(parameter, folder, names)
    split = next((split for split in use.value if split in labels.values()), None)
    if split is None:
        return [name in labels and (use is not Use.TRAINING or labels[name] is None) for name in names]
    return [labels.get(name) is split for name in names]


def chosen(parameter: str, folder: str, names: Sequence[str], use: Use) -> list[bool]:
    """As `of_use`, and says which files are not read.

    Args:
      parameter: names the folder, for errors.
      folder: the data set's folder.
      names: paths of its files below it, at least one.
      use: what for.

    Raises:
      UserError: all files are of splits that training does not read, or the card's configuration must be chosen.
    """
    result = of_use(parameter, folder, names, use)
    if not any(result):
        splits = ", ".join(sorted({str(label) for label in of_folder(parameter, folder, names).values()}))
        raise UserError(f"{parameter} ({folder!r}) has the splits {splits} and none to train on: name files, or a glob")
    if others := [name for name, is_read in zip(names, result, strict=True) if not is_read]:
        line = "%s (%s): %d files for %s; %d of other splits are not read, such as %s: name files to choose others"
        logger, purpose = logging.getLogger(__name__), use.name.lower()
        logger.warning(line, parameter, folder, sum(result), purpose, len(others), others[0])
    return result


def _of_folders(folder: str) -> Split | None:
    labels = map(named, reversed(folder.split("/")))
    return next((label for label in labels if label), None)


def _is_match(name: str, pattern: str) -> bool:
    """Whether a path matches a glob, of which `**` stands for any number of folders, at its end for all files in them.

    A card is matched with names alone: a disk would be read wherever its globs lead, such as to /**.
    """
    parts = name.split("/")
    starts = {0}  # the numbers of parts of the path that the glob's parts so far match
    for part in pattern.split("/"):
        if part == "**":
            starts = {*range(min(starts), len(parts) + 1)}
        else:
            starts = {start + 1 for start in starts if start < len(parts) and fnmatch.fnmatchcase(parts[start], part)}
        if not starts:
            return False
    return len(parts) in starts


def _config(parameter: str, folder: str) -> Mapping[str, Any]:
    """The default configuration of a folder's card, or the only one; empty: there is none."""
    configs = _configs(posixpath.join(folder, CARD))
    usual = [config for config in configs if config.get("default") is True or config.get("config_name") == "default"]
    if len(configs) > 1 and not usual:
        names = ", ".join(limits.shortened(config.get("config_name")) for config in configs[:8])
        raise UserError(
            f"{parameter} ({folder!r}) is a data set of {len(configs)} configurations ({names}): name the files of one, or a glob"
        )
    return next(iter(usual or configs), {})


def _configs(path: str) -> list[Mapping[str, Any]]:
    """The configurations with files of a card; none: it has no such part, or is no card."""
    try:
        front = _FRONT.match(_content(path).removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n"))
        value = _Values().of(_composed(front[1]), 0) if front else None
    except (limits.Refused, UserError, yaml.YAMLError):
        return []  # a card is prose: what it does not say, names say
    entries = value.get("configs") if isinstance(value, dict) else None
    configs: list[Mapping[str, Any]] = [
        entry for entry in (entries if isinstance(entries, list) else ()) if isinstance(entry, dict)
    ]
    configs = [config for config in configs if config.get("data_files") or config.get("data_dir")]
    globs = [text for config in configs for _, texts in _data_files(config.get("data_files")) for text in texts]
    return configs if sum(map(bool, map(_GLOB.search, globs))) <= _MOST_GLOBS else []


def _content(path: str) -> bytes:
    """The bytes of a card; none: there is no card."""
    store = stores.of(path)
    if store.has_local_paths:
        return limits.read(path, limits.SMALL_BYTES) if os.path.isfile(path) else b""
    entry = next(iter(store.matching(glob.escape(path))), None)
    return store.read_range(path, 0, entry.size) if entry and entry.size <= limits.SMALL_BYTES else b""


def _composed(text: bytes) -> yaml.Node | None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_NESTED:  # PyYAML's composer in C calls itself, and ends the process where the stack does
            raise limits.Refused(f"is nested more than {_MOST_NESTED} deep")
    return yaml.compose(text, Loader=yaml.CSafeLoader)


class _Values:
    """Makes values of a card's nodes: aliases could repeat a small text without end."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def of(self, node: yaml.Node | None, depth: int) -> Any:
        """Dicts, lists, texts and True; deeper values than a configuration has are left out."""
        self._left -= 1
        if self._left < 0:
            raise limits.Refused(f"has more than {_MOST_VALUES:,} values")
        if isinstance(node, yaml.MappingNode) and depth < _DEPTH:
            pairs = [(key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
            # Descriptions of columns and sizes are most of a large card.
            return {key: self.of(value, depth + 1) for key, value in pairs if depth or key == "configs"}
        if isinstance(node, yaml.SequenceNode) and depth < _DEPTH:
            return [self.of(value, depth + 1) for value in node.value]
        if isinstance(node, yaml.ScalarNode):
            return True if node.tag.endswith(":bool") and node.value.lower() in _TRUE else node.value
        return None


def _data_files(value: object) -> list[tuple[str, list[str]]]:
    """(split, globs) of `data_files`: a glob, several, splits with globs, or entries of `split` and `path`."""
    if isinstance(value, Mapping):
        return [(str(split), _texts(paths)) for split, paths in value.items()]
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        entries = [entry for entry in value if isinstance(entry, Mapping)]
        return [(str(entry.get("split", Split.TRAIN)), _texts(entry.get("path"))) for entry in entries]
    return [(Split.TRAIN, _texts(value))]


def _texts(value: object) -> list[str]:
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
