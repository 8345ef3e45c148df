"""The manifest of a folder that a builder has written."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import capibara
from capibara.builders.files import fingerprints
from capibara.builders.files.fingerprints import File, Input
from capibara.builders.files.problems import Problems
from capibara.core import limits
from capibara.core.types import UserError

MANIFEST = "manifest.json"
VERSION = 1  # of the manifest's form


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholePart:
    """A part that is whole, as a later run finds it.

    Attributes:
      file: what was written.
      counts: what its writer counted.
      problems: what was wrong with its input.
    """

    file: File
    counts: Mapping[str, int]
    problems: Problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a finished output folder holds.

    Attributes:
      kind: the builder, such as "playbooks".
      version: of capibara that built it.
      config: the settings.
      inputs: the files that were read.
      files: the files that were written, sorted by name.
      counts: what the builder counted, by name.
      problems: what was wrong with the input.
      fingerprint: of `files`, by names and contents.
    """

    kind: str
    version: str
    config: Mapping[str, Any]
    inputs: tuple[Input, ...]
    files: tuple[File, ...]
    counts: Mapping[str, int]
    problems: Problems
    fingerprint: str

    @classmethod
    def of_parts(
        cls,
        kind: str,
        config: Mapping[str, object],
        inputs: tuple[Input, ...],
        parts: Sequence[WholePart],
        counts: Mapping[str, int] | None = None,
        problems: Problems | None = None,
    ) -> Manifest:
        """The manifest of whole parts, with their counts and problems added to the builder's own, and the counts of the input."""
        total, result = collections.Counter(counts or {}), Problems()
        result.merge(problems or Problems())
        for part in parts:
            total.update(part.counts)
            result.merge(part.problems)
        total.update(files=len(inputs), file_bytes=sum(item.bytes for item in inputs))
        total.update(files_left_out=result.left_out, skipped=result.total - result.left_out)
        return cls(
            kind=kind,
            version=capibara.__version__,
            config=config,
            inputs=inputs,
            files=tuple(part.file for part in parts),
            counts=dict(sorted(total.items())),
            problems=result,
            fingerprint=fingerprints.of_files({part.file.name: part.file.sha256 for part in parts}),
        )

    def as_json(self) -> dict[str, Any]:
        """The JSON object of manifest.json."""
        return {
            "format": VERSION,
            "kind": self.kind,
            "version": self.version,
            "fingerprint": self.fingerprint,
            "config": dict(self.config),
            "inputs": [dataclasses.asdict(item) for item in self.inputs],
            "files": [dataclasses.asdict(file) for file in self.files],
            "counts": dict(self.counts),
            "problems": self.problems.as_json(),
        }


def read_manifest(folder: str) -> Manifest:
    """The manifest of a finished output folder.

    Raises:
      UserError: there is none, or it has another form.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        result = limits.read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: the build did not finish, run it again") from None
    if result.get("format") != VERSION:
        raise UserError(
            f"{path} has format {limits.shortened(result.get('format'))}, must be {VERSION}: build it again"
        )
    try:
        return Manifest(
            kind=str(result["kind"]),
            version=str(result["version"]),
            config=dict(result["config"]),
            inputs=tuple(Input(**item) for item in result["inputs"]),
            files=tuple(File(**item) for item in result["files"]),
            counts={str(name): int(count) for name, count in result["counts"].items()},
            problems=Problems.from_json(result["problems"]),
            fingerprint=str(result["fingerprint"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is no manifest ({limits.cause(error)}): build it again") from None
