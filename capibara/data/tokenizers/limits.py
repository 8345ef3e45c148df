"""Checks untrusted tokenizers before a native library reads them: sizes, expansions, regular expressions.

What cannot be checked by inspection (a SentencePiece model, a compiled table, an unknown regular expression) is loaded and
used in a separate process with a time and memory limit, where a crash is only an exit code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError

TOKENS, LARGEST_ID = 4_000_000, 2**24
_TOKEN_CHARACTERS = 65_536
# Steps of a normalizer or pre-tokenizer; characters that they may make of one; characters of a word in WordPiece.
_STEPS, _GROWTH, _WORD = 64, 64, 1000
_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")
_PROBE_S = 60.0  # wall-clock limit; the process itself limits its CPU time
_PROBE_CHARACTERS = 2000
# Steps that are safe with any parameters.
_PLAIN = frozenset(
    "Sequence NFC NFD NFKC NFKD Lowercase StripAccents Strip Nmt ByteLevel BertNormalizer Prepend Replace Split Digits "
    "Whitespace WhitespaceSplit Punctuation Metaspace BertPreTokenizer UnicodeScripts CharDelimiterSplit "
    "TemplateProcessing BertProcessing RobertaProcessing ByteFallback Fuse WordPiece BPEDecoder CTC".split()
)
# Safe patterns: those of GPT-2, Llama 3, Qwen, GPT-4o, Gemma, and of the pre-tokenizers that GGUF names.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    rf"{_SUFFIXES}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    rf"{_SUFFIXES}|{_WORDS}|\p{{N}}|{_REST}",
    r"[\p{P}\$\+<=>\^~\|]+",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
    " {2,}",
}


def check_json(content: bytes, path: str) -> None:
    """Checks a tokenizer.json.

    Raises:
      UserError: it is not a tokenizer.json, or is not safe to load; the message says why.
    """
    try:
        spec = limits.parse_json(content)
    except ValueError as error:
        raise UserError(f"{path} is not a tokenizer.json: {limits.cause(error)}") from None
    try:
        _check_spec(spec)
        steps = list(_steps(spec))
        patterns = [pattern for step in steps for pattern in _regular(step)]
        for pattern in patterns:
            limits.check_pattern(pattern)
    except limits.Refused as error:
        raise UserError(f"{path} is not a tokenizer.json that can be used: it has {error}") from None
    if not set(patterns) <= KNOWN or not {step["type"] for step in steps} <= _PLAIN:
        _probe("json", content, _texts(patterns), path)


def load_json(content: bytes, path: str) -> Any:
    """Checks a tokenizer.json and loads it as tokenizers.Tokenizer, without its padding and truncation.

    Raises:
      UserError: it is not a tokenizer.json, or is not safe to load; the message says why.
    """
    import tokenizers

    check_json(content, path)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:  # the library raises Exception, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UserError(f"{path} is not a tokenizer.json: {limits.cause(error, 200)}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def check_sentencepiece(content: bytes, path: str) -> None:
    """Loads and uses a SentencePiece model in a separate process.

    Raises:
      UserError: it is not a SentencePiece model, or the library cannot use it.
    """
    _probe("sentencepiece", content, _texts([]), path)


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of a library in Rust, which is not an Exception."""
    return type(error).__name__ == "PanicException"


def _check_spec(spec: object) -> None:
    if not isinstance(spec, dict) or not isinstance(model := spec.get("model"), dict):
        raise limits.Refused("no object with a model")
    vocab = model.get("vocab")
    pairs = list(vocab.items()) if isinstance(vocab, dict) else vocab
    if not isinstance(pairs, list) or len(pairs) > TOKENS:
        raise limits.Refused(f"no vocab of at most {TOKENS:,} tokens")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not _is_token(pair[0]):
            raise limits.Refused(f"the token {limits.shortened(pair)} in its vocab")
    if isinstance(vocab, dict) and not all(_is_id(token_id) for token_id in vocab.values()):
        wrong = next(item for item in vocab.items() if not _is_id(item[1]))
        raise limits.Refused(f"the token {limits.shortened(wrong)}, whose id must be from 0 to {LARGEST_ID:,}")
    added = spec.get("added_tokens") or []
    if not isinstance(added, list) or len(added) > TOKENS // 4:
        raise limits.Refused("added_tokens that are no list, or too long a list")
    for token in added:
        if not isinstance(token, dict) or not _is_token(token.get("content")) or not _is_id(token.get("id")):
            raise limits.Refused(f"the added token {limits.shortened(token)}, must have a content and an id")
    merges = model.get("merges", [])
    if not isinstance(merges, list) or len(merges) > TOKENS:
        raise limits.Refused(f"merges that are no list of at most {TOKENS:,}")
    longest = model.get("max_input_chars_per_word", 0)
    if type(longest) is not int or not 0 <= longest <= _WORD:
        raise limits.Refused(f"max_input_chars_per_word = {limits.shortened(longest)}, must be at most {_WORD}")


