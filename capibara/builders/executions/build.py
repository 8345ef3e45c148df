"""Builds a training set from logs of executed code: cleaned executions, pairs of error and fix, and conversations."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence

from capibara.builders.executions import chats, explanations, reading
from capibara.builders.executions.chats import ExecutionChats
from capibara.builders.executions.filters import ExecutionFilter
from capibara.builders.executions.fixes import Fix, FixPairs, Pairing
from capibara.builders.executions.names import EarlierImports
from capibara.builders.executions.reading import Execution
from capibara.builders.executions.runs import Run, analysed
from capibara.builders.files import fingerprints
from capibara.builders.files.manifest import Manifest
from capibara.builders.files.problems import Problems
from capibara.builders.files.reading import common_folder
from capibara.builders.redaction.redact import Json, Redaction, Scope
from capibara.builders.workers import Workers
from capibara.builders.writing import Output, Part, Parts

KIND = "executions"
_FOLDERS = ("executions", "fixes", "chats")
_REMEMBERED = 200_000  # conversations of a file that are compared with the next ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionLogs:
    """The settings of a build.

    Attributes:
      filter: which executions are kept.
      fixes: how a fix is recognised.
      chats: which conversations are made.
      redaction: what is replaced.
    """

    filter: ExecutionFilter = ExecutionFilter()
    fixes: FixPairs = FixPairs()
    chats: ExecutionChats = ExecutionChats()
    redaction: Redaction = Redaction()


def build(
    paths: Sequence[str],
    folder: str,
    settings: ExecutionLogs,
    *,
    num_workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    problems: Problems | None = None,
) -> Manifest:
    """Writes executions/, fixes/ and chats/ into a folder, a file of each per input, and a manifest.

    What an earlier run has written whole is kept; the bytes depend neither on that nor on `num_workers`.

    Args:
      paths: the logs.
      folder: where to write.
      settings: what is kept and made.
      num_workers: processes that each take one log at a time; 0: this one.
      progress: called with the number of logs that are done, and of all.
      problems: what was left out of the input before.

    Raises:
      UserError: a package is not installed, or the folder holds another build or cannot be written.
      TryAgain: a worker process was killed.
    """
    inputs = fingerprints.inputs_of(paths)
    with Output(folder, KIND, dataclasses.asdict(settings), inputs) as output:
        if (manifest := output.done()) is not None:
            return manifest
        logs = [item.path for item in inputs]
        builder = _Builder(parts=output.parts, settings=settings, common=common_folder(logs))
        todo = [(number, path) for number, path in enumerate(logs) if not _is_done(output.parts, number)]
        done = len(logs) - len(todo)
        progress(done, len(logs))

        def count() -> None:
            nonlocal done
            done += 1
            progress(done, len(logs))

        with Workers(min(num_workers, len(todo))) as workers:
            workers.each(builder, todo, count)
        return output.finish({"logs": len(logs)}, problems)


def _names(number: int) -> list[str]:
    return [f"{folder}/{number:05d}.jsonl" for folder in _FOLDERS]


def _is_done(parts: Parts, number: int) -> bool:
    return all(parts.done(name) is not None for name in _names(number))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Builder:
    """Writes the files of one log; can be sent to a worker process."""

    parts: Parts
    settings: ExecutionLogs
    common: str

    def __call__(self, task: tuple[int, str]) -> None:
        number, path = task
        with contextlib.ExitStack() as stack:
            executions, fixes, conversations = (stack.enter_context(self.parts.write(name)) for name in _names(number))
            log = _Log(self.settings, os.path.relpath(os.path.abspath(path), self.common))
            log.write(path, executions, fixes, conversations)


class _Log:
    """What is remembered while a log is read: sessions, and conversations that were written."""

    def __init__(self, settings: ExecutionLogs, name: str):
        self._settings = settings
        self._name = name
        self._pairing = Pairing(settings.fixes)
        self._imports = EarlierImports(settings.fixes.sessions)
        self._scopes: collections.OrderedDict[str, Scope] = collections.OrderedDict()
        self._written: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def write(self, path: str, executions: Part, fixes: Part, conversations: Part) -> None:
        counts = executions.counts
        for execution in reading.read(path, executions.problems):
            counts["executions read"] += 1
            run = self._redacted(execution, counts)
            if (reason := self._settings.filter.excludes(run)) is not None:
                counts[f"excluded by {reason}"] += 1
                continue
            fix = None
            if execution.session is not None and execution.form is not reading.Form.SESSION:
                fix = self._pairing.add(run, execution.session)
            if (reason := self._settings.filter.rejects(run)) is not None:
                counts[f"excluded by {reason}"] += 1
                if reason != "outcome":
                    continue
            else:
                self._keep(run, executions, conversations)
            if fix is not None:
                self._keep_fix(fix, fixes, conversations)
        if self._pairing.unchanged:
            counts["passed later with the same code"] = self._pairing.unchanged

    def _redacted(self, execution: Execution, counts: collections.Counter[str]) -> Run:
        """The execution without secrets: of it nothing else is used."""
        result: collections.Counter[str] = collections.Counter()
        texts = [self._name, *reading.texts_of(execution)]
        name, *clean = self._scope(execution.session).redact_texts(texts, result)
        counts.update({f"redacted {kind}": count for kind, count in result.items()})
        run = analysed(reading.with_texts(execution, clean), f"{name}:{execution.line}")
        if execution.session is None or run.language.name != "python":
            return run
        failure = run.execution.failure
        error = None if run.execution.passed else failure.name if failure is not None else ""
        earlier = self._imports.add(execution.session, run.execution.code, error)
        return dataclasses.replace(run, earlier_imports=earlier)

    def _scope(self, session: str | None) -> Scope:
        if session is None:
            return self._settings.redaction.scope()
        if session not in self._scopes:
            self._scopes[session] = self._settings.redaction.scope()
            if len(self._scopes) > self._settings.fixes.sessions:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(session)
        return self._scopes[session]

    def _keep(self, run: Run, executions: Part, conversations: Part) -> None:
        about = explanations.of_code(run) if run.execution.passed else explanations.of_failure(run)
        executions.write_record({**run.as_json(), "explanation": about.text or None})
        executions.counts["executions"] += 1
        executions.counts[f"language {run.language.name or 'unknown'}"] += 1
        executions.counts["passed" if run.execution.passed else "failed"] += 1
        for chat in chats.of_run(run, self._settings.chats):
            self._converse(chat, conversations)

    def _keep_fix(self, fix: Fix, fixes: Part, conversations: Part) -> None:
        about = explanations.of_fix(fix)
        fixes.write_record(
            {
                "before": fix.before.as_json(),
                "after": fix.after.as_json(),
                "similarity": fix.similarity,
                "attempts": fix.attempts,
                "cause": explanations.of_failure(fix.before).text or None,
                "explanation": about.text or None,
            }
        )
        fixes.counts["fixes"] += 1
        if (chat := chats.of_fix(fix, self._settings.chats)) is not None:
            self._converse(chat, conversations)

    def _converse(self, chat: dict[str, Json], conversations: Part) -> None:
        content = fingerprints.canonical(chat["messages"]).encode()
        key = hashlib.blake2b(content, digest_size=12).digest()
        if key in self._written:
            conversations.counts["conversations repeated"] += 1
            return
        self._written[key] = None
        if len(self._written) > _REMEMBERED:
            self._written.popitem(last=False)
        conversations.write_record(chat)
        conversations.counts["conversations"] += 1
        conversations.counts[f"conversations {chat['kind']}"] += 1
