"""Launches a run as an XManager experiment: `python -m capibara.launch xmanager RUN.gin --where=gke`."""

from __future__ import annotations

import itertools
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from capibara.core.types import UserError

_DESCRIPTION = """usage: capibara launch xmanager RUN.gin ... [--where=WHERE] [--flag=value ...] [--dry-run]

Run Gin files as an experiment of XManager, by launch/xm_launch.py: on this machine, or as jobs on slices.

  --where=WHERE     local (the default), gce, gke, vertex, slurm, ssh
  --sweep=NAME=VALUE,VALUE
                    a work unit for each value; repeatable
  --dry-run         print each work unit's command, and what it would submit; needs no XManager

All other flags are those of `capibara launch WHERE` and of the verb, written --flag=value. docs/xmanager.md has the rest.

example:
  python -m capibara.launch xmanager quickstart.gin --emulate=8"""

_SCRIPT = "xm_launch.py"


def main(argv: Sequence[str]) -> int:
    """Runs the experiment, or shows it; returns the exit code."""
    if not argv[1:] or {"-h", "--help"} & {*argv[1:]}:
        print(_DESCRIPTION)
        return 0
    files = [*itertools.takewhile(lambda argument: not argument.startswith("-"), argv[1:])]
    rest = argv[1 + len(files) :]
    flags = [*(f"--gin_file={file}" for file in files), *(flag for flag in rest if flag not in _DRY)]
    if len(flags) < len(files) + len(rest):
        return _show(flags)
    launcher = pathlib.Path(sys.executable).with_name("xmanager")
    xmanager = str(launcher) if launcher.exists() else shutil.which("xmanager")
    if xmanager is None:
        raise UserError(
            "launch xmanager needs XManager: pip install xmanager==0.8.5.post1 in an environment that has capibara, too"
        )
    os.execv(xmanager, [xmanager, "launch", str(_script()), "--", *flags])


_DRY = ("--dry-run", "--dry_run")


def _script() -> pathlib.Path:
    """The script; a wheel has it inside the package."""
    package = pathlib.Path(__file__).resolve().parents[2]
    inside = package / "launch_files" / _SCRIPT
    return inside if inside.exists() else package.parent / "launch" / _SCRIPT


def _show(flags: Sequence[str]) -> int:
    """Prints each work unit's command, and what it would submit."""
    shown = subprocess.run(
        [sys.executable, str(_script()), "--print_commands", *flags],
        stdout=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
    )
    if shown.returncode:
        return shown.returncode
    for line in shown.stdout.splitlines():
        print(f"# {line}", flush=True)
        command = shlex.split(line)
        end = command.index("--") if "--" in command else len(command)
        code = subprocess.run(["env", *command[:end], "--dry-run", *command[end:]]).returncode
        if code:
            return code
    return 0
