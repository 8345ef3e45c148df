"""Finds the secrets and the personal data of a text: own rules and the plugins of detect-secrets, on every view of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from capibara.builders.redaction.named import ANCHOR, NAMED, in_columns
from capibara.builders.redaction.personal import PERSONAL
from capibara.builders.redaction.rules import (
    FORMS,
    GITLAB_GATES,
    LONG_RUN,
    LONGER_RUN,
    TOKENS,
    Category,
    Rule,
    decoded_base64,
    entropy,
    is_placeholder,
)
from capibara.builders.redaction.views import View, views_of
from capibara.core import extras

# Plugin of detect-secrets -> the kind it finds, what it needs in the text in lower case, the group that is the secret.
_PLUGINS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "aws.AWSKeyDetector": ("aws_key", ("akia", "asia", "a3t", "abia", "acca", "aws"), 0),
    "azure_storage_key.AzureStorageKeyDetector": ("azure_storage_key", ("accountkey",), 0),
    "cloudant.CloudantDetector": ("cloudant_key", ("cloudant", "clou", "cl_", "cl-"), 0),
    "discord.DiscordBotTokenDetector": ("discord_token", (".",), 0),
    "github_token.GitHubTokenDetector": ("github_token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), 0),
    "gitlab_token.GitLabTokenDetector": ("gitlab_token", GITLAB_GATES, 0),
    "ibm_cos_hmac.IbmCosHmacDetector": ("ibm_key", ("secret",), 1),
    "mailchimp.MailchimpDetector": ("mailchimp_key", ("-us",), 0),
    "npm.NpmDetector": ("npm_token", ("_authtoken",), 0),
    "pypi_token.PypiTokenDetector": ("pypi_token", ("pypi-ag",), 0),
    "sendgrid.SendGridDetector": ("sendgrid_key", ("sg.",), 0),
    "slack.SlackDetector": ("slack_token", ("xox", "hooks.slack"), 0),
    "softlayer.SoftlayerDetector": ("softlayer_key", ("softlayer", "sl_", "sl-"), 1),
    "square_oauth.SquareOAuthDetector": ("square_token", ("sq0csp",), 0),
    "stripe.StripeDetector": ("stripe_key", ("k_live_",), 0),
    "telegram_token.TelegramBotTokenDetector": ("telegram_token", (":",), 0),
    "twilio.TwilioKeyDetector": ("twilio_key", ("sk", "ac"), 0),
}
# Plugins whose secrets have neither spaces nor quotes in them, and where they are searched.
_WITHIN = {
    **dict.fromkeys(("azure_storage_key", "github_token", "gitlab_token", "mailchimp_key", "pypi_token"), LONG_RUN),
    **dict.fromkeys(("sendgrid_key", "square_token", "stripe_key"), LONG_RUN),
    **dict.fromkeys(("discord_token", "telegram_token", "twilio_key"), LONGER_RUN),
}
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{24,}={0,2}")
_SHORT = 4000  # characters
_DEEPEST = 2  # base64 within base64
_QUOTED = re.compile(r"([\"'`])([A-Za-z0-9_+/=-]{32,128})\1")
_UNNAMED_ENTROPY = 4.5  # bits per character; of 32 or more characters, English words and identifiers have less


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A secret, or personal data, within a text.

    Attributes:
      start, end: its span in the text.
      kind: the name of the rule.
      category: secret or personal.
      value: the secret itself, with its escapes decoded and its pieces joined.
      rank: the smaller, the more the kind says.
    """

    start: int
    end: int
    kind: str
    category: Category
    value: str
    rank: int


@functools.cache
def rules(*, plugins: bool = True) -> tuple[Rule, ...]:
    """All rules, the most specific first.

    Args:
      plugins: with those of detect-secrets.

    Raises:
      UserError: detect-secrets is not installed.
    """
    return (*TOKENS, *FORMS, *(_of_plugins() if plugins else ()), *NAMED, *PERSONAL)


class _Group(NamedTuple):
    """Rules that are tried at the same places, with their ranks, and a pattern that finds a gate of any of them."""

    rules: list[tuple[int, Rule]]
    gates: re.Pattern[str]


@functools.cache
def _groups(plugins: bool) -> dict[re.Pattern[str] | None, _Group]:
    """The rules by their `within` or `anchor`."""
    grouped: dict[re.Pattern[str] | None, list[tuple[int, Rule]]] = {}
    for rank, rule in enumerate(rules(plugins=plugins)):
        grouped.setdefault(rule.within or rule.anchor, []).append((rank, rule))
    result = {}
    for coarse, ranked in grouped.items():
        gates = {gate for _, rule in ranked for gate in rule.gates or ("",)}
        result[coarse] = _Group(ranked, re.compile("|".join(map(re.escape, sorted(gates)))))
    return result


@functools.cache
def kinds() -> frozenset[str]:
    """The kinds that may be found."""
    return frozenset({rule.kind for rule in rules()} | {"password", "high_entropy"})


def _of_plugins() -> Iterator[Rule]:
    extras.require("detect_secrets", extra="builders", why="the redaction of secrets")
    for name, (kind, gates, group) in _PLUGINS.items():
        module, _, plugin = name.partition(".")
        detector = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), plugin)
        for pattern in detector.denylist:
            yield Rule(
                kind=kind,
                pattern=pattern,
                gates=gates,
                group=min(group, pattern.groups),
                within=_WITHIN.get(kind),
            )


def has_secret(text: str) -> bool:
    """Whether a text has a secret by own rules; without detect-secrets, for verbs that must not need it."""
    return any(item.category is Category.SECRET for item in find(text, plugins=False))


