"""An output folder in a bucket (gs://, s3://), which workers on many machines write; see capibara.builders.writing.

In a bucket a file is whole or not there, and nothing is locked: two builds must not write to one folder at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import capibara
from capibara.builders.files import fingerprints
from capibara.builders.files.fingerprints import Input
from capibara.builders.files.manifest import MANIFEST, Manifest, WholePart, read_manifest
from capibara.builders.files.problems import Problems
from capibara.builders.writing import File, Part
from capibara.core.types import UserError
from capibara.storage import outputs, stores

_BUILDING = ".building"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketParts:
    """The parts of a folder in a bucket, by name; can be sent to workers.

    Attributes:
      folder: its address.
      records: the address of the folder with the records of whole parts.
    """

    folder: str
    records: str

    def path(self, name: str) -> str:
        """The address of a part."""
        return f"{self.folder}/{name}"

    def done(self, name: str) -> WholePart | None:
        """A part that an earlier run wrote; None: it is to be written."""
        content = outputs.read(f"{self.records}/{name}.json")
        return None if content is None else _whole(json.loads(content))

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[Part]:
        """Writes a part to this machine first; it is copied and recorded when the context ends without an error."""
        with tempfile.TemporaryDirectory() as here:
            part = Part(os.path.join(here, "part"))
            yield part
            part.close()
            with open(part.path, "rb") as file:
                content = file.read()
        digest = hashlib.sha256(content).hexdigest()
        outputs.replace(self.path(name), content)
        file_of = File(name=name, bytes=len(content), sha256=digest, records=part.records)
        record = {"file": dataclasses.asdict(file_of), "counts": part.counts, "problems": part.problems.as_json()}
        outputs.replace(f"{self.records}/{name}.json", json.dumps(record))

    def all(self) -> list[WholePart]:
        """The recorded parts, sorted by name."""
        result = [entry.url for entry in stores.of(self.records).matching(f"{self.records}/*.json")]
        return sorted((_whole(json.loads(outputs.read(url) or "")) for url in result), key=lambda item: item.file.name)


class BucketOutput:
    """The output of one build in a bucket; arguments and methods are those of `writing.Output`, without lineage.

    Raises:
      UserError: the folder has the output of other inputs, settings or version.
    """

    def __init__(self, folder: str, kind: str, config: Mapping[str, Any], inputs: Sequence[Input]):
        self.folder, self.kind = folder.rstrip("/"), kind
        self.config: Mapping[str, Any] = json.loads(fingerprints.canonical(dict(config)))
        self.inputs = tuple(sorted(inputs, key=lambda item: item.path))
        # Parts of another build of the same folder are not taken for this one's.
        about = [capibara.__version__, kind, self.config, [dataclasses.asdict(item) for item in self.inputs]]
        digest = hashlib.sha256(fingerprints.canonical(about).encode()).hexdigest()[:16]
        self._building = f"{self.folder}/{_BUILDING}/{digest}"
        self.parts = BucketParts(folder=self.folder, records=f"{self._building}/done")
        self.scratch = BucketParts(folder=f"{self._building}/scratch", records=f"{self._building}/scratch_done")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def done(self) -> Manifest | None:
        """The manifest of an earlier run that finished; None: build."""
        content = outputs.read(f"{self.folder}/{MANIFEST}", most=1 << 30)
        if content is None:
            return None
        with tempfile.TemporaryDirectory() as here:
            outputs.save(os.path.join(here, MANIFEST), content)
            result = read_manifest(here)
        theirs, ours = ((item.kind, item.config, item.inputs) for item in (result, self))
        if (result.version, *theirs) != (capibara.__version__, *ours):
            raise UserError(
                f"--out ({self.folder}) was built with other inputs, settings or version: name another folder, or remove this one"
            )
        return result

    def part(self, name: str) -> contextlib.AbstractContextManager[Part]:
        """`BucketParts.write` of a file of the data set."""
        return self.parts.write(name)

    def finish(self, counts: Mapping[str, int], problems: Problems) -> Manifest:
        """Writes the manifest of all parts; see `writing.Output.finish`."""
        manifest = Manifest.of_parts(self.kind, self.config, self.inputs, self.parts.all(), counts, problems)
        text = json.dumps(manifest.as_json(), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
        outputs.replace(f"{self.folder}/{MANIFEST}", f"{text}\n".encode("utf-8", "backslashreplace"))
        self._remove_building()
        return manifest

    def _remove_building(self) -> None:
        """Removes what only an unfinished build needs."""
        from etils import epath

        folder, store = epath.Path(self._building), stores.of(self._building)
        for name in store.list(folder):
            store.remove(folder / name)


def _whole(record: Mapping[str, Any]) -> WholePart:
    return WholePart(
        file=File(**record["file"]), counts=record["counts"], problems=Problems.from_json(record["problems"])
    )
