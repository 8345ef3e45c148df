"""A job's own file in its storage, from which a job is known again that no database has any more.

STORAGE/jobs/NAME/specs/DIGEST.json     the spec, its back end and that one's fields; DIGEST is the beginning of the
                                        SHA-256 of its content, and a label of all that is created for the job
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from capibara.core import limits
from capibara.core.types import TryAgain, UserError
from capibara.jobs import backends, secrets
from capibara.jobs.backends.backend import Backend
from capibara.jobs.secrets import Secret, Source
from capibara.jobs.spec import Attempt, Bundle, Capacity, JobSpec
from capibara.planner.hardware import slices
from capibara.storage import stores

_LARGEST = 1 << 20  # bytes
_DIGITS = 16


def signed(backend: Backend, spec: JobSpec) -> JobSpec:
    """The spec with the digest of its file, by which its labels name it."""
    bare = dataclasses.replace(spec, digest="", attempt=Attempt())
    return dataclasses.replace(spec, digest=digest_of(text_of(backend, bare)))


def digest_of(text: str) -> str:
    """The digest of a file's content."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def text_of(backend: Backend, spec: JobSpec) -> str:
    """The content of a job's file; digest and attempt are not part of it."""
    fields = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if field.name not in ("slice_", "bundle", "digest", "attempt")
    }
    fields |= {
        "slice": spec.slice_.name,
        "bundle": {"url": spec.bundle.url, "files": dict(sorted(spec.bundle.files.items()))},
        "environment": dict(spec.environment),
        "labels": dict(spec.labels),
        "secrets": [dataclasses.asdict(secret) for secret in spec.secrets],
    }
    document = {"backend": backend.name, "fields": dataclasses.asdict(backend), "spec": fields}
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read_text(text: str) -> tuple[Backend, JobSpec]:
    """The back end and the spec of a file's content.

    Raises:
      UserError: it is not such a file.
    """
    try:
        document = limits.parse_json(text)
        name, fields, known = document["backend"], document["fields"], dict(document["spec"])
        if name not in backends.NAMES:
            raise UserError(f"it is of the unknown back end {name!r}")
        known["slice_"] = slices.parse(known.pop("slice"))
        known["bundle"] = Bundle(url=known["bundle"]["url"], files=dict(known["bundle"]["files"].items()))
        known["secrets"] = tuple(map(_secret, known["secrets"]))
        known["arguments"] = tuple(known["arguments"])
        known["capacity"] = Capacity(known["capacity"])
        return backends.find(name)(**fields), JobSpec(**known, digest=digest_of(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"no file of a job: {type(error).__name__}: {error}") from None


_REFERENCES = {Source.SECRET_MANAGER: "", Source.KUBERNETES: "kubernetes:", Source.ENVIRONMENT: "env:"}


def _secret(values: Mapping[str, str]) -> Secret:
    return secrets.parse(f"{values['variable']}={_REFERENCES[Source(values['source'])]}{values['name']}")


def url_of(spec: JobSpec) -> str:
    """Where a job's file lies."""
    return f"{spec.folder}/specs/{spec.digest}.json"


def write(backend: Backend, spec: JobSpec) -> None:
    """Writes a job's file to its storage.

    Raises:
      UserError: the storage cannot be written.
    """
    path = stores.folder_of(url_of(spec))
    store = stores.of(path)
    try:
        store.make_folder(path.parent)
        store.write_atomic(path, text_of(backend, spec).encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}): name another --storage") from None


def read(storage: str, labels: Mapping[str, str]) -> str:
    """The content of the file of a job that is known by the labels of its resource.

    Args:
      storage: --storage of the job.
      labels: of the resource.

    Raises:
      UserError: there is no such file, or it has another content than when the job was launched.
      TryAgain: the storage cannot be read.
    """
    name, digest = labels["capibara-job"], labels.get("capibara-spec", "")
    path = stores.folder_of(f"{storage.rstrip('/')}/jobs/{name}/specs/{digest}.json")
    try:
        text = stores.of(path).read(path, most=_LARGEST).decode()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: name the --storage with which job {name} was launched") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8: it was not written by capibara") from None
    except (OSError, limits.Refused) as error:
        raise TryAgain(f"{path} cannot be read: {error}") from None
    if digest_of(text) != digest:
        raise UserError(f"{path} has another content than when job {name} was launched: cancel the job by other means")
    try:
        _, spec = read_text(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if spec.name != name:
        raise UserError(f"{path} is of job {spec.name}, not of {name}")
    return text
