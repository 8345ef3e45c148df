"""The trackers for a run folder that exists already: those of its configuration, or those that a command names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from capibara import config
from capibara.checkpoints import run_manifest
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from capibara.monitoring.defaults import Monitoring
from capibara.monitoring.trackers import state
from capibara.monitoring.trackers.tracker import Tracker, addresses
from capibara.storage import stores

_TRACKERS = "Monitoring.trackers"
SHORT = {"wandb": "WandbTracker", "comet": "CometTracker", "mlflow": "MlflowTracker", "print": "PrintTracker"}


def read(
    folder: str,
    gin_files: Sequence[str],
    bindings: Sequence[str],
    search_paths: Sequence[str],
    *,
    to: Sequence[str],
    trust: bool,
) -> tuple[Tracker, ...]:
    """The trackers that are to get a run, with the options that it recorded.

    Args:
      folder: the run folder.
      gin_files, bindings, search_paths: as in config.parse; they win over the record.
      to: short names or classes; empty: the run's own trackers.
      trust: the user trusts the folder: its own modules and addresses are used.

    Raises:
      UserError: it is no run folder, has no trackers, or names an address that the user does not name.
    """
    for name in (run_manifest.CONFIG, run_manifest.METRICS):
        if not stores.folder_of(os.path.join(folder, name)).exists():
            raise UserError(f"{folder} is not a run folder with metrics: it has no {name}")
    run_manifest.check(stores.folder_of(folder))
    classes = [_class_of(name) for name in to]
    named = ", ".join(f"@{name}()" for name in classes)
    bindings = [*bindings, *([f"Monitoring.trackers = ({named},)"] if to else [])]
    where = os.path.join(folder, run_manifest.CONFIG)
    config.parse(gin_files, bindings, search_paths, config.Recorded(_of_trackers(folder, classes), where, trust))
    result = config.build(Monitoring, callbacks=(), more=()).trackers
    if not result:
        raise UserError(f"{folder} has no trackers (Monitoring.trackers is empty): name one, e.g. --to=wandb")
    names = {f"{type(item).__name__}.{field}" for item in result for field in addresses(item)}
    if names and not trust:
        config.parse(gin_files, bindings, search_paths)  # without the record
        _check_addresses(result, {name: config.values_of(name) for name in names})
    return result


def _of_trackers(folder: str, classes: Sequence[str]) -> str:
    """What a record says of trackers: its other classes may be of modules, or versions, that are not there.

    Args:
      folder: the run folder.
      classes: of the trackers that are to get the run; empty: its own.
    """
    text, result = state.configuration(folder)
    recorded = "" if classes else result.get(_TRACKERS, "")
    retained = {*classes, *map(_plain, re.findall(r"@([\w./]+)", recorded))}
    lines = [line for line in text.splitlines() if line.startswith("#")]  # they name the modules
    for name, value in result.items():
        if _plain(name.rpartition(".")[0]) in retained or recorded and name == _TRACKERS:
            lines.append(f"{name} = {value}")
    return "\n".join(lines) + "\n"


def _plain(name: str) -> str:
    """The name of a class without its scope and module."""
    return name.rpartition("/")[2].rpartition(".")[2]


def _class_of(name: str) -> str:
    """The class of a tracker by its short name, or its own name."""
    cls = SHORT.get(name.removesuffix("-offline"), name)
    if not cls.isidentifier():
        raise UserError(
            f"--to={name} is no tracker{did_you_mean(name, SHORT)}: name one of {', '.join(SHORT)}, or a class"
        )
    return cls


def _check_addresses(trackers: Sequence[Tracker], users: Mapping[str, Sequence[object]]) -> None:
    """Raises UserError if the record, which may be anyone's, says where data and keys are sent.

    Args:
      trackers: with what the record says.
      users: field -> the values that the user binds it to: only these, and the class's own default, are allowed.
    """
    for tracker in trackers:
        for field, value in addresses(tracker).items():
            name, default = f"{type(tracker).__name__}.{field}", getattr(type(tracker), field, None)
            if value != default and value not in users.get(name, ()):
                raise UserError(
                    f"config.gin has {name} = {value!r}, and a run folder may come from anyone: give --gin.{name}={value} if "
                    "you trust it"
                )
