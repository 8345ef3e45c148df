"""How a training ended, and what its run folder holds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from capibara.core import extras
from capibara.core.types import UserError

if TYPE_CHECKING:
    import matplotlib.figure

    from capibara.api.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """A training that has ended, or was interrupted; the command line resumes it from its folder.

    Attributes:
      folder: the run folder.
      step: steps done.
      reason: "finished", "early_stopping", "privacy_budget" or "interrupted".
      signal_number: of the signal that interrupted it.
    """

    folder: str
    step: int
    reason: str
    signal_number: int | None = None

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, as if the run had never been interrupted."""
        from capibara.monitoring.metrics_file.loggers import read_metrics

        return read_metrics(self.folder)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each step that was logged or evaluated: its metrics, those of evaluations as eval_NAME."""
        rows: dict[int, dict[str, Any]] = {}
        for record in self.records:
            prefix = {"train": "", "eval": "eval_"}.get(record["kind"])
            if prefix is None:
                continue
            row = rows.setdefault(record["step"], {"step": record["step"]})
            row |= {prefix + name: value for name, value in record.items() if name not in ("kind", "step", "time")}
        return [rows[step] for step in sorted(rows)]

    def frame(self) -> Any:
        """`history` as a frame of pandas, with the step as its index."""
        pandas = extras.require("pandas", why="TrainingResult.frame")
        return pandas.DataFrame(self.history or {"step": []}).set_index("step")

    @property
    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint."""
        from capibara.checkpoints import step_folders

        folder = step_folders.folder_of(self.folder)
        return step_folders.steps(folder) if folder.is_dir() else []

    @property
    def best_step(self) -> int | None:
        """The step with the lowest loss of an evaluation, which may have no checkpoint; None: there was none."""
        losses = [(row["eval_loss"], row["step"]) for row in self.history if "eval_loss" in row]
        return min(losses)[1] if losses else None

    @property
    def model(self) -> LanguageModel:
        """The model at the newest checkpoint, with its adapters merged; loaded anew at each use."""
        from capibara.api.opening import load

        return load(self.folder, trust=True)  # what this process trained, it has imported

    def plot(self, *names: str) -> matplotlib.figure.Figure:
        """A figure of metrics by steps, by default the losses of training and evaluations.

        Raises:
          UserError: no step has a metric of this name.
        """
        import matplotlib.figure

        history = self.history
        figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for name in names or ("loss", "eval_loss"):
            points = [(row["step"], row[name]) for row in history if name in row]
            if not points and names:
                known = sorted({key for row in history for key in row} - {"step"})
                raise UserError(f"no step has a metric {name!r}: the run has {', '.join(known)}")
            if points:
                axes.plot(*zip(*points), label=name, marker="o" if name.startswith("eval_") else None)
        axes.set_xlabel("step")
        axes.legend()
        return figure
