"""What is read from a run folder when a viewer asks: samples, configuration, pictures."""

from __future__ import annotations

import functools
import os
import re

from capibara import config
from capibara.checkpoints import run_manifest
from capibara.core import limits
from capibara.core.types import TryAgain, UserError
from capibara.monitoring.dashboard.views.names import Json, clean
from capibara.monitoring.reading import parsing
from capibara.monitoring.reading.run import Run
from capibara.storage import stores

_MOST_CONFIG_BYTES = 1 << 20
_SHOWN_TEXT = 50_000  # characters of a sample
_PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
_PICTURE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}", re.ASCII)
_MOST_PICTURES, _MOST_PICTURE_BYTES = 200, 32 << 20
_SIGNATURES = {"image/png": b"\x89PNG", "image/jpeg": b"\xff\xd8\xff", "image/webp": b"RIFF"}
_FAULTS = (UserError, TryAgain, OSError, limits.Refused)


def samples(run: Run, prompt: str | None, before: float | None, limit: int) -> dict[str, Json]:
    """Sampled texts, the newest first.

    Args:
      run: the run.
      prompt: only those of this prompt (its first 200 characters); None: all.
      before: only those of earlier steps.
      limit: the most that are returned.
    """
    with run.lock:
        known = list(run.samples.values())
    prompts: list[Json] = [clean(item) for item in dict.fromkeys(sample.prompt for sample in known)][:200]
    chosen = [
        sample
        for sample in reversed(known)
        if (prompt is None or sample.prompt == prompt) and (before is None or sample.step < before)
    ]
    rows: list[Json] = []
    for sample in chosen[:limit]:
        try:
            record = parsing.line_at(run.path, sample)
        except _FAULTS:
            continue
        if record is None:
            continue
        text = str(record.get("text", ""))
        shown = text[:_SHOWN_TEXT].encode("utf-8", "replace").decode()
        asked = str(record.get("prompt"))[:_SHOWN_TEXT].encode("utf-8", "replace").decode()
        is_cut = len(text) > _SHOWN_TEXT
        rows.append({"step": sample.step, "time": clean(sample.time), "prompt": asked, "text": shown, "cut": is_cut})
    return {"prompts": prompts, "samples": rows, "more": len(chosen) > limit}


def config_text(run: Run) -> str | None:
    """The run's operative configuration; None: there is none that can be read, or it has changed."""
    try:
        return run_manifest.config_text(run_manifest.folder_of(run.folder))
    except _FAULTS:
        return None


def configuration(run: Run) -> dict[str, Json]:
    """The configuration, as text and as bindings."""
    try:
        text = run_manifest.config_text(run_manifest.folder_of(run.folder))
    except _FAULTS as error:
        return {"text": None, "bindings": [], "unavailable": limits.cause(error, 400)}
    if text is None:
        return {"text": None, "bindings": [], "unavailable": "the run folder has no config.gin"}
    return {
        "text": text[:_MOST_CONFIG_BYTES],
        "bindings": [{"name": name, "value": clean(value)} for name, value in bindings(text).items()],
        "unavailable": None,
    }


@functools.lru_cache(maxsize=64)
def bindings(text: str) -> dict[str, str]:
    """Parameter -> value as Gin text, macros resolved; empty: it is not Gin text."""
    if len(text) > _MOST_CONFIG_BYTES:
        return {}
    try:
        return {name: new or "" for name, (_, new) in config.changes("", text).items()}
    except Exception:  # the text is untrusted, and Gin's parser raises what it meets
        return {}


def pictures(run: Run) -> list[str]:
    """Names of the pictures directly in the run folder."""
    if not stores.of(run.folder).has_local_paths:
        return []
    try:
        with os.scandir(run.folder) as entries:
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False) and _kind(entry.name)]
    except OSError:
        return []
    return sorted(names)[:_MOST_PICTURES]


def picture(run: Run, name: str) -> tuple[bytes, str] | None:
    """A picture's bytes and media type; None: there is none of this name, or it is something else."""
    kind = _kind(name)
    if kind is None or not stores.of(run.folder).has_local_paths:
        return None
    # No link is followed, and a plain name cannot lead out of the folder.
    try:
        folder = os.open(run.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        with open(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            content = file.read(size) if size <= _MOST_PICTURE_BYTES else b""
    except OSError:
        return None
    return (content, kind) if content.startswith(_SIGNATURES[kind]) else None


def _kind(name: str) -> str | None:
    """The media type by the name; None: it is no picture's name."""
    return _PICTURES.get(os.path.splitext(name)[1].lower()) if _PICTURE_NAME.fullmatch(name) else None
