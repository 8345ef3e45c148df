"""The tracker of Weights & Biases: `Monitoring.trackers = (@WandbTracker(),)`."""

from __future__ import annotations

import dataclasses
import html
import os
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError
from capibara.monitoring.trackers.tracker import ADDRESS, Moment, TrackedRun, Tracker, check_address

_MODES = (None, "online", "offline")
_INIT_S = 60.0
_GROUPS = ("train", "eval", "system", "spent")
_EXIT_CODES = {"crashed": 1, "interrupted": 255}  # of W&B: another number than 0 shows as failed, 255 as killed


@configurable
@dataclasses.dataclass(kw_only=True)
class WandbTracker(Tracker):
    """Shows a run in Weights & Biases. The key is in WANDB_API_KEY, or where `wandb login` has put it.

    W&B's own step is the number of the line in metrics.jsonl, which never goes back; the axis of every chart is the
    training step (train/step, eval/step, system/step). Lines that the server has already are not sent again.

    Attributes:
      project: of W&B.
      entity: team or user; None: the user's default.
      name: of the run; None: that of the run folder.
      group: of the run, such as the name of a sweep.
      tags: of the run.
      mode: "online", or "offline": files in the run folder for `wandb sync`; None: WANDB_MODE, or online.
      base_url: of the server; None: WANDB_BASE_URL, or W&B's own.
    """

    project: str = "capibara"
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: str | None = None
    base_url: str | None = dataclasses.field(default=None, metadata=ADDRESS)

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise UserError(f"WandbTracker.mode is {self.mode!r}, must be 'online', 'offline' or None")
        check_address("WandbTracker.base_url", self.base_url, "WANDB_API_KEY")
        if not self.project.strip():
            raise UserError("WandbTracker.project is empty: name one, e.g. 'capibara'")
        self._wandb: Any  # set by start, as is the run
        self._run: Any
        self._first = 0  # of the lines that the server has not got

    @property
    def label(self) -> str:
        """What was written for `wandb sync` does not count as sent: the online tracker has a state of its own."""
        return "wandb-offline" if self._is_offline else "wandb"

    @property
    def _is_offline(self) -> bool:
        return (self.mode or os.environ.get("WANDB_MODE")) == "offline"

    @property
    def url(self) -> str | None:
        return None if self._is_offline else self._run.url

    def start(self, run: TrackedRun) -> str | None:
        self._wandb = wandb = extras.require("wandb", extra="wandb", why="@WandbTracker")
        settings = {
            "console": "off",
            "disable_code": True,
            "disable_git": True,  # git state, machine and usage come from the training process
            "init_timeout": _INIT_S,
            "silent": True,
            "x_disable_meta": True,
            "x_disable_stats": True,
        }
        if self.base_url is not None:
            settings["base_url"] = self.base_url
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or run.name,
            group=self.group,
            tags=list(self.tags) or None,
            id=run.run_id or run.uid,
            resume="allow",
            mode=self.mode,
            dir=run.scratch,
            reinit="create_new",
            settings=wandb.Settings(**settings),
        )
        self._run.config.update(run.values, allow_val_change=True)
        self._first = int(self._run.step or 0)
        for group in _GROUPS:
            self._run.define_metric(f"{group}/step", hidden=True)
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step", step_sync=True)
        return str(self._run.id)

    def log(self, moment: Moment, metrics: Mapping[str, float]) -> None:
        steps = {f"{name.partition('/')[0]}/step": moment.step for name in metrics}
        self._log(moment, {**metrics, **steps})

    def text(self, moment: Moment, name: str, text: str) -> None:
        if name.startswith("sample/"):
            prompt = name.removeprefix("sample/")
            table = self._wandb.Table(columns=["step", "prompt", "text"], data=[[moment.step, prompt, text]])
            self._log(moment, {name: table})
        else:
            self._log(moment, {f"text/{name}": self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def facts(self, moment: Moment, facts: Mapping[str, object]) -> None:
        self._run.config.update(dict(facts), allow_val_change=True)

    def picture(self, moment: Moment, name: str, path: str) -> None:
        at = Moment(moment.step, moment.time_s, max(moment.line, self._first))
        self._log(at, {f"picture/{name}": self._wandb.Image(path, caption=f"step {moment.step}")})

    def roll_back(self, moment: Moment) -> None:
        self._run.summary["rolled_back_to"] = moment.step

    def flush(self) -> bool:
        return False  # it sends in the background: only the end is certain

    def finish(self, reason: str) -> None:
        self._run.summary["end"] = reason
        self._run.finish(exit_code=_EXIT_CODES.get(reason, 0))

    def _log(self, moment: Moment, values: Mapping[str, object]) -> None:
        if moment.line >= self._first:
            self._run.log({**values, "_timestamp": moment.time_s}, step=moment.line)
