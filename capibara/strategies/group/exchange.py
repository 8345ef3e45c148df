"""The exchange of a group: a folder, on a disk that all share or in a bucket, to which nodes and coordinator write.

  agreed.json                           the newest agreed model: the round that made it, its file, the state of the group
  nodes/NODE.json                       the round from whose model a node has gone on last
  rounds/000012/model.safetensors       the model that round 12 agreed on
  rounds/000012/outer.safetensors       the outer optimizer's state after it
  rounds/000012/updates/NODE.safetensors, NODE.json    what a node sends at the end of round 12, and what it says of it
  rounds/000012/proposal.json           the model on which nodes vote before round 12 agrees on it, if they do
  rounds/000012/ballots/NODE.json       a node's vote on it
  rounds/000012/report.json             who had a part in round 12, and why others had none

Each file is written atomically and has one writer: the coordinator, or the node that it is named after. A JSON file names
the hash of the file that it describes and is written after it. Nothing that is read is executed, and no more is read than
the group's parameters need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import Any

from etils import epath

from capibara.consensus.voting import Ballot
from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import hashing, stores
from capibara.storage.store import PARTIAL
from capibara.strategies.group import reports

AGREED = "agreed.json"
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_TOKENS = 1e18  # of a round
_KEPT = 2  # rounds whose models are kept, for nodes that are still reading one


@dataclasses.dataclass(frozen=True)
class Agreed:
    """The newest agreed model.

    Attributes:
      round_: the last round; 0: the model is the one that training began with.
      model: the model's file in the exchange; a failed round keeps an earlier one's.
      digest: of that file.
      size: its bytes.
      outer: the hash of the outer optimizer's state beside it.
      every: steps of a round.
      status: "running", "finished", or why the group has ended.
      accepted: the nodes that had a part in the last round, separated by commas.
      line: what the last round did, for people.
    """

    round_: int
    model: str
    digest: str
    size: int
    outer: str = ""
    every: int = 0
    status: str = "running"
    accepted: str = ""
    line: str = ""


@dataclasses.dataclass(frozen=True)
class Presence:
    """What a node last did.

    Attributes:
      round_: it has gone on from this round's model.
      run: a random name of its process.
    """

    round_: int
    run: str


@dataclasses.dataclass(frozen=True)
class Note:
    """What a node says of its update.

    Attributes:
      digest: of the update's file.
      size: its bytes.
      loss: the mean loss since the last round, in nats a token; NaN: it is not known, as after a restart.
      tokens: over which the loss is a mean; 0: it made no update.
      every: steps of a round.
      bits, block: how the update is stored; see arrays.Packed.
    """

    digest: str
    size: int
    loss: float
    tokens: float
    every: int = 0
    bits: int = 32
    block: int = 0


def is_node(name: str) -> bool:
    """Whether a name can be a node's."""
    return _NODE.fullmatch(name) is not None


def check_node(name: str, of: str) -> None:
    """Raises UserError if a node's name cannot be that of a file."""
    if not is_node(name):
        raise UserError(f"{of} is {name!r}, must be letters, digits, dots, - and _, at most 64: try 'node-a'")


