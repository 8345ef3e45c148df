"""Finds run folders below the folders that the user named."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from capibara.monitoring.reading.run import display_name, is_run_folder
from capibara.storage import stores

_DEEPEST = 4
_MOST_RUNS, _MOST_FOLDERS = 5_000, 20_000
_PASSED_OVER = {"checkpoints", "tensorboard", "trackers", "tokenizer", "origin", "__pycache__"}


def runs_below(roots: Sequence[str]) -> dict[str, str]:
    """Run folder -> its name for viewers, of all run folders below the roots; a root may be one itself.

    Args:
      roots: absolute folders or addresses; those that do not exist yet are passed over.

    Raises:
      UserError, TryAgain: a bucket cannot be listed.
    """
    names: dict[str, str] = {}
    for root in roots:
        below = _on_disk if stores.of(root).has_local_paths else _in_bucket
        prefix = os.path.basename(root.rstrip("/")) if len(roots) > 1 else ""
        for folder in below(root):
            if len(names) >= _MOST_RUNS:
                return names
            shown = display_name(folder, root)
            is_root = folder.rstrip("/") == root.rstrip("/")
            names.setdefault(folder, shown if is_root or not prefix else f"{prefix}/{shown}")
    return names


def _on_disk(root: str) -> Iterator[str]:
    """Run folders on this machine; links are not followed, so that a folder is found once and below its root."""
    left, looked = [(root, 0)], 0
    while left and looked < _MOST_FOLDERS:
        folder, depth = left.pop()
        looked += 1
        try:
            with os.scandir(folder) as entries:
                names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:  # removed, not there yet, or not ours to read
            continue
        if is_run_folder(set(names)):
            yield folder
        elif depth < _DEEPEST:
            inner = [name for name, is_folder in names.items() if is_folder and name not in _PASSED_OVER]
            left += [(os.path.join(folder, name), depth + 1) for name in inner if not name.startswith(".")]


def _in_bucket(root: str) -> Iterator[str]:
    root = root.rstrip("/")
    for pattern in ("metrics.jsonl", "*/metrics.jsonl", "*/*/metrics.jsonl"):
        for entry in stores.of(root).matching(f"{root}/{pattern}"):
            yield entry.url.removesuffix("/metrics.jsonl")
