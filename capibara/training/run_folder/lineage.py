"""Records a run's lineage as OpenLineage events: `Monitoring.more = (@LineageFile(),)`."""

from __future__ import annotations

import dataclasses
import os

from capibara.builders.lineage import chain
from capibara.builders.lineage.events import Dataset
from capibara.builders.lineage.recording import Recorder
from capibara.config import configurable
from capibara.storage import stores
from capibara.training.base.callbacks import Callback, RunInfo


@configurable
@dataclasses.dataclass(kw_only=True)
class LineageFile(Callback):
    """Appends the run's OpenLineage events to lineage.jsonl in the run folder.

    START when training begins; COMPLETE when it ends, with the data sets that the newest checkpoint has seen, and with
    that checkpoint; ABORT where it is interrupted. A run that was killed gets its ABORT when it resumes.

    Attributes:
      url: of a server that gets the events, too; None: OPENLINEAGE_URL, if it is set.
    """

    url: str | None = None

    def __post_init__(self) -> None:
        self._model_dir = ""
        self._recorder: Recorder  # set by on_train_begin

    def on_train_begin(self, run: RunInfo) -> None:
        self._model_dir = stores.of(run.model_dir).absolute(run.model_dir)
        self._recorder = Recorder(self._model_dir, "train", {"config.gin": run.config}, url=self.url)
        self._recorder.start(_inputs(self._model_dir))

    def on_train_end(self, step: int, reason: str) -> None:
        if reason == "interrupted":
            self._recorder.abort()
            return
        newest = chain.newest_step(self._model_dir)
        outputs = [] if newest is None else [Dataset(path=newest[0], version=str(newest[1].get("xxh128")))]
        self._recorder.complete(outputs, _inputs(self._model_dir))


def _inputs(model_dir: str) -> list[Dataset]:
    """The data that the newest checkpoint of a run has seen; empty: there is none, or it is encrypted."""
    newest = chain.newest_step(model_dir)
    result = [] if newest is None else chain.datasets_of(newest[1])
    return [
        Dataset(
            path=os.fspath(item["path"]),
            version=item.get("fingerprint") or item.get("sha256"),
            bytes=item.get("bytes"),
            files=item.get("files", 1),
        )
        for item in result
        if "path" in item
    ]
