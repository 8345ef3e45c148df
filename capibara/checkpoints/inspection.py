"""Inspects a run folder's checkpoints from outside: lists, verifies, seals and prunes them."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from capibara.checkpoints import manifest, retention, run_manifest, step_folders
from capibara.checkpoints.lease import Lease
from capibara.checkpoints.manifest import Corrupted, Manifest
from capibara.core.types import UserError
from capibara.storage.full_disk import not_writable_explained

Row = dict[str, Any]
_FOUND = "found it corrupted"
_QUARANTINED = {
    step_folders.CORRUPTED: _FOUND,
    step_folders.FORMERLY: _FOUND,
    step_folders.ROLLED_BACK: "rolled back before it",
}


def check(action: str, keep: int | None, keep_every: int | None) -> None:
    """Raises UserError for invalid flags of `prune`."""
    for name, value in (("keep", keep), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise UserError(f"--{name}={value} is for prune, must be at least 1")
    if action == "prune" and keep is None:
        raise UserError("prune needs --keep, how many of the newest steps stay, e.g. --keep=1")


class Inspection:
    """The steps of a run folder.

    Args:
      model_dir: the run folder.
      step: only this one; None: all.

    Raises:
      UserError: there is no run, or no such step.
    """

    def __init__(self, model_dir: str, step: int | None = None):
        self._folder, self._alone = step_folders.folder_of(model_dir), step is not None
        self._lost: list[int] = []
        run_manifest.check_own_steps(self._folder.parent)
        with contextlib.suppress(UserError):  # the run's manifest was modified, which `verified` reports
            self._lost = run_manifest.lost_steps(self._folder.parent)
        try:
            there = self._folder.exists() or not self._lost
            self._steps = step_folders.steps(self._folder) if there else []
            names = [path.name for path in self._folder.iterdir()] if there else []
        except OSError as error:
            raise UserError(
                f"{model_dir} is no run folder: it has no folder {self._folder.name} that can be read"
            ) from error
        self._quarantined = sorted(name for name in names if name.endswith(tuple(_QUARANTINED)))
        if step is not None:
            if step not in self._steps:
                have = ", ".join(map(str, self._steps[-5:])) or "none"
                raise UserError(f"--step={step} must be a step of {self._folder}: the newest there are {have}")
            self._steps = [step]

    def done(self, action: str, status: Callable[[int], None], **options: Any) -> list[Row]:
        """The result of `listed`, `verified`, `sealed` or `pruned` (with its options), by the action's name."""
        match action:
            case "list":
                return self.listed()
            case "verify":
                return self.verified(status)
            case "seal":
                return self.sealed()
            case _:
                return self.pruned(**options)

    def listed(self) -> list[Row]:
        """A row for every step, from its manifest only."""
        return (
            [self._row(step)[0] for step in self._steps]
            + self._lost_rows()
            + [
                {"step": name, "faults": [f"quarantined by a run that {_QUARANTINED[pathlib.PurePath(name).suffix]}"]}
                for name in self._quarantined
            ]
        )

    def verified(self, status: Callable[[int], None] = lambda step: None) -> list[Row]:
        """Like `listed`, with the faults of each step's files.

        Args:
          status: called with the step that is being read.
        """
        rows = []
        for step in self._steps:
            status(step)
            row, result = self._row(step)
            if result is not None:
                row["faults"] = manifest.faults(self._folder / str(step), result)
                row["strays"] = manifest.strays(self._folder / str(step), result)
            rows.append(row)
        return rows if self._alone else rows + self._lost_rows() + [self._run_row()]

    def sealed(self) -> list[Row]:
        """Accepts the run folder's own files, and its list of steps, as they are now."""
        with not_writable_explained(self._folder), self._held(dry_run=False):
            paths = run_manifest.seal(self._folder.parent)
        return [{"step": "run", "faults": [], "sealed": paths}]

    def _lost_rows(self) -> list[Row]:
        return [
            {"step": step, "faults": [f"the run committed it: {step_folders.why_lost(self._folder, step)}"]}
            for step in self._lost
        ]

    def _run_row(self) -> Row:
        """Faults of the run folder's own files."""
        run = self._folder.parent
        row: Row = {"step": "run", "faults": [], "strays": []}
        try:
            result = run_manifest.read(run)
        except Corrupted as fault:
            return row | {"faults": [str(fault)]}
        named = {path for step in self._steps for path in self._named(step)}
        if result is None:
            problem = f"{run_manifest.NAME} is gone, which names the run's own files"
            return row | {"faults": [problem] if named or (run / run_manifest.CONFIG).exists() else []}
        row["faults"] = run_manifest.faults(run, result)
        row["faults"] += [
            f"{path} is named by a step, not by {run_manifest.NAME}" for path in sorted(named - {*result.entries})
        ]
        row["strays"] = run_manifest.unknown(run, result)
        return row | {"files": len(result.entries)}

    def _named(self, step: int) -> list[str]:
        """The run's own files that a step's manifest names."""
        try:
            return list(manifest.read(self._folder / str(step)).about.get("run", ()))
        except Corrupted:
            return []

    def pruned(self, *, keep: int, keep_every: int | None, corrupted: bool, dry_run: bool) -> list[Row]:
        """Removes the steps that no rule keeps; returns a row for each removed step.

        Args:
          keep, keep_every: as in retention.expendable.
          corrupted: whether to remove quarantined steps, too.
          dry_run: remove nothing.

        Raises:
          UserError: a run is writing there, or no remaining step is intact.
        """
        drop = retention.expendable(self._steps, keep=keep, keep_every=keep_every)
        stay = [step for step in self._steps if step not in drop]
        with not_writable_explained(self._folder), self._held(dry_run):
            prunable = retention.prunable(self._folder, stay, drop) if drop else []
            if prunable is None:
                raise UserError(
                    f"none of the remaining steps ({', '.join(map(str, stay))}) is intact: nothing is removed; "
                    "capibara convert verify lists their faults"
                )
            names = [*map(str, prunable), *(self._quarantined if corrupted else ())]  # in the order of removal
            rows = [self._row(int(name))[0] if name.isdecimal() else {"step": name, "faults": []} for name in names]
            for name in () if dry_run else names:
                step_folders.remove(self._folder / name)
        return rows

    @contextlib.contextmanager
    def _held(self, dry_run: bool) -> Iterator[None]:
        """Holds the run folder's lease, so that no run writes there; not needed for a dry run."""
        if dry_run:
            yield
            return
        lease = Lease(self._folder)
        try:
            yield
        finally:
            lease.release()

    def _row(self, step: int) -> tuple[Row, Manifest | None]:
        """A step's row, and its manifest if it can be read."""
        try:
            result = manifest.read(self._folder / str(step))
        except Corrupted as fault:
            return {"step": step, "faults": [str(fault)]}, None
        return _described(result), result


