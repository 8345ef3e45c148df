"""The splits of a data set's folder: by the `configs` of its card, or by the names of its folders and files.

The rules are those of Hugging Face's datasets 5.2 (data_files.py), with two differences: a file whose name says nothing is for
training where no other is, and upper case counts as lower case.
"""

from __future__ import annotations

import enum
import glob
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from capibara.core import limits
from capibara.core.types import UserError

CARD = "README.md"
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Files beside the data that describe it."""
_WORDS = re.compile(r"[-._ 0-9]+")
_MOST_VALUES, _DEPTH = 100_000, 6  # of a card's configurations
_FRONT = re.compile(rb"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)


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


def named(split: str) -> Split | None:
    """The split that a name such as "train_sft" says; None: it says none."""
    return _of_words(split)


def by_names(names: Sequence[str]) -> list[Split | None]:
    """The split of each file.

    If a folder is named after a split, folders decide for all files, otherwise the names of the files.

    Args:
      names: paths below the data set's folder.
    """
    by_folder = [_of_folders(os.path.dirname(name)) for name in names]
    return by_folder if any(by_folder) else [_of_name(os.path.basename(name)) for name in names]


def by_card(parameter: str, folder: str, names: Sequence[str]) -> list[Split | None] | None:
    """The split of each file by the card of a folder on this machine; None: the card names none of these files.

    Args:
      parameter: names the folder, for errors.
      folder: the data set's folder.
      names: paths below it.

    Raises:
      UserError: the card has several configurations, and none is the default.
    """
    patterns = _patterns(parameter, folder)
    result: dict[str, Split | None] = {}
    for split, pattern in patterns:
        for name in glob.glob(pattern, root_dir=folder, recursive=True):
            result.setdefault(os.path.normpath(name), split)
    labels = [result.get(os.path.normpath(name)) for name in names]
    return labels if any(labels) else None


def of_folder(parameter: str, folder: str, names: Sequence[str]) -> list[Split | None]:
    """The split of each file of a folder, by its card or else by names; arguments as for `by_card`."""
    return by_card(parameter, folder, names) or by_names(names)


def of_use(parameter: str, folder: str, names: Sequence[str], use: Use) -> list[bool]:
    """Which files of a folder are read; arguments as for `chosen`."""
    if use is Use.ALL:
        return [True] * len(names)
    labels = of_folder(parameter, folder, names)
    split = next((split for split in use.value if split in labels), None)
    if split is None:
        return [use is not Use.TRAINING or label is None for label in labels]
    return [label is split for label in labels]


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
        splits = ", ".join(sorted({str(label) for label in of_folder(parameter, folder, names)}))
        raise UserError(f"{parameter} ({folder!r}) has the splits {splits} and none to train on: name files, or a glob")
    if others := [name for name, is_read in zip(names, result, strict=True) if not is_read]:
        line = "%s (%s): %d files for %s; %d of other splits are not read, such as %s: name files to choose others"
        logger, purpose = logging.getLogger(__name__), use.name.lower()
        logger.warning(line, parameter, folder, sum(result), purpose, len(others), others[0])
    return result


def _of_folders(folder: str) -> Split | None:
    labels = [_of_words(part) for part in reversed(folder.split(os.sep))]
    return next((label for label in labels if label), None)


def _of_name(name: str) -> Split | None:
    """The ending is no word of a name, and a keyword is before a dash, dot, underscore, space or digit."""
    return _of_words(name.rpartition(".")[0] if "." in name else "")


def _of_words(text: str) -> Split | None:
    words = {*_WORDS.split(text.lower())}
    return next((split for split in Split if words & split.keywords), None)


def _patterns(parameter: str, folder: str) -> list[tuple[Split | None, str]]:
    """The globs of each split of the card's configuration; splits of other names have None."""
    configs = _configs(os.path.join(folder, CARD))
    if not configs:
        return []
    named = [config for config in configs if config.get("default") is True or config.get("config_name") == "default"]
    if len(configs) > 1 and not named:
        names = ", ".join(str(config.get("config_name")) for config in configs[:8])
        raise UserError(
            f"{parameter} ({folder!r}) is a data set of {len(configs)} configurations ({names}): name the files of one, or a glob"
        )
    config = named[0] if named else configs[0]
    return [
        (_of_words(split), pattern) for split, patterns in _data_files(config.get("data_files")) for pattern in patterns
    ]


def _configs(path: str) -> list[Mapping[str, Any]]:
    """The configurations with files of a card; none: it has no such part, or is no card."""
    if not os.path.isfile(path):
        return []
    try:
        front = _FRONT.match(limits.read(path, limits.SMALL_BYTES).replace(b"\r\n", b"\n"))
        node = yaml.compose(front[1], Loader=yaml.CSafeLoader) if front else None
        value = _Values().of(node, 0)
    except (limits.Refused, UserError, yaml.YAMLError, RecursionError):
        return []  # a card is prose: what it does not say, names say
    entries = value.get("configs") if isinstance(value, dict) else None
    return [
        entry
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and entry.get("data_files")
    ]


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
            return True if node.tag.endswith(":bool") and node.value.lower() == "true" else node.value
        return None


def _data_files(value: Any) -> list[tuple[str, list[str]]]:
    """(split, globs) of `data_files`: a glob, several, splits with globs, or entries of `split` and `path`."""
    if isinstance(value, Mapping):
        return [(str(split), _texts(paths)) for split, paths in value.items()]
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        entries = [entry for entry in value if isinstance(entry, Mapping)]
        return [(str(entry.get("split", Split.TRAIN)), _texts(entry.get("path"))) for entry in entries]
    return [(Split.TRAIN, _texts(value))]


def _texts(value: Any) -> list[str]:
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