def find(text: str, *, depth: int = 0, plugins: bool = True) -> list[Found]:
    """All that the rules find in a text, without overlaps, in its order.

    Where two findings overlap, they become one over both, of the more specific kind.

    Args:
      text: the text.
      depth: how often it was decoded from base64.
      plugins: with the rules of detect-secrets.

    Raises:
      UserError: detect-secrets is not installed.
    """
    result: list[Found] = []
    for view in views_of(text):
        scan = _Scan(view, plugins)
        result += scan.by_rules()
        if not view.is_joined:
            result += [*scan.unnamed(), *scan.in_columns()]
        if depth < _DEEPEST:
            result += scan.in_base64(depth)
    return _merged(result) if result else result


class _Scan:
    """The search of one view; runs of text that many rules look at are found once."""

    def __init__(self, view: View, plugins: bool):
        self._view, self._plugins = view, plugins
        self._text = view.text
        self._spans: dict[re.Pattern[str], list[tuple[int, int]]] = {}

    @functools.cached_property
    def _lowered(self) -> str:
        return self._text.lower()

    @functools.cached_property
    def _lowered_runs(self) -> str:
        return "\n".join(self._text[start:end] for start, end in self._spans_of(LONG_RUN)).lower()

    def _spans_of(self, pattern: re.Pattern[str]) -> list[tuple[int, int]]:
        if pattern not in self._spans:
            spans = [result.span() for result in pattern.finditer(self._text)]
            if self._view.is_joined:  # what is within one piece is found in the text itself
                spans = [span for span in spans if self._view.has_joint(*span)]
            self._spans[pattern] = spans
        return self._spans[pattern]

    def by_rules(self) -> Iterator[Found]:
        """What the rules find."""
        for coarse, group in _groups(self._plugins).items():
            if coarse is not None and not self._spans_of(coarse):
                continue
            if self._view.is_joined and not any(rule.is_token for _, rule in group.rules):
                continue
            lowered = self._lowered_runs if coarse in (LONG_RUN, LONGER_RUN) else self._lowered
            if len(lowered) <= _SHORT and group.gates.search(lowered) is None:
                continue  # one search is quicker than many on a short text
            for rank, rule in group.rules:
                if self._view.is_joined and not rule.is_token:
                    continue
                if rule.gates and not any(gate in lowered for gate in rule.gates):
                    continue
                for match in self._matches(rule):
                    span = match.span(rule.group)
                    if span[0] < span[1] and (rule.check is None or rule.check(match)):
                        yield self._finding(span, rule.kind_of(match), rule.category, match[rule.group], rank)

    def _matches(self, rule: Rule) -> Iterator[re.Match[str]]:
        if rule.within is not None:
            before, after = rule.margin
            for start, end in self._spans_of(rule.within):
                yield from rule.pattern.finditer(self._text, max(0, start - before), end + after)
        elif rule.anchor is not None:
            for start, _ in self._spans_of(rule.anchor):
                if (match := rule.pattern.match(self._text, start)) is not None:
                    yield match
        else:
            yield from rule.pattern.finditer(self._text)

    def unnamed(self) -> Iterator[Found]:
        """Quoted texts that look generated, whatever they are called."""
        for match in _QUOTED.finditer(self._text):
            if entropy(match[2]) >= _UNNAMED_ENTROPY and _is_generated(match[2]):
                yield self._finding(
                    match.span(2), "high_entropy", Category.SECRET, match[2], len(rules(plugins=self._plugins))
                )

    def in_columns(self) -> Iterator[Found]:
        """What stands in a table below the name of a secret."""
        for start, end, kind in in_columns(self._text, [start for start, _ in self._spans_of(ANCHOR)]):
            yield self._finding(
                (start, end), kind, Category.SECRET, self._text[start:end], len(rules(plugins=self._plugins))
            )

    def in_base64(self, depth: int) -> Iterator[Found]:
        """Runs of base64 that encode a text in which something is found."""
        for begin, end in self._spans_of(LONG_RUN):
            for match in _BASE64.finditer(self._text, begin, end):
                decoded = decoded_base64(match[0])
                if decoded is not None and (inner := find(decoded, depth=depth + 1, plugins=self._plugins)):
                    first = min(inner, key=lambda item: item.rank)
                    yield self._finding(match.span(), first.kind, first.category, match[0], first.rank)

    def _finding(self, span: tuple[int, int], kind: str, category: Category, value: str, rank: int) -> Found:
        start, end = self._view.origin(*span)
        return Found(start=start, end=end, kind=kind, category=category, value=value, rank=rank)


def _is_generated(value: str) -> bool:
    """Whether digits and letters of both cases are mixed as no alphabet, identifier or path has them."""
    if not any(c.islower() for c in value) or not any(c.isupper() for c in value):
        return False
    if sum(c.isdigit() for c in value) < 3 or is_placeholder(value) or decoded_base64(value) is not None:
        return False
    steps = [ord(b) - ord(a) for a, b in zip(value, value[1:])]
    return sum(abs(step) <= 1 for step in steps) < len(value) / 4


def _merged(findings: Sequence[Found]) -> list[Found]:
    merged: list[Found] = []
    for item in sorted(findings, key=lambda entry: (entry.start, entry.end, entry.rank)):
        if not merged or item.start >= merged[-1].end:
            merged.append(item)
            continue
        last = merged[-1]
        best = min(last, item, key=lambda each: each.rank)
        merged[-1] = dataclasses.replace(best, start=last.start, end=max(last.end, item.end))
    return merged
