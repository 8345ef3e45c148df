"""What all back ends have in common: fields that say where, and the rendering of a job."""

from __future__ import annotations

import abc
import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import yaml

from capibara.core.types import UserError
from capibara.jobs import bundle
from capibara.jobs.secrets import Source
from capibara.jobs.spec import JobSpec

# A JSON value; documents are made of these alone.
Document = Mapping[str, object]


class Form(enum.StrEnum):
    """How a rendering is written: YAML and JSON documents, or a script."""

    YAML = "yaml"
    JSON = "json"
    SCRIPT = "sh"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendering:
    """What a back end submits.

    Attributes:
      form: how it is written.
      documents: requests or manifests; empty for a script.
      script: the script; empty for documents.
    """

    form: Form
    documents: Sequence[Document] = ()
    script: str = ""

    def text(self) -> str:
        """What a dry run prints, exactly what is submitted."""
        if self.form is Form.SCRIPT:
            return self.script
        if self.form is Form.JSON:
            return "".join(f"{json.dumps(document, indent=2)}\n" for document in self.documents)
        return yaml.dump_all(self.documents, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=10**6)


# Kubernetes reads manifests in Go (sigs.k8s.io/yaml 1.4), where more texts are no texts than for PyYAML: 1e-3, 1e5 and 0o17
# are numbers there, `y` is a truth value. What any version of YAML, or its reader, takes for something else is quoted.
_NO_TEXT = re.compile(
    r"(?i)[-+]?(?:0x[0-9a-f_]*|0o[0-7_]*|0b[01_]*|[0-9._:]+(?:e[-+]?[0-9_]*)?|\.?(?:inf|infinity|nan))"
    r"|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[t \t].*)?"
    r"|y|n|yes|no|on|off|true|false|null|nil|~|=|<<"
)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that YAML's versions and readers may take for something else, such as "on" or "1e5"."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        del indentless
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: object) -> bool:
        return True

    def text_of(self, value: str) -> yaml.ScalarNode:
        """A text, in quotes where it needs them."""
        return self.represent_scalar("tag:yaml.org,2002:str", value, style="'" if _NO_TEXT.fullmatch(value) else None)


_Dumper.add_representer(str, _Dumper.text_of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(abc.ABC):
    """A system that runs jobs. Its fields say where; each is a flag of `capibara launch`."""

    name: ClassVar[str]
    needs_image: ClassVar[bool] = False
    secret_sources: ClassVar[frozenset[Source]] = frozenset({Source.SECRET_MANAGER})
    uses_buckets: ClassVar[bool] = True  # else a disk that all hosts share will do
    has_limit: ClassVar[bool] = True  # the system itself ends a job whose budget is spent

    @abc.abstractmethod
    def render(self, spec: JobSpec) -> Rendering:
        """What is submitted for a job.

        Raises:
          UserError: the back end cannot run it.
        """

    def check(self, spec: JobSpec) -> None:
        """Raises UserError if the back end cannot run the job."""
        if self.needs_image and spec.image is None:
            raise UserError(
                f"launch {self.name} needs a container image that has capibara: build one of launch/Dockerfile, push it, and "
                "add --image=..."
            )
        if not self.needs_image and spec.bundle.wheel is None and spec.image is None:
            raise UserError(
                f"launch {self.name} installs capibara from a wheel: make one with make wheel, and add --wheel=..."
            )
        for secret in spec.secrets:
            if secret.source not in self.secret_sources:
                known = ", ".join(sorted(self.secret_sources))
                raise UserError(
                    f"--secret={secret.variable}=... is in {secret.source}, which launch {self.name} cannot read: it reads {known}"
                )
        if self.uses_buckets and "://" not in spec.bundle.url:
            raise UserError(
                f"--storage={spec.bundle.url.rsplit('/', 3)[0]} is on this machine, where the job does not run: name a folder in "
                "a bucket, e.g. --storage=gs://bucket/folder"
            )

    def check_unmanaged(self, spec: JobSpec) -> None:
        """Raises UserError if the job needs a manager, so that it must not be submitted by other means."""
        if spec.budget_usd is not None and not self.has_limit:
            raise UserError(
                f"--budget_usd={spec.budget_usd:g} has no effect with launch {self.name} unless a manager watches the job: "
                "omit it, or launch without --dry-run, --stage and --detach"
            )

    @staticmethod
    def refuse(spec: JobSpec, why: str, *, fix: str) -> UserError:
        """The error for a slice that the back end does not have."""
        return UserError(f"--slice={spec.slice_.name}: {why}: {fix}")


def command(spec: JobSpec, *more: str, python: str = "python") -> list[str]:
    """What each host of a job runs: it unpacks the bundle, then runs and restarts the verb.

    Args:
      spec: the job.
      *more: flags of `launch staged`.
      python: the interpreter that has capibara.
    """
    secrets = [
        f"--secret={secret.variable}={secret.name}" for secret in spec.secrets if secret.source is Source.SECRET_MANAGER
    ]
    digest = hashlib.sha256(bundle.sums(spec.bundle.files)).hexdigest()
    flags = [f"--url={spec.bundle.url}", f"--sha256={digest}", f"--restarts={spec.restarts}", f"--grace={spec.grace_s}"]
    flags.append(f"--reports={spec.reports}")
    return [
        python,
        "-m",
        "capibara.launch",
        "staged",
        *flags,
        *more,
        *secrets,
        "--",
        spec.verb,
        *spec.arguments,
    ]


def literal(text: str) -> str:
    """A text of an environment or a command in which Kubernetes and Vertex AI expand no variable."""
    return text.replace("$", "$$")


def tpu_only(backend: Backend, spec: JobSpec) -> None:
    """Raises UserError unless the chips are TPUs."""
    if not spec.slice_.chip.is_tpu:
        raise backend.refuse(spec, f"launch {backend.name} runs TPUs", fix="use launch gke, slurm or ssh for others")


def no_tpu(backend: Backend, spec: JobSpec) -> None:
    """Raises UserError if the chips are TPUs."""
    if spec.slice_.chip.is_tpu:
        raise backend.refuse(
            spec, f"launch {backend.name} runs GPUs and CPUs", fix="use launch gce, gke or vertex for TPUs"
        )