def _is_token(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _TOKEN_CHARACTERS


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_ID


def _steps(spec: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """All steps of the four parts of a tokenizer, including those in sequences."""
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth, count, left = 1.0, 0, [spec.get(part)]
        while left:
            step = left.pop()
            if step is None:
                continue
            if not isinstance(step, dict) or not isinstance(step.get("type"), str):
                raise limits.Refused(f"a {part} without a type")
            for inner in ("normalizers", "pretokenizers", "processors", "decoders"):
                if isinstance(step.get(inner), list):
                    left += step[inner]
            count += 1
            growth *= _growth(step)
            if count > _STEPS or growth > _GROWTH or len(left) > _STEPS:
                raise limits.Refused(f"a {part} of more than {_STEPS} steps, or that makes {_GROWTH} characters of one")
            yield step


def _growth(step: Mapping[str, object]) -> float:
    """The largest number of characters that a step makes of one."""
    content = step.get("content")
    if step["type"] == "Replace" and isinstance(content, str):
        pattern = step.get("pattern")
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1.0, len(content) / max(1, len(plain) if isinstance(plain, str) else 1))
    if step["type"] == "Prepend":
        return max(1.0, len(str(step.get("prepend", ""))) / 4)
    return 1.0


def _regular(step: Mapping[str, object]) -> Iterator[str]:
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and "Regex" in pattern:
        if not isinstance(pattern["Regex"], str):
            raise limits.Refused("a regular expression that is no text")
        yield pattern["Regex"]


def _texts(patterns: list[str]) -> list[str]:
    """Texts on which patterns may be slow: runs of the patterns' characters, of common ones, and of pairs of them."""
    special = sorted(set(re.sub(r"\\[pP]\{[^}]*\}|[\\\[\](){}|?*+^$]", "", "".join(patterns))))[:24]
    characters = list(dict.fromkeys([*special, *"aA1 \n.'\t\u4e2d\u00e9\u2581"]))
    runs = [character * _PROBE_CHARACTERS for character in characters]
    pairs = [(first + second) * (_PROBE_CHARACTERS // 2) for first, second in zip(characters, characters[1:])]
    return [*runs, *(f"{run}\0!" for run in runs), *pairs, "Plain text, \U0001f999? 12345"]


_tried: set[bytes] = set()


def _probe(kind: str, content: bytes, texts: list[str], path: str) -> None:
    """Raises UserError if the library cannot load a tokenizer, or encode the texts with it, in a separate process."""
    key = hashlib.blake2b(content, digest_size=16, person=kind.encode()[:16]).digest()
    if key in _tried:
        return
    header = json.dumps([kind, texts]).encode()
    result = _run(len(header).to_bytes(8, "little") + header + content)
    if result is not None:
        raise UserError(f"{path} is not a {_CALLED[kind]}: {result}")
    _tried.add(key)


_CALLED = {"json": "tokenizer.json that can be used", "sentencepiece": "SentencePiece model"}


def _run(request: bytes) -> str | None:
    """Runs the probe with this standard input; returns what is wrong, in one line, or None."""
    environment = dict(os.environ) | {
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "RUST_BACKTRACE": "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", _PROBE], input=request, capture_output=True, timeout=_PROBE_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"the library takes more than {_PROBE_S:.0f} s to load it and encode texts with it"
    verdict = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == 0 and verdict == "fine":
        return None
    if verdict.startswith("wrong: "):
        return " ".join(verdict.removeprefix("wrong: ").split())[:200]
    if done.returncode == -9 or done.returncode == -24:  # SIGKILL, SIGXCPU
        return "the library takes too long to encode a text of 2,000 characters with it"
    return f"the library crashes or runs out of memory with it (exit code {done.returncode})"