class Exchange:
    """Reads and writes the files of an exchange.

    Args:
      folder: a path or a bucket's address.
    """

    def __init__(self, folder: str):
        self._folder, self._store = epath.Path(folder), stores.of(folder)

    def __str__(self) -> str:
        return str(self._folder)

    def check(self) -> None:
        """Raises UserError if the folder cannot be made, or cannot be listed."""
        try:
            self._store.make_folder(self._folder)
            self._store.list(self._folder)
        except OSError as error:
            raise UserError(
                f"the exchange {self._folder} cannot be used ({limits.cause(error)}): name a folder that all nodes can write to"
            ) from error

    # --- what the coordinator writes ---

    def agreed(self) -> Agreed | None:
        """The newest agreed model; None: there is none yet.

        Raises:
          UserError: the file is not the coordinator's.
        """
        return self.record(AGREED)

    def small(self, name: str) -> bytes:
        """The content of a small file; empty if there is none."""
        return self._store.read_version(self._folder / name, limits.SMALL_BYTES)[0]

    def record(self, name: str) -> Agreed | None:
        """A file with an `Agreed`; see `agreed`."""
        try:
            if not (data := self.small(name)):
                return None
            result = Agreed(**fields_of(data, Agreed))
            if not (result.round_ >= 0 and re.fullmatch(r"rounds/\d{6,9}/model\.safetensors", result.model)):
                raise ValueError("round or model")
        except (ValueError, OverflowError, OSError, limits.Refused) as error:
            raise UserError(f"{self._folder / name} is no record of a group ({limits.cause(error)})") from error
        return result

    def read_model(self, agreed: Agreed) -> bytes:
        """The content of an agreed model's file.

        Raises:
          UserError: it is missing or corrupted.
        """
        data = self._read(agreed.model, agreed.size)
        if hashing.hash_of(data) != agreed.digest:
            raise UserError(f"{self._folder / agreed.model} is corrupted: it does not have the hash in {AGREED}")
        return data

    def write_model(self, round_: int, data: bytes) -> Agreed:
        """Writes the model of a round; `publish` makes it the agreed one."""
        name = f"{round_folder(round_)}/model.safetensors"
        self.write(name, data)
        return Agreed(round_, name, hashing.hash_of(data), len(data))

    def publish(self, agreed: Agreed) -> None:
        """Makes a model the agreed one."""
        self.write(AGREED, as_json(agreed))

    def write_report(self, round_: int, report: dict[str, Any]) -> None:
        """Writes the report of a round."""
        self.write(f"{round_folder(round_)}/report.json", json.dumps(report, indent=1).encode() + b"\n")

    def reports(self) -> list[dict[str, Any]]:
        """The reports of all rounds, in order, without those that cannot be read."""
        return reports.every(self._folder)

    def discard(self, model: Agreed) -> None:
        """Removes a model that was not agreed, and the outer optimizer's state after it."""
        for name in (model.model, model.model.replace("model.", "outer.")):
            self._store.remove(self._folder / name)

    def tidy(self, agreed: Agreed) -> None:
        """Removes updates and models of earlier rounds that nobody needs any more."""
        for name in self._store.list(self._folder):
            result = re.match(r"rounds/(\d+)/(?!report\.json$)", name)
            is_old = result is not None and int(result[1]) <= agreed.round_ - _KEPT
            is_partial = name.startswith(f"{AGREED}.") and name.endswith(PARTIAL)  # of a coordinator that was killed
            if is_partial or (is_old and not name.startswith(agreed.model.rpartition("/")[0])):
                self._store.remove(self._folder / name)

    def read_outer(self, agreed: Agreed, most: int) -> bytes:
        """The outer optimizer's state that belongs to an agreed model.

        Raises:
          UserError: it is missing or corrupted.
        """
        name = agreed.model.replace("model.", "outer.")
        data = self._read(name, most)
        if hashing.hash_of(data) != agreed.outer:
            raise UserError(f"{self._folder / name} is corrupted: it does not have the hash in {AGREED}")
        return data

    def write_outer(self, round_: int, data: bytes) -> str:
        """Writes the outer optimizer's state after a round; returns its hash."""
        self.write(f"{round_folder(round_)}/outer.safetensors", data)
        return hashing.hash_of(data)

    # --- what nodes write ---

    def send(self, round_: int, node: str, data: bytes, note: Note) -> None:
        """Writes a node's update and its note."""
        self.write(f"{round_folder(round_)}/updates/{node}.safetensors", data)
        self.write(f"{round_folder(round_)}/updates/{node}.json", as_json(note))

    def arrive(self, node: str, presence: Presence) -> None:
        """Writes from which round's model a node goes on."""
        self.write(f"nodes/{node}.json", as_json(presence))

    def presence(self, node: str) -> Presence | None:
        """What a node last did; None: nothing that can be read."""
        with contextlib.suppress(ValueError, OverflowError, OSError, limits.Refused):
            data = self.small(f"nodes/{node}.json")
            return Presence(**fields_of(data, Presence)) if data else None
        return None

    def senders(self, round_: int) -> list[str]:
        """The nodes that have sent an update in a round, sorted."""
        folder = self._folder / round_folder(round_) / "updates"
        if not folder.exists():
            return []
        names = (name.removesuffix(".json") for name in self._store.list(folder) if name.endswith(".json"))
        return sorted(name for name in names if is_node(name))

    def has_sent(self, round_: int, node: str) -> bool:
        """Whether a node has sent an update in a round."""
        return (self._folder / round_folder(round_) / "updates" / f"{node}.json").exists()

    def note(self, round_: int, node: str) -> Note:
        """What a node says of its update.

        Raises:
          UserError: it is no such file.
        """
        path = self._folder / round_folder(round_) / "updates" / f"{node}.json"
        try:
            data, _ = self._store.read_version(path, limits.SMALL_BYTES)
            result = Note(**fields_of(data, Note))
            result = dataclasses.replace(result, loss=float(result.loss), tokens=float(result.tokens))
        except (ValueError, OverflowError, OSError, limits.Refused) as error:
            raise UserError(f"its note is not one ({limits.cause(error)})") from error
        if result.size < 0 or not 0 <= result.tokens <= _MOST_TOKENS:
            raise UserError(
                f"its note has size {result.size} and tokens {result.tokens:g}, must be from 0, and at most {_MOST_TOKENS:g} tokens"
            )
        return result

    def update(self, round_: int, node: str, note: Note, most: int) -> bytes:
        """The content of a node's update.

        Raises:
          UserError: it is missing, too large or corrupted; in words that follow the node's name.
        """
        if note.size > most:
            raise UserError(f"its update has {note.size} bytes, must be at most {most}")
        try:
            data = self._store.read(self._folder / round_folder(round_) / "updates" / f"{node}.safetensors", note.size)
        except limits.Refused as error:
            raise UserError(f"its update {error}") from error
        except OSError as error:
            raise UserError(f"its update cannot be read ({limits.cause(error)})") from error
        if hashing.hash_of(data) != note.digest:
            raise UserError("its update is corrupted: it does not have the hash in its note")
        return data

    def _read(self, name: str, most: int) -> bytes:
        path = self._folder / name
        try:
            return self._store.read(path, most)
        except limits.Refused as error:
            raise UserError(f"{path} {error}") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read ({limits.cause(error)})") from error

    def write(self, name: str, data: bytes) -> None:
        """Writes a file, atomically."""
        path = self._folder / name
        self._store.make_folder(path.parent)
        self._store.write_atomic(path, data)


def round_folder(number: int) -> str:
    """The folder of a round in an exchange."""
    return f"rounds/{number:06d}"


def as_json(record: Agreed | Ballot | Note | Presence) -> bytes:
    """A record as the content of its file."""
    return json.dumps(dataclasses.asdict(record)).encode() + b"\n"


def fields_of(data: bytes, kind: type[Agreed] | type[Ballot] | type[Note] | type[Presence]) -> dict[str, Any]:
    """The fields of a record; raises ValueError if one is missing, unknown or has another type."""
    result = limits.parse_json(data, finite=False)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(result, dict) or not result.keys() <= fields.keys():
        raise ValueError("other fields")
    for name, field in fields.items():
        if name not in result:
            if field.default is dataclasses.MISSING:
                raise ValueError(f"{name} is missing")
            continue
        kinds: tuple[type, ...] = {"int": (int,), "str": (str,), "float": (int, float)}[str(field.type)]
        if not isinstance(result[name], kinds) or isinstance(result[name], bool):
            raise ValueError(f"{name} is {limits.shortened(result[name])}")
    return result
