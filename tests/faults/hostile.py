"""A folder of hostile files through every verb: nothing is executed, no traceback, under 1 GB and 10 s each.

    python tests/faults/hostile.py [--json FILE] [--only WORD] [--spawn]

Each run of a verb is a process of its own, forked from this one after the imports (--spawn: started anew, as a user does).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator

import hostile_inputs

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE)]
os.environ["PYTHONPATH"] = str(ROOT)
MOST_S, MOST_BYTES, DEADLINE_S = 10.0, 2**30, 60.0
SERVES = "is at http://"  # what a server says that has opened its model
BUILDERS = [f"prepare {word}" for word in hostile_inputs.WORDS]
CRASHES = ("Traceback (most recent call last)", "panicked at", "Fatal Python error", "core dumped")

Runs = dict[str, list[str]]  # verb -> arguments


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one run of a verb."""

    case: str
    verb: str
    code: int
    seconds: float
    peak_bytes: int
    executed: bool
    crashed: bool
    last_line: str

    def faults(self, refused: bool) -> list[str]:
        """What must not be."""
        checks = {
            "executed": self.executed,
            "traceback or crash": self.crashed or self.code not in (0, 1, 2, *((3,) if self.verb in BUILDERS else ())),
            "over 1 GB": self.peak_bytes > MOST_BYTES,
            "over 10 s": self.seconds > MOST_S,
            "not refused": refused and self.code not in ((2, 3) if self.verb in BUILDERS else (2,)),
        }
        return [name for name, is_so in checks.items() if is_so]


def runs_of(kind: str, path: str, out: pathlib.Path) -> Runs:
    """The verbs that open a kind of file."""
    tiny = [f"--gin_file={os.path.dirname(HF)}/tiny.gin", f"--gin.Trainer.model_dir='{out}/run'"]
    model = {
        "infer": ["infer", f"--model={path}", "--prompt=aaaa", "--gin.Sampling.max_new_tokens=2"],
        "evaluate": ["evaluate", f"--model={path}", "--limit=1"],
        "serve": ["serve", f"--model={path}", "--port=0"],
        "convert": ["convert", f"--from={path}", f"--to={out}/made"],
        "convert gguf": ["convert", f"--from={path}", f"--to={out}/made.gguf"],
        "merge": ["merge", path, path, "--method=linear", f"--to={out}/merged"],
    }
    if kind == "model":
        return model | {"train": ["train", *tiny, f"--gin.Trainer.init_from={path!r}"]}
    if kind == "run":
        own = {verb: [part.replace("--model=", "--model_dir=") for part in argv] for verb, argv in model.items()}
        return own | {"verify": ["convert", "verify", path], "list": ["convert", "list", path]}
    if kind == "t5x":
        return {"convert": model["convert"], "infer": model["infer"]}
    if kind == "adapter":
        return {"convert": model["convert"], "infer": model["infer"]}
    if kind == "index":
        questions = pathlib.Path(path).with_name("questions.jsonl")
        retrieved = [
            "--gin_file=evaluation/retrieved.gin",
            f"--gin.QUESTIONS=('{questions}',)",
            f"--gin.INDEX='{path}'",
        ]
        return {
            "prepare raft": ["prepare", "raft", str(questions), f"--index={path}", f"--out={out}/raft", "--gin.RaftPreparation.k=2"],
            "evaluate": ["evaluate", f"--model={HF}", "--limit=1", "--gin.K=1", "--gin.retrieved/Sampling.max_new_tokens=2", *retrieved],
        }  # fmt: skip
    builders = hostile_inputs.runs(path, out)
    if kind == "input":
        return builders
    if kind == "archive":
        own = {"prepare": ["prepare", "instructions", f"--files={path}", "--members=*.json*", f"--output={out}"]}
        return own | {"prepare corpus": builders["prepare corpus"]}
    if kind == "table":
        source = ["--gin.Dataset.source=@HuggingFaceSource()", "--gin.HuggingFaceSource.path='parquet'"]
        own = {"train": ["train", *tiny, *source, f"--gin.HuggingFaceSource.data_files=('{path}',)"]}
        return own | {"prepare corpus": builders["prepare corpus"]}
    prompts = ["infer", f"--model={HF}", f"--prompts={path}", f"--out={out}/o.jsonl"]
    if path.endswith("pipe.jsonl"):
        prompts = ["infer", f"--model={path}"]  # prompts may come by a pipe, which is waited for
    source = ["--gin.Dataset.source=@JsonlSource()", f"--gin.JsonlSource.files=('{path}',)"]
    questions = ["--gin_file=evaluation/questions.gin", f"--gin.QUESTIONS=('{path}',)"]
    return {
        "train": ["train", *tiny, *source],
        **builders,
        "prepare": ["prepare", "vocabulary", "--source=jsonl", f"--files={path}", f"--output={out}/v.model"],
        "prepare instructions": ["prepare", "instructions", f"--files={path}", f"--output={out}"],
        "infer --prompts": prompts,
        "evaluate": ["evaluate", f"--model={HF}", *questions],
        "calibrate": ["convert", f"--from={HF}", f"--to={out}/q", "--quantize=gptq", f"--calibration={path}"],
    }