def _described(manifest: Manifest) -> Row:
    about = manifest.about
    return {
        "step": manifest.step,
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files),
        "faults": [],
        **{name: about.get(name) for name in ("date", "score", "parent", "commit", "capibara")},
    }


def _short(row: Row) -> str:
    if row["faults"]:
        return "; ".join(row["faults"])
    if "sealed" in row:
        return f"sealed: {', '.join(row['sealed'])}"
    return f"its own {row['files']} files, whole" if "files" in row else "quarantined"


def lines(rows: Sequence[Row], action: str) -> Iterator[str]:
    """The rows of an action as lines for a terminal."""
    if not rows:
        yield "nothing to remove" if action == "prune" else "no steps"
    for row in rows:
        if "bytes" not in row:
            yield f"{row['step']:>10}  {_short(row)}"
            for path in row.get("strays", ()):
                yield f"{'':12}not sealed yet, or no part of it: {path}"
            continue
        score = "" if row["score"] is None else f", loss {row['score']:.4f}"
        commit = "" if not row["commit"] else f", commit {row['commit'][:12]}"
        whole = ", whole" if action == "verify" and not row["faults"] else ""
        size = f"{row['bytes'] / 2**20:10.1f} MiB in {row['files']} files"
        yield f"{row['step']:>10}  {size}, {row['date']}{score}{commit}{whole}"
        for fault in row["faults"]:
            yield f"{'':12}corrupted: {fault}"
        for path in row.get("strays", ()):
            yield f"{'':12}no part of it: {path}"
