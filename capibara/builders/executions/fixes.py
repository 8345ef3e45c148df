"""Pairs a failing run with the passing one that follows it in the same session, with similar code."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import re
from typing import NamedTuple

from capibara.builders.executions.runs import Run
from capibara.config import configurable
from capibara.core.types import UserError

_TOKEN = re.compile(r"\w+|[^\w\s]")
_MOST_TOKENS = 2000  # longer code is compared by lines
_SHORT_TOKENS, _SHORT_SIMILARITY = 12, 0.85  # statements this short are alike by chance


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixPairs:
    """How a fix is recognised.

    Attributes:
      min_similarity: the least similarity of the two codes, from 0 to 1: 2 m / n, where m of their n words and signs match
        in order (Ratcliff and Obershelp). Codes of which one has fewer than 12 words and signs need 0.85 at least.
      window: the failing run is at most so many runs of the session before the passing one.
      sessions: so many sessions of a file are followed at once; the one that was used least recently is forgotten.
    """

    min_similarity: float = 0.7
    window: int = 8
    sessions: int = 10_000

    def __post_init__(self) -> None:
        if not 0 < self.min_similarity <= 1:
            raise UserError(f"FixPairs.min_similarity ({self.min_similarity}) must be above 0 and at most 1: try 0.7")
        for name in ("window", "sessions"):
            if getattr(self, name) < 1:
                raise UserError(f"FixPairs.{name} ({getattr(self, name)}) must be positive: try 8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fix:
    """A failing run and the one that mends it.

    Attributes:
      before: the failing run, the last of its kind.
      after: the passing run.
      similarity: of their code, from 0 to 1.
      attempts: the failing runs that lead to it, `before` included.
    """

    before: Run
    after: Run
    similarity: float
    attempts: int


class _Pending(NamedTuple):
    run: Run
    number: int  # of the run in its session


class _Session:
    """The last failing runs of a session."""

    def __init__(self, window: int) -> None:
        self.count = 0
        self.failing: collections.deque[_Pending] = collections.deque(maxlen=window)


class Pairing:
    """Follows the sessions of one file; uses memory for the last failing runs of the last sessions only.

    Args:
      settings: how a fix is recognised.
    """

    def __init__(self, settings: FixPairs):
        self._settings = settings
        self._sessions: collections.OrderedDict[str, _Session] = collections.OrderedDict()
        self.unchanged = 0  # runs that failed, and passed later with the same code

    def add(self, run: Run, session_id: str) -> Fix | None:
        """Takes the next run of a session; returns a fix if it mends an earlier one."""
        session = self._session(session_id)
        session.count += 1
        if not run.execution.passed:
            session.failing.append(_Pending(run, session.count))
            return None
        return self._mended(session, run)

    def _session(self, name: str) -> _Session:
        if name not in self._sessions:
            self._sessions[name] = _Session(self._settings.window)
            if len(self._sessions) > self._settings.sessions:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(name)
        return self._sessions[name]

    def _mended(self, session: _Session, run: Run) -> Fix | None:
        similar: list[tuple[_Pending, float]] = []
        for pending in list(session.failing):
            if session.count - pending.number > self._settings.window:
                session.failing.remove(pending)
            elif _is_comparable(pending.run, run):
                ratio = similarity(pending.run.execution.code, run.execution.code, self._settings.min_similarity)
                is_short = min(len(_words(pending.run)), len(_words(run))) < _SHORT_TOKENS
                if ratio >= max(self._settings.min_similarity, _SHORT_SIMILARITY if is_short else 0.0):
                    similar.append((pending, ratio))
        for pending, _ in similar:
            session.failing.remove(pending)
        changed = [(pending, ratio) for pending, ratio in similar if _words(pending.run) != _words(run)]
        self.unchanged += len(similar) - len(changed)
        if not changed:
            return None
        (last, ratio) = changed[-1]
        return Fix(before=last.run, after=run, similarity=round(ratio, 4), attempts=len(changed))


def _words(run: Run) -> list[str]:
    return _TOKEN.findall(run.execution.code)


def _is_comparable(before: Run, after: Run) -> bool:
    """Whether a run is later, in the same language, and defines something that the failing one defines, if that does."""
    first_s, then_s = before.execution.time_s, after.execution.time_s
    if before.language.name != after.language.name or (first_s is not None and then_s is not None and then_s < first_s):
        return False
    defined = {*before.patterns.functions, *before.patterns.classes}
    return not defined or bool(defined & {*after.patterns.functions, *after.patterns.classes})


def similarity(text: str, other: str, least: float = 0.0) -> float:
    """The similarity of two codes, from 0 to 1; 0 where it is surely below `least`."""
    first, second = _TOKEN.findall(text), _TOKEN.findall(other)
    if first == second:
        return 1.0
    if max(len(first), len(second)) > _MOST_TOKENS:
        first, second = ([line.strip() for line in code.split("\n")] for code in (text, other))
        if max(len(first), len(second)) > _MOST_TOKENS:
            return 0.0
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    if matcher.real_quick_ratio() < least or matcher.quick_ratio() < least:
        return 0.0
    return matcher.ratio()
