"""Replaces secrets and personal data in records by placeholders: `<SECRET:github_token:1>`, `<PERSONAL:email:2>`.

Equal secrets have equal placeholders within a scope (a record, or the records of a session), different ones different
placeholders. A value that a name or a form has shown to be a secret is replaced wherever else it stands in the scope, such
as where a program prints it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from capibara.builders.redaction import secrets
from capibara.builders.redaction.named import is_secret_member
from capibara.builders.redaction.rules import Category, is_random
from capibara.builders.redaction.secrets import Found
from capibara.config import configurable
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_KNOWN = 256  # values of a scope that are looked for everywhere
_NUMBERED = 10_000  # values of a scope whose numbers are remembered
_MEMBER_RANK = 1000


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Redaction:
    """What is replaced.

    Attributes:
      keep: kinds that are not replaced, such as ("ip_address",).
      allow: values that are not replaced, such as the address of a public help desk.
    """

    keep: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind in self.keep:
            if kind not in secrets.kinds():
                raise UserError(f"Redaction.keep: {kind!r} is no kind{did_you_mean(kind, secrets.kinds())}")

    def scope(self) -> Scope:
        """Begins to number secrets."""
        return Scope(self)


class Scope:
    """Replaces what is found, and numbers it; it keeps the values in memory only.

    Args:
      settings: what is replaced.
    """

    def __init__(self, settings: Redaction):
        self._settings = settings
        self._next: collections.Counter[tuple[Category, str]] = collections.Counter()
        self._placeholders: dict[str, str] = {}
        self._known: dict[str, Found] = {}

    def redact(self, value: Json, counts: collections.Counter[str] | None = None) -> Json:
        """A copy of a JSON value in which all texts, names of members included, are redacted.

        Args:
          value: the record.
          counts: if set, the number of replacements is added to it by kind.
        """
        members = dict.fromkeys(_secret_members(value))
        return _mapped(value, self._redacted(dict.fromkeys(_texts(value)), members, counts))

    def redact_texts(self, texts: Sequence[str], counts: collections.Counter[str] | None = None) -> list[str]:
        """The texts of one record, redacted together: what is a secret in one is redacted in all.

        Args:
          texts: the texts.
          counts: as in `redact`.
        """
        redacted = self._redacted(dict.fromkeys(texts), {}, counts)
        return [redacted[text] for text in texts]

    def _redacted(
        self, texts: Mapping[str, None], members: Mapping[str, None], counts: collections.Counter[str] | None
    ) -> dict[str, str]:
        if len(self._placeholders) > _NUMBERED:
            self._placeholders.clear()
        result = {text: [entry for entry in secrets.find(text) if self._counts(entry)] for text in texts}
        for text in members:
            if text not in self._settings.allow:
                result[text] = [self._member(text)]
        for each in result.values():
            for item in each:
                self._learn(item)
        redacted = {}
        for text, each in result.items():
            spans = self._with_known(text, each)
            if counts is not None:
                counts.update(span.kind for span in spans)
            redacted[text] = self._replaced(text, spans)
        return redacted

    def _counts(self, finding: Found) -> bool:
        return finding.kind not in self._settings.keep and finding.value not in self._settings.allow

    def _member(self, text: str) -> Found:
        return Found(
            start=0, end=len(text), kind="named_secret", category=Category.SECRET, value=text, rank=_MEMBER_RANK
        )

    def _learn(self, finding: Found) -> None:
        if finding.category is not Category.SECRET or finding.value in self._known:
            return
        # A password may be a common word, which stands elsewhere for itself.
        least = 14 if finding.value.isalpha() else 6 if is_random(finding.value, 2.0) else 8
        if len(finding.value) >= least:
            if len(self._known) >= _KNOWN:
                del self._known[next(iter(self._known))]
            self._known[finding.value] = finding

    def _with_known(self, text: str, findings: list[Found]) -> list[Found]:
        spans = list(findings)
        for value, item in self._known.items():
            at = text.find(value)
            while at >= 0:
                end = at + len(value)
                if not any(other.start < end and at < other.end for other in spans):
                    spans.append(dataclasses.replace(item, start=at, end=end))
                at = text.find(value, end)
        return sorted(spans, key=lambda entry: entry.start)

    def _replaced(self, text: str, spans: list[Found]) -> str:
        parts, at = [], 0
        for span in spans:
            parts += [text[at : span.start], self._placeholder(span)]
            at = span.end
        return "".join([*parts, text[at:]]) if spans else text

    def _placeholder(self, finding: Found) -> str:
        placeholder = self._placeholders.get(finding.value)
        if placeholder is None:
            key = (finding.category, finding.kind)
            self._next[key] += 1
            placeholder = f"<{finding.category}:{finding.kind}:{self._next[key]}>"
            self._placeholders[finding.value] = placeholder
        return placeholder


def _texts(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield name
            yield from _texts(member)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _secret_members(value: Json) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _pairs(value)
        for name, member in value.items():
            if isinstance(member, str) and is_secret_member(name, member):
                yield member
            else:
                yield from _secret_members(member)
    elif isinstance(value, list):
        for item in value:
            yield from _secret_members(item)


def _pairs(value: Mapping[str, Json]) -> Iterator[str]:
    """The value of {"name": "DB_PASSWORD", "value": "..."}, as Kubernetes and others have it."""
    members = {name.lower(): member for name, member in value.items() if isinstance(member, str)}
    for name in ("name", "key"):
        if name in members and "value" in members and is_secret_member(members[name], members["value"]):
            yield members["value"]


def _mapped(value: Json, redacted: Mapping[str, str]) -> Json:
    if isinstance(value, str):
        return redacted[value]
    if isinstance(value, Mapping):
        return {redacted[name]: _mapped(member, redacted) for name, member in value.items()}
    if isinstance(value, list):
        return [_mapped(item, redacted) for item in value]
    return value
