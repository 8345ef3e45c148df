"""Everything that proves a release, one check after the other, and one table: `make check-all`.

    python tests/check_all.py [--only=test,heavy,peers,site,wheel] [--pythons=python3.11,python3.12,python3.13]
        [--peers=transformers=PATH/bin/python,t5x=PATH/bin/python] [--parts=8] [--json=OUT]

`test` is `make test` by each Python, `heavy` the long half in parts, `peers` `make test-peer` for each peer that is named,
`site` the documentation, `wheel` the wheel in a clean environment of each Python: it is installed with its dependencies,
imports capibara, lists the verbs and trains a tiny model for two steps. Some hours on two cores. Exits with 1 if a check
failed; the output of each check is in build/check_all.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
LOGS = CHECKOUT / "build" / "check_all"
KINDS = ("test", "heavy", "peers", "site", "wheel")
TRAIN = "--gin_file=models/tiny.gin --gin_file=tasks/stdlib.gin --gin_file=runs/pretrain.gin --emulate=2 --gin.TRAIN_STEPS=2"


class Check(NamedTuple):
    """One row of the table: a name, and the commands that must all succeed, in this order."""

    name: str
    commands: list[list[str]]


class Result(NamedTuple):
    """What became of a check; `counts` are pytest's, "" without tests."""

    name: str
    passed: bool
    seconds: float
    counts: str


def checks(options: argparse.Namespace, folder: pathlib.Path) -> Iterator[Check]:
    """The chosen checks; `folder` is for the environments of the wheel."""
    if "test" in options.only:
        for python in options.pythons:
            yield Check(f"make test, {python}", [["make", "test", f"PYTHON={python}"]])
    if "heavy" in options.only:
        for part in range(1, options.parts + 1):
            yield Check(
                f"make test-heavy {part}/{options.parts}", [["make", "test-heavy", f"PART={part}/{options.parts}"]]
            )
    if "peers" in options.only:
        for name, python in options.peers.items():
            yield Check(f"make test-peer {name}", [["make", "test-peer", f"PEER={name}", f"PEER_PYTHON={python}"]])
    if "site" in options.only:
        yield Check("make site", [["make", "site"]])
    if "wheel" in options.only:
        for python in options.pythons:
            yield Check(f"wheel, {python}", wheel_commands(python, folder / _as_name(python)))


def wheel_commands(python: str, folder: pathlib.Path) -> list[list[str]]:
    """Builds the wheel, and installs and runs it in an environment of its own, outside the checkout."""
    installed = str(folder / "env" / "bin" / "python")
    train = [installed, "-m", "capibara.train", *TRAIN.split(), f"--gin.MODEL_DIR={folder / 'run'}"]
    return [
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        [python, "-m", "venv", str(folder / "env")],
        ["sh", "-c", f"'{installed}' -m pip install --quiet '{folder}'/*.whl"],
        ["env", "-C", str(folder), installed, "-c", "import capibara; print(capibara.__file__)"],
        ["env", "-C", str(folder), installed, "-m", "capibara", "--help"],
        ["env", "-C", str(folder), *train],
    ]


def run(check: Check) -> Result:
    """Runs the commands until one fails; their output goes to a file of the check's name."""
    path = LOGS / (_as_name(check.name) + ".log")
    begin_s = time.monotonic()
    with open(path, "w", encoding="utf-8") as log:
        passed = all(
            subprocess.run(command, cwd=CHECKOUT, stdout=log, stderr=subprocess.STDOUT).returncode == 0
            for command in check.commands
        )
    counts = re.findall(
        r"^=*\s*(\d+ (?:passed|failed|skipped|error)[^=\n]*?) in ", path.read_text(errors="replace"), re.M
    )
    return Result(check.name, passed, time.monotonic() - begin_s, counts[-1] if counts else "")


def _as_name(text: str) -> str:
    """A name of a file for a path or a sentence."""
    return re.sub(r"[^\w.]+", "_", text)


def row(result: Result) -> str:
    """The result as a line of the table."""
    return f"{result.name:32} {'passed' if result.passed else 'FAILED':8} {result.seconds:8.0f} s  {result.counts}"


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; a wrong one ends the process with one line and code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of checks, separated by commas")
    parser.add_argument("--pythons", default="python3.11,python3.12,python3.13")
    parser.add_argument("--peers", default="", help="NAME=PATH of each peer's python, separated by commas")
    parser.add_argument("--parts", type=int, default=8, help="of the long half")
    parser.add_argument("--json", help="a file for the table")
    options = parser.parse_args(argv)
    options.only, options.pythons = options.only.split(","), options.pythons.split(",")
    if unknown := [kind for kind in options.only if kind not in KINDS]:
        parser.error(f"--only has {unknown[0]!r}, must be of {', '.join(KINDS)}")
    for python in options.pythons if {"test", "wheel"} & {*options.only} else ():
        if shutil.which(python) is None:
            parser.error(f"--pythons has {python!r}, which is not installed: name those that are")
    options.peers = dict(entry.partition("=")[::2] for entry in filter(None, options.peers.split(",")))
    if "heavy" in options.only and options.parts < 1:
        parser.error(f"--parts is {options.parts}, must be at least 1")
    if options.only == ["peers"] and not options.peers:
        parser.error("--only is peers, and --peers names none: nothing would be checked")
    for name, python in options.peers.items():
        if shutil.which(python) is None:
            parser.error(f"--peers has {name}={python!r}, must be the python of an environment: see make help")
    return options


def main() -> int:
    options = parsed()
    LOGS.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for check in checks(options, pathlib.Path(folder)):
            results.append(run(check))
            print(row(results[-1]), flush=True)
            if options.json:  # after each check: the rest takes hours
                pathlib.Path(options.json).write_text(json.dumps([result._asdict() for result in results], indent=1))
    return int(not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
