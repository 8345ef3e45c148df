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
        config: Mapping[str, Any],
        inputs: tuple[Input, ...],
        parts: Sequence[WholePart],
        counts: Mapping[str, int] | None = None,
        problems: Problems | None = None,
    ) -> Manifest:
        """The manifest of whole parts, with their counts and problems added to the builder's own, and the counts of the input."""
        total, found = collections.Counter(counts or {}), Problems()
        found.merge(problems or Problems())
        for part in parts:
            total.update(part.counts)
            found.merge(part.problems)
        total.update(files=len(inputs), file_bytes=sum(one.bytes for one in inputs))
        total.update(files_left_out=found.left_out, skipped=found.total - found.left_out)
        return cls(
            kind=kind,
            version=capibara.__version__,
            config=config,
            inputs=inputs,
            files=tuple(part.file for part in parts),
            counts=dict(sorted(total.items())),
            problems=found,
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
            "inputs": [dataclasses.asdict(one) for one in self.inputs],
            "files": [dataclasses.asdict(one) for one in self.files],
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
        found = limits.read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: the build did not finish, run it again") from None
    if found.get("format") != VERSION:
        raise UserError(f"{path} has format {limits.shortened(found.get('format'))}, must be {VERSION}: build it again")
    try:
        return Manifest(
            kind=str(found["kind"]),
            version=str(found["version"]),
            config=dict(found["config"]),
            inputs=tuple(Input(**one) for one in found["inputs"]),
            files=tuple(File(**one) for one in found["files"]),
            counts={str(name): int(count) for name, count in found["counts"].items()},
            problems=Problems.from_json(found["problems"]),
            fingerprint=str(found["fingerprint"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is no manifest ({limits.cause(error)}): build it again") from None