HF = ""  # the good folder


def run(case: str, verb: str, argv: list[str], canary: pathlib.Path, work: pathlib.Path, spawn: bool) -> Outcome:
    """Runs a verb in a process of its own, to its end or the deadline."""
    canary.unlink(missing_ok=True)
    log = work / "log"
    log.touch()
    begin = time.monotonic()
    child = _spawned(argv, work, log) if spawn else _forked(argv, work, log)
    code, peak, seconds = _waited(child, begin, log if verb == "serve" else None)
    said = log.read_text(errors="replace")
    crashed = any(word in said for word in CRASHES)
    lines = said.strip().splitlines() or [""]
    return Outcome(case, verb, code, seconds, peak, canary.exists(), crashed, lines[-1][:300])


def _spawned(argv: list[str], work: pathlib.Path, log: pathlib.Path) -> int:
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", f"capibara.{argv[0]}", *argv[1:]], stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            cwd=work, start_new_session=True,
        ).pid  # fmt: skip


def _forked(argv: list[str], work: pathlib.Path, log: pathlib.Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.chdir(work)
        out = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        null = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in ((0, null), (1, out), (2, out)):
            os.dup2(descriptor, number)
        import importlib

        from capibara.multihost import exits

        code = exits.run_verb(importlib.import_module(f"capibara.{argv[0]}").main, argv[1:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _waited(pid: int, begin: float, serves: pathlib.Path | None) -> tuple[int, int, float]:
    """Exit code, peak memory and seconds; what is not done by the deadline is ended, and a server that has started."""
    started = 0.0
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        now = time.monotonic() - begin
        if found:
            _end_group(pid)
            code = 0 if started else os.waitstatus_to_exitcode(status)
            return code, usage.ru_maxrss * 1024, started or now
        if serves is not None and not started and SERVES in serves.read_text(errors="replace"):
            started = now
            os.kill(pid, signal.SIGTERM)
        if now > DEADLINE_S:
            _end_group(pid)
        time.sleep(0.02)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def through(
    cases: list, canary: pathlib.Path, work: pathlib.Path, spawn: bool = False, verbs: tuple = ()
) -> Iterator[tuple]:
    """(case, outcome, faults) of every case and verb."""
    for case in cases:
        for verb, argv in runs_of(case.kind, case.path, work / "out").items():
            if verbs and verb not in verbs:
                continue
            shutil.rmtree(work, ignore_errors=True)
            (work / "out").mkdir(parents=True)
            outcome = run(case.name, verb, argv, canary, work, spawn)
            # Not every verb reads every part of a folder: an unread part does no harm.
            faults = outcome.faults(refused=case.kind == "input" and case.refused)
            yield case, outcome, faults + _unopened(case, outcome) + _lost(case, outcome, work / "out")


_CANNOT = (("good: t5x", "infer"),)  # one has no tokenizer


def _unopened(case: types.SimpleNamespace, outcome: Outcome) -> list[str]:
    """A fault where what is not hostile is refused: then the rest proves nothing."""
    good = case.name.startswith("good: ") and (case.name, outcome.verb) not in _CANNOT
    return ["not opened"] if good and outcome.code else []


def _lost(case: types.SimpleNamespace, outcome: Outcome, out: pathlib.Path) -> list[str]:
    """A fault where a builder lacks good records that stand beside what is hostile."""
    is_lost = case.kind == "input" and bool(case.good) and hostile_inputs.lost(outcome.verb, out, case.good)
    return ["good records lost"] if is_lost else []


def preload() -> None:
    """Imports what the verbs import, before forks; JAX starts no back end by that."""
    import capibara.builders.executions.build
    import capibara.builders.playbooks.build
    import capibara.builders.preparation.build
    import capibara.builders.routing.build
    import capibara.convert
    import capibara.evaluate
    import capibara.evaluation.evaluate
    import capibara.infer
    import capibara.interop.conversion
    import capibara.interop.gguf.read
    import capibara.loading
    import capibara.merge
    import capibara.prepare
    import capibara.retrieval.index
    import capibara.retrieval.raft
    import capibara.serve
    import capibara.train
    import capibara.training.loop  # noqa: F401


def main() -> int:
    """Prints a table; the exit code is 1 where something must not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    parser.add_argument("--verb", action="append", default=[])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th case alone")
    parser.add_argument("--small", action="store_true", help="without files of many megabytes")
    parser.add_argument("--spawn", action="store_true", help="start each process anew")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    global HF
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        canary = root / "executed"
        made = subprocess.run(
            [sys.executable, "-c", _MAKE, str(HERE), str(root / "hostile"), str(canary), str(int(not args.small))],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        cases = [types.SimpleNamespace(**values) for values in json.loads(made.stdout.splitlines()[-1])]
        HF = str(root / "hostile" / "good" / "hf")
        cases = [case for case in cases if args.only in case.name][:: args.every]
        if not args.spawn:
            preload()
        rows, bad, harmless = [], [], set()
        for case, outcome, faults in through(cases, canary, root / "work", args.spawn, tuple(args.verb)):
            rows.append(dataclasses.asdict(outcome) | {"faults": faults})
            bad += [(case, outcome, faults)] if faults else []
            if outcome.code == 2 or outcome.code == 3 and outcome.verb in BUILDERS:
                harmless.add(case.name)
            said = outcome.last_line.replace(str(root), "")[:110]
            print(
                f"{outcome.case[:44]:44} {outcome.verb:15} {outcome.code:4} {outcome.seconds:5.1f} s "
                f"{outcome.peak_bytes / 2**20:6.0f} MiB  {', '.join(faults) or 'fine':10} {said}",
                flush=True,
            )
        # Some are read by some verbs alone.
        unrefused = [case.name for case in cases if case.refused and case.name not in harmless and not args.verb]
        print(_summary(cases, rows, unrefused))
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps({"rows": rows, "unrefused": unrefused}, indent=1))
    return int(bool(bad or unrefused))


def _summary(cases: list, rows: list[dict], unrefused: list[str]) -> str:
    count = lambda word: sum(word in row["faults"] for row in rows)  # noqa: E731
    return (
        f"{len(cases)} hostile files, {len(rows)} runs of verbs: {count('executed')} executions, "
        f"{count('traceback or crash')} tracebacks or crashes, {count('over 1 GB')} over 1 GB, {count('over 10 s')} over 10 s; "
        f"the slowest {max(row['seconds'] for row in rows):.1f} s, the largest {max(row['peak_bytes'] for row in rows) / 2**20:.0f} "
        f"MiB; refused by no verb: {', '.join(unrefused) or 'none'}"
    )


# In a process of its own: it starts JAX's back end, which does not survive a fork.
_MAKE = """
import dataclasses, json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import hostile_files
cases = hostile_files.make(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]), large=sys.argv[4] == "1")
print(json.dumps([dataclasses.asdict(case) for case in cases]))
"""


if __name__ == "__main__":
    sys.exit(main())
