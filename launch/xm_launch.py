"""Runs capibara as an XManager experiment: each work unit is one `capibara launch`.

    xmanager launch launch/xm_launch.py -- --gin_file=quickstart.gin --emulate=8
    xmanager launch launch/xm_launch.py -- --where=gke --gin_file=base_v5e64.gin --storage=gs://bucket --image=IMAGE

XManager records the experiment and starts, streams and waits for its work units; capibara's launcher makes the TPU
jobs, because XManager 0.8.5 has no v5e and v6e on Vertex AI and sets no google.com/tpu limit on Kubernetes. The flags
below are this script's, some of them those of T5X's t5x/scripts/xm_launch.py; all others are passed on to `capibara
launch`.

This file cannot be xmanager.py: `xmanager launch` imports a script by its name, finds that the library xmanager is
imported already, and never reads the file.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import json
import logging as standard_logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from absl import app, flags, logging

_HAS_XMANAGER = importlib.util.find_spec("xmanager") is not None
if _HAS_XMANAGER:  # --print_commands does without it
    from xmanager import xm, xm_local  # defines --xm_launch_script, which `xmanager launch` adds

_USER_ERROR = 2
_PLACES = ("local", "gce", "gke", "slurm", "ssh", "vertex")
_ALIASES = {"kubernetes": "gke"}
_VERBS = {"train": "train", "eval": "evaluate", "infer": "infer"}
# Flags of `launch local` itself; the verb has the others.
_LAUNCHERS = ("restarts", "processes", "grace", "crash_grace", "dry-run", "dry_run")
_LONGEST_NAME = 40  # characters of a job's name
# Flags that absl's app defines when it runs, and those that its parser reads itself.
_ABSLS = ("", "?", "h", "help", "helpfull", "helpshort", "helpxml", "flagfile", "undefok")
_COPYBARA = "jobs run the capibara that is installed or in --image: remove it"
# T5X's flags that have no meaning here -> what to do.
_REFUSED = {
    "tpu_cores": "a slice says how many chips there are, and of which kind: use --slice, e.g. --slice=v5e-8",
    "pip_install": "add the packages to the image (launch/Dockerfile), or to the environment of --where=local",
    "clone_github": _COPYBARA,
    "copybara_config": _COPYBARA,
    "copybara_workflow": _COPYBARA,
    "copybara_origin": _COPYBARA,
}

_WHERE = flags.DEFINE_string("where", "local", "local, gce, gke (or kubernetes), slurm, ssh or vertex.")
_NAME = flags.DEFINE_string("name", None, "Of the experiment and its jobs; default: that of the first Gin file.")
_RUN_MODE = flags.DEFINE_string("run_mode", "train", "train, eval or infer; the last two with --where=local only.")
_GIN_FILE = flags.DEFINE_multi_string("gin_file", [], "Gin file of the run; repeatable or comma-separated.")
_MODEL_DIR = flags.DEFINE_string("model_dir", None, "Run folder; of a sweep, the folder for the run folders.")
_TFDS_DATA_DIR = flags.DEFINE_string("tfds_data_dir", None, "Folder of TensorFlow Datasets.")
_CACHE_DIRS = flags.DEFINE_list("seqio_additional_cache_dirs", [], "Folders that are searched for cached tasks.")
_PROJECT_DIRS = flags.DEFINE_list("project_dirs", [], "Packages with Gin files and modules of your own.")
_SWEEP = flags.DEFINE_multi_string("sweep", [], "NAME=VALUE,VALUE: a work unit for each value; repeatable.")
_PYTHON = flags.DEFINE_string("launch_python", None, "Python that has capibara; default: XManager's own.")
_PRINT = flags.DEFINE_bool("print_commands", False, "Print the work units' commands, and launch nothing.")


class Mistake(Exception):
    """The user's mistake, in one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkUnit:
    """One run.

    Attributes:
      name: of its job.
      arguments: of `capibara launch`.
      environment: variables that it has in addition to XManager's own.
      swept: binding -> its value in this work unit.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    swept: Mapping[str, str]


def main(argv: Sequence[str]) -> int:
    """Launches the experiment that the flags describe, and waits for it.

    Args:
      argv: what absl has not parsed, after the name of the script.

    Returns:
      The exit code of the first work unit that has failed, 128 + N after signal N, or 0.
    """
    try:
        if argv[1:]:
            raise Mistake(f"unexpected argument {argv[1]!r}: flags that are passed on are written --name=value")
        units = work_units()
        python = _python()
        if _PRINT.value:
            print("".join(f"{_shown(unit, python)}\n" for unit in units), end="")
            return 0
        if not _HAS_XMANAGER:
            raise Mistake("XManager is not installed: pip install xmanager==0.8.5.post1, in an environment of its own")
    except Mistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return _USER_ERROR
    sys.stdout.reconfigure(line_buffering=True)  # XManager prints the work units' lines without flushing them
    try:
        return _run(units, python)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def work_units() -> list[WorkUnit]:
    """The work units that the flags describe.

    Raises:
      Mistake: a flag has a wrong value, or the flags do not fit together.
    """
    _check()
    where = _ALIASES.get(_WHERE.value, _WHERE.value)
    gin_files = [file for text in _GIN_FILE.value for file in text.split(",") if file]
    if not gin_files and (_RUN_MODE.value == "train" or not _MODEL_DIR.value):
        raise Mistake("--gin_file is not set: name the run's Gin file, e.g. --gin_file=quickstart.gin")
    stem = os.path.splitext(os.path.basename(gin_files[0] if gin_files else _MODEL_DIR.value.rstrip("/")))[0]
    points = list(_points(_SWEEP.value))
    units = []
    for number, swept in enumerate(points, 1):
        suffix = f"-{number}" if len(points) > 1 else ""
        name = f"{_NAME.value or _near_name(stem, _LONGEST_NAME - len(suffix))}{suffix}"
        folder = f"{_MODEL_DIR.value.rstrip('/')}/{name}" if suffix else _MODEL_DIR.value
        options = [*_options(where), *(f"--gin.{binding}={value}" for binding, value in swept.items())]
        environment = {}
        if _TFDS_DATA_DIR.value and where == "local":
            environment["TFDS_DATA_DIR"] = _TFDS_DATA_DIR.value
        if _RUN_MODE.value == "train":
            options += [f"--gin.MODEL_DIR={json.dumps(folder)}"] if folder else []
            options += [f"--name={name}"] if where != "local" else []
            arguments = [where, *gin_files, *options]
        else:
            own = [option for option in options if _name_of(option) in _LAUNCHERS]
            others = [option for option in options if option not in own]
            others += [f"--model_dir={folder}"] if folder else []
            others += [f"--gin_file={file}" for file in gin_files]
            arguments = [where, *own, "--", _VERBS[_RUN_MODE.value], *others]
        units.append(WorkUnit(name=name, arguments=arguments, environment=environment, swept=swept))
    return units


def _check() -> None:
    """Raises Mistake for flags that do not fit together."""
    for option in _PASSED:
        if (fix := _REFUSED.get(_name_of(option))) is not None:
            raise Mistake(f"{option.partition('=')[0]} is not supported: {fix}")
    where = _WHERE.value
    if where not in (*_PLACES, *_ALIASES):
        raise Mistake(f"--where={where} must be one of {', '.join((*_PLACES, *_ALIASES))}")
    if _RUN_MODE.value not in _VERBS:
        raise Mistake(f"--run_mode={_RUN_MODE.value} must be one of {', '.join(_VERBS)}")
    if _RUN_MODE.value != "train" and where != "local":
        raise Mistake(f"--run_mode={_RUN_MODE.value} runs on this machine: launch {where} trains, use --where=local")
    for folder in _PROJECT_DIRS.value:
        if not os.path.isdir(os.path.expanduser(folder)):
            raise Mistake(f"--project_dirs={folder} must be a folder: it does not exist")
    if _SWEEP.value:
        if _RUN_MODE.value != "train":
            raise Mistake(f"--sweep trains, and --run_mode is {_RUN_MODE.value}: remove one of them")
        bound = [name for name in map(_name_of, _PASSED) if name.startswith("gin.") and _is_run_folder(name)]
        if bound or not _MODEL_DIR.value:
            why = f"--{bound[0]} is the same for all" if bound else "--model_dir is not set"
            raise Mistake(
                f"each run of a sweep has a folder of its own, and {why}: name the folder for them with --model_dir"
            )


def _options(where: str) -> list[str]:
    """The flags that all work units have."""
    options = list(_PASSED)
    parents = [os.path.dirname(os.path.abspath(os.path.expanduser(folder))) for folder in _PROJECT_DIRS.value]
    options += [f"--gin_search_paths={parent}" for parent in dict.fromkeys(parents)]
    if _CACHE_DIRS.value:
        options.append(f"--gin.Dataset.cache_dirs=({', '.join(map(json.dumps, _CACHE_DIRS.value))},)")
    if _TFDS_DATA_DIR.value and where != "local":
        options.append(f"--env=TFDS_DATA_DIR={_TFDS_DATA_DIR.value}")
    return options


def _points(sweeps: Sequence[str]) -> Iterator[dict[str, str]]:
    """All combinations of the values of all sweeps; one that is empty without a sweep."""
    values: dict[str, list[str]] = {}
    for text in sweeps:
        name, equals, right = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise Mistake(f"--sweep={text} must be NAME=VALUE,VALUE, NAME as in a Gin file")
        if name in values:
            raise Mistake(f"--sweep={name}=... is there twice: remove one of them")
        if _is_run_folder(name):
            raise Mistake(f"--sweep={text}: each run has a folder of its own already, in --model_dir: remove it")
        if re.match(r"(log|uniform|int)\(", right):
            raise Mistake(f"--sweep={text} is a range, must be values: NAME=VALUE,VALUE")
        parts = _split(right)
        if parts == [right] and right.startswith("[") and right.endswith("]"):
            parts = _split(right[1:-1])  # as --vary of `launch sweep` has it
        if not all(parts):
            raise Mistake(f"--sweep={text} has an empty value: remove a comma")
        if twice := [part for part in parts if parts.count(part) > 1]:
            raise Mistake(f"--sweep={text}: {twice[0]} is there twice: remove one of them")
        values[name] = parts
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination))


def _split(text: str) -> list[str]:
    """The parts between commas that stand outside brackets and quotes."""
    parts, depth, quote, is_escaped = [""], 0, "", False
    for letter in text:
        if quote:
            quote = "" if letter == quote and not is_escaped else quote
            is_escaped = letter == "\\" and not is_escaped
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _is_run_folder(name: str) -> bool:
    return re.split(r"[./]", name)[-1] in ("MODEL_DIR", "model_dir")


def _name_of(option: str) -> str:
    """The name of a flag: that of --slice=v5e-8 is "slice"."""
    return option.lstrip("-").partition("=")[0]


def _near_name(stem: str, longest: int) -> str:
    """A name for a job that is like a text."""
    near = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    near = near if near[:1].isalpha() else f"job-{near}"
    return near[:longest].rstrip("-")


def _python() -> str:
    """The interpreter of the work units; raises Mistake if it has no capibara."""
    named = _PYTHON.value or sys.executable
    path = shutil.which(os.path.expanduser(named))
    if path is None:
        raise Mistake(f"--launch_python={named} must be a python: there is none")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('capibara') is None)"
    is_ours = not _PYTHON.value and importlib.util.find_spec("capibara") is not None
    if not is_ours and subprocess.run([path, "-c", code], stdin=subprocess.DEVNULL).returncode:
        raise Mistake(f"{path} has no capibara: pip install it there, or name a python that has it by --launch_python")
    return os.path.abspath(path)


def _shown(unit: WorkUnit, python: str) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in unit.environment.items()]
    return " ".join([*variables, shlex.join([python, "-m", "capibara.launch", *unit.arguments])])


def _run(units: Sequence[WorkUnit], python: str) -> int:
    """Runs the work units as an experiment; returns the exit code."""
    standard_logging.getLogger("alembic").setLevel(standard_logging.WARNING)  # of XManager's database
    codes, stopped_by = xm.run_in_asyncio_loop(_experiment)(units, python)
    for unit, code in zip(units, codes):
        print(f"work unit {unit.name}: exit code {code}", file=sys.stderr)
    return next((code for code in codes if code), 0) if stopped_by is None else 128 + stopped_by


async def _experiment(units: Sequence[WorkUnit], python: str) -> tuple[list[int], int | None]:
    """The exit codes of an experiment's work units, and the number of the signal that has stopped it."""
    codes: list[int] = []
    stop = _Stop()
    # This machine's chips belong to one run at a time.
    turns = asyncio.Semaphore(1 if _WHERE.value == "local" else len(units))
    title = _NAME.value or units[0].name.removesuffix("-1" if len(units) > 1 else "")
    try:
        async with xm_local.create_experiment(experiment_title=title) as experiment:
            print(f"experiment {experiment.experiment_id}: {title}, work units: {len(units)}", file=sys.stderr)
            [executable] = experiment.package([_packageable(python)])

            async def ended(unit: WorkUnit) -> int:
                async with turns:
                    if stop.number is not None:
                        return 128 + stop.number
                    swept = " ".join(f"{name}={value}" for name, value in unit.swept.items())
                    print(f"work unit {unit.name} starts{swept and ': '}{swept}", file=sys.stderr)
                    job = xm.Job(
                        executable,
                        xm_local.Local(),
                        name=unit.name,
                        args=list(unit.arguments),
                        env_vars=dict(unit.environment),
                    )
                    started = await experiment.add(job)
                    stop.add(started)
                    return await _exit_code(started)

            codes += await asyncio.gather(*map(ended, units))
            logging.set_verbosity(logging.FATAL)  # else each failure is logged once more, with a traceback
    except RuntimeError:  # XManager raises a failure again when it leaves the experiment
        if not any(codes):
            raise
    return codes, stop.number


