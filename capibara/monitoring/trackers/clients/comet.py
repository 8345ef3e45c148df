"""The tracker of Comet: `Monitoring.trackers = (@CometTracker(),)`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError
from capibara.monitoring.trackers.tracker import ADDRESS, Moment, TrackedRun, Tracker, check_address

_MODES = (None, "online", "offline")
_URL = "COMET_URL_OVERRIDE"


@configurable
@dataclasses.dataclass(kw_only=True)
class CometTracker(Tracker):
    """Shows a run in Comet. The key is in COMET_API_KEY, or in Comet's own configuration file.

    Attributes:
      project: of Comet.
      workspace: of the project; None: the user's default.
      name: of the experiment; None: that of the run folder.
      tags: of the experiment.
      mode: "online", or "offline": archives in the run folder for `comet upload`; None: COMET_MODE, or online.
      server: its address; None: COMET_URL_OVERRIDE, or Comet's own.
    """

    project: str = "capibara"
    workspace: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    mode: str | None = None
    server: str | None = dataclasses.field(default=None, metadata=ADDRESS)

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise UserError(f"CometTracker.mode is {self.mode!r}, must be 'online', 'offline' or None")
        check_address("CometTracker.server", self.server, "COMET_API_KEY")
        if not self.project.strip():
            raise UserError("CometTracker.project is empty: name one, e.g. 'capibara'")
        self._experiment: Any  # set by start

    @property
    def label(self) -> str:
        """What was written for `comet upload` does not count as sent: the online tracker has a state of its own."""
        return "comet-offline" if self._offline else "comet"

    @property
    def _offline(self) -> bool:
        return (self.mode or os.environ.get("COMET_MODE", "").lower()) == "offline"

    @property
    def url(self) -> str | None:
        return None if self._offline else self._experiment.url

    def start(self, run: TrackedRun) -> str | None:
        if self.server is not None:
            os.environ[_URL] = self.server
        comet = extras.require("comet_ml", extra="comet", why="@CometTracker")
        quiet = {name: False for name in ("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch")}
        quiet |= {name: False for name in ("log_env_details", "auto_output_logging", "auto_param_logging")}
        quiet |= {name: False for name in ("auto_metric_logging", "auto_log_co2")}
        self._experiment = comet.start(
            workspace=self.workspace,
            project_name=self.project,
            experiment_key=run.run_id or run.uid,
            mode="get_or_create",
            online=not self._offline,
            experiment_config=comet.ExperimentConfig(
                offline_directory=run.scratch,
                display_summary_level=0,
                name=self.name or run.name,
                tags=list(self.tags),
                **quiet,
            ),
        )
        self._experiment.log_parameters(run.values)
        return str(self._experiment.get_key())

    def log(self, moment: Moment, metrics: Mapping[str, float]) -> None:
        self._experiment.log_metrics(dict(metrics), step=moment.step)

    def text(self, moment: Moment, name: str, text: str) -> None:
        if name.startswith("sample/"):
            self._experiment.log_text(text, step=moment.step, metadata={"prompt": name.removeprefix("sample/")})
        else:
            self._experiment.log_asset_data(text, name=name, step=moment.step, overwrite=True)

    def facts(self, moment: Moment, facts: Mapping[str, object]) -> None:
        others = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
        self._experiment.log_others(others)

    def picture(self, moment: Moment, name: str, path: str) -> None:
        self._experiment.log_image(path, name=name, step=moment.step, overwrite=True)

    def roll_back(self, moment: Moment) -> None:
        self._experiment.log_other("rolled_back_to", moment.step)

    def flush(self) -> bool:
        return not self._offline and bool(self._experiment.flush())

    def finish(self, reason: str) -> None:
        self._experiment.log_other("end", reason)
        self._experiment.end()
