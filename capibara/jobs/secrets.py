"""Secrets by reference: no value of one stands in a manifest, a script, a label or a log."""

from __future__ import annotations

import dataclasses
import enum
import re

from capibara.builders.redaction import secrets as detector
from capibara.core.types import UserError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_MANAGER = re.compile(r"projects/[a-z0-9:.-]+/secrets/[A-Za-z0-9_-]+(/versions/(latest|\d+))?")
_KUBERNETES = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?)/([-._A-Za-z0-9]+)")
# Names of variables that hold secrets, and the beginnings of well-known ones.
_NAMES = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASS|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIALS?)$", re.IGNORECASE
)
# Beginnings of tokens, also of some that are cut short: what is launched must not have even a part of one.
_VALUES = re.compile(
    r"(?:^|[\s\"'=:])(hf_\w|sk-\w|ghp_\w|github_pat_|AIza\w|AKIA\w|xox[abp]-|-----BEGIN |eyJ[A-Za-z0-9_-]{10})"
)


class Source(enum.StrEnum):
    """Where the value of a secret stands.

    Attributes:
      SECRET_MANAGER: Google's; read by the job itself when it starts.
      KUBERNETES: a secret of the cluster.
      ENVIRONMENT: the environment of whoever launches, for processes that inherit it.
    """

    SECRET_MANAGER = "secret_manager"
    KUBERNETES = "kubernetes"
    ENVIRONMENT = "environment"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Secret:
    """A variable of the job's environment whose value stands elsewhere.

    Attributes:
      variable: its name.
      source: where the value stands.
      name: there: projects/P/secrets/S/versions/V, SECRET/KEY, or the name of a variable.
    """

    variable: str
    source: Source
    name: str


def parse(text: str) -> Secret:
    """The secret of VARIABLE=REFERENCE.

    A reference is projects/P/secrets/S[/versions/V] (Secret Manager), kubernetes:SECRET/KEY, or env:VARIABLE.

    Raises:
      UserError: it is none of these; the message does not repeat the reference, which may be a value by mistake.
    """
    variable, equals, reference = text.partition("=")
    if not _VARIABLE.fullmatch(variable) or not equals:
        raise UserError("--secret must be VARIABLE=REFERENCE, e.g. --secret=HF_TOKEN=projects/P/secrets/hf-token")
    kind, colon, rest = reference.partition(":")
    if _SECRET_MANAGER.fullmatch(reference):
        full = reference if "/versions/" in reference else f"{reference}/versions/latest"
        return Secret(variable=variable, source=Source.SECRET_MANAGER, name=full)
    if kind == "kubernetes" and colon and _KUBERNETES.fullmatch(rest):
        return Secret(variable=variable, source=Source.KUBERNETES, name=rest)
    if kind == "env" and colon and _VARIABLE.fullmatch(rest):
        return Secret(variable=variable, source=Source.ENVIRONMENT, name=rest)
    raise UserError(
        f"--secret={variable}=... must be a reference, not a value: projects/P/secrets/S (Secret Manager), "
        "kubernetes:SECRET/KEY, or env:VARIABLE"
    )


def has_secret(text: str) -> bool:
    """Whether a text has a secret, as the redaction of data sets finds them: by its form, or by a name beside it."""
    return _VALUES.search(text) is not None or detector.has_secret(text)


def check_public(variable: str, value: str) -> None:
    """Raises UserError if a plain value looks like a secret; the message does not repeat it."""
    is_path = value.startswith("/") and variable.upper().endswith("CREDENTIALS")
    named = f"{variable}={value}"
    if has_secret(value) or (not is_path and (has_secret(named) or value and _NAMES.search(variable))):
        raise UserError(
            f"--env={variable}=... looks like a secret, and everyone who sees the job could read it: use "
            f"--secret={variable}=projects/P/secrets/S, kubernetes:SECRET/KEY or env:VARIABLE"
        )