def _packageable(python: str) -> xm.Packageable:
    """`capibara launch`, in place of the shell by which XManager runs it: that would keep its signals to itself.

    XManager quotes the path, which therefore cannot be `exec PYTHON`.
    """
    return xm.Packageable(
        executable_spec=xm.Binary(path=shutil.which("true")),
        executor_spec=xm_local.Local.Spec(),
        args=[xm.ShellSafeArg("&& exec"), python, "-m", "capibara.launch"],
    )


async def _exit_code(work_unit: xm.WorkUnit) -> int:
    """Waits for a work unit; returns its exit code, 128 + N if signal N ended it."""
    try:
        await work_unit.wait_until_complete()
    except xm.ExperimentUnitFailedError as error:
        found = re.search(r"code: (-?\d+)$", str(error))
        code = int(found[1]) if found else 1
        return code if code > 0 else 128 - code
    return 0


class _Stop:
    """Ends the work units when a signal arrives, and lets them save; a second one ends XManager at once.

    Attributes:
      number: of the signal that has arrived.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._started: list[xm.WorkUnit] = []
        self._loop = asyncio.get_running_loop()
        all_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._signals = [number for number in all_signals if signal.getsignal(number) is not signal.SIG_IGN]
        for number in self._signals:
            self._loop.add_signal_handler(number, self._on, number)

    def add(self, work_unit: xm.WorkUnit) -> None:
        """Takes a work unit that has just started."""
        self._started.append(work_unit)
        if self.number is not None:
            self._terminate(work_unit)

    def _on(self, number: int) -> None:
        self.number = number
        if _WHERE.value == "local":
            what = "the work units are stopped, and save first; a second signal does not wait for them"
        else:
            what = "jobs that were submitted continue: capibara launch manage watches them, launch cancel ends them"
        print(what, file=sys.stderr)
        for known in self._signals:
            self._loop.remove_signal_handler(known)
        for work_unit in self._started:
            self._terminate(work_unit)

    @staticmethod
    def _terminate(work_unit: xm.WorkUnit) -> None:
        for handle in work_unit._local_execution_handles:  # XManager's own `stop` does nothing for local jobs
            handle.terminate()


def _declare(argv: Sequence[str]) -> list[str]:
    """Declares the flags of a command line that absl does not know, --gin.NAME too; returns them as they were written.

    absl ends the process for a flag that is not declared before `main` is called.
    """
    found = []
    for argument in argv:
        name = _name_of(argument)
        is_known = name in flags.FLAGS or name.startswith("no") and name[2:] in flags.FLAGS
        if not argument.startswith("-") or name in _ABSLS or is_known and not {name, name[2:]} & _DECLARED:
            continue
        if name not in _DECLARED:
            # As a boolean flag it needs no value, and any is taken.
            flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), None, name, None, "passed on", boolean=True))
            _DECLARED.add(name)
        found.append(argument)
    return found


_DECLARED: set[str] = set()
_PASSED = _declare(sys.argv[1:])

if __name__ == "__main__":
    app.run(main)
