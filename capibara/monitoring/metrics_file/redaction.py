"""Removes what looks like a secret from texts that leave the machine."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "[hidden]"
_DEEPEST = 32  # nested values

# What services call their tokens, by their own prefixes.
_TOKENS = re.compile(
    r"""
    \b(?: hf_[A-Za-z0-9]{16,} | gh[opsur]_[A-Za-z0-9]{16,} | github_pat_\w{16,} | glpat-[\w-]{16,}
      | sk-[\w-]{16,} | sk_(?:live|test)_\w{16,} | xox[abeoprs]-[\w-]{10,} | A[KS]IA[A-Z0-9]{16} | AIza[\w-]{30,}
      | ya29\.[\w-]{16,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{30,} | dapi[0-9a-f]{32} | wandb_v1_\w{16,}
      | eyJ[\w-]{8,4096}\.[\w-]{8,4096}\.[\w-]* )
    | (?<=[?&]sig=)[^\s"'&]{6,} | (?<=[?&]signature=)[^\s"'&]{6,}
    | (?<=://hooks\.slack\.com/)[^\s"']+ | (?<=/api/webhooks/)[^\s"']+ | (?<=/webhookb2/)[^\s"']+
    | -----BEGIN[A-Z ]*PRIVATE\ KEY-----[\s\S]*?(?:-----END[A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE,
)
# The name of a secret, and its value: `api_key = "..."`, `--token=...`, `"password": "..."`, `Authorization: Bearer ...`.
_NAMED = re.compile(
    r"""
    (?P<name> (?: api[_-]?key | access[_-]?key | secret[_-]?key | private[_-]?key | token | secret
       | passw(?:or)?d | passphrase | credentials? | authorization ) )
    (?P<between> ["']? \s* [=:] \s* (?: (?:bearer|basic|token) \s+ )? ["']? | \s+ (?: (?:bearer|basic) \s+ ) )
    (?P<value> (?! (?:bearer|basic) \s ) [^\s"',;()\[\]{}]{6,} )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]{1,20}://)[^/\s:@'\"]{0,256}:[^/\s@'\"]{1,512}@", re.IGNORECASE)
_LONG_KEY = re.compile(r"(?<![\w/.-])(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{32,}(?![\w/.-])")
_PLAIN_VALUE = re.compile(r"(?:none|null|true|false|\d{1,9}|@\S*|%\S*|<\S*|\$\S*)$", re.IGNORECASE)
_HASH = re.compile(r"[0-9a-f]+(?:-[0-9a-f]+)*$", re.IGNORECASE)


def encodable(text: str) -> str:
    """Escapes what UTF-8 cannot encode: the surrogates that stand for undecodable bytes, which no service takes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def redact(text: str) -> str:
    """The text with `[hidden]` in place of what looks like a token, a password or a private key.

    Hashes, as of commits and files, stay, unless their name says that they are secrets.
    """
    text = _TOKENS.sub(HIDDEN, encodable(text))
    text = _IN_ADDRESS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _NAMED.sub(_without_value, text)
    return _LONG_KEY.sub(lambda match: match[0] if _is_word(match[0]) else HIDDEN, text)


def redact_json(value: object, depth: int = _DEEPEST) -> Any:
    """JSON values with redacted strings; those under the name of a secret, and too deep ones, are hidden whole."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, (dict, list, tuple)) and not depth:
        return HIDDEN
    if isinstance(value, dict):
        return {encodable(str(key)): _under(str(key), item, depth - 1) for key, item in value.items()}
    return [redact_json(item, depth - 1) for item in value] if isinstance(value, (list, tuple)) else value


def _under(name: str, value: object, depth: int) -> Any:
    prefix = f"{name}="
    if isinstance(value, str) and "\n" not in value and " " not in value:
        return redact(prefix + value).removeprefix(prefix)
    return redact_json(value, depth)


def _without_value(match: re.Match[str]) -> str:
    if _PLAIN_VALUE.match(match["value"]):
        return match[0]
    return f"{match['name']}{match['between']}{HIDDEN}"


def _is_word(text: str) -> bool:
    """Whether a long word is a hash or a name made of words, not a random key: keys change case and digits often."""
    if _HASH.match(text):
        return True
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" if c.islower() else "-" for c in text]
    changes = sum(item != other for item, other in zip(kinds, kinds[1:]))
    return changes < len(text) / 3
