"""Slurm: a batch script for `sbatch`, whose job is put back into the queue when its time or its nodes end."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import ClassVar

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend, Form, Rendering, command, no_tpu
from capibara.jobs.secrets import Source
from capibara.jobs.spec import JobSpec

_MOST_MINUTES = 365 * 24 * 60
# The exit codes after which the job is to run again: hung or to be tried again, and stopped by SIGTERM after a checkpoint.
_AGAIN = (75, 143)
_END_S = 30  # for the launcher to end after the run
_EARLY_S = 60  # that Slurm may send its signal before it is due; source: slurm.schedmd.com/sbatch.html, --signal
_LONGEST_GRACE_S = 65_535  # of sbatch --signal
_WORD = re.compile(r"[A-Za-z0-9_,.-]+")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(Backend):
    """A cluster with Slurm.

    Attributes:
      partition: of the cluster; None: its default.
      account: that pays; None: the user's default.
      qos: quality of service; None: the default.
      python: the interpreter on the nodes that has capibara, in an environment that all of them see.
      minutes: the most that the job runs before it is put back into the queue; None: the partition's limit.
      cpus: of a node, for JAX and the input pipeline; None: the cluster's default.
    """

    name: ClassVar[str] = "slurm"
    secret_sources: ClassVar[frozenset[Source]] = frozenset({Source.ENVIRONMENT})
    uses_buckets: ClassVar[bool] = False

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    python: str = "python"
    minutes: int | None = None
    cpus: int | None = None

    def __post_init__(self) -> None:
        for name in ("partition", "account", "qos"):
            _check_word(f"--{name}", getattr(self, name))
        if self.minutes is not None and not 1 <= self.minutes <= _MOST_MINUTES:
            raise UserError(f"--minutes is {self.minutes}, must be from 1 to {_MOST_MINUTES}")
        if self.cpus is not None and self.cpus < 1:
            raise UserError(f"--cpus is {self.cpus}, must be at least 1")

    def check(self, spec: JobSpec) -> None:
        no_tpu(self, spec)
        if spec.image is not None or spec.bundle.wheel is not None:
            flag = "--image" if spec.image is not None else "--wheel"
            raise UserError(
                f"{flag} has no effect with launch slurm, which runs --python={self.python} of the nodes: omit it"
            )
        for secret in spec.secrets:
            if secret.source not in self.secret_sources:
                raise UserError(
                    f"--secret={secret.variable}=... is in {secret.source}, which launch slurm cannot read: take env:VARIABLE"
                )
        if not self.python.isprintable() or not self.python or self.python.startswith("-"):
            raise UserError(f"--python={self.python!r} must be the path of a python, or its name")
        _check_word("--priority", spec.priority)
        if not 30 <= spec.grace_s + _END_S <= _LONGEST_GRACE_S:
            raise UserError(f"--grace is {spec.grace_s}, must be at most {_LONGEST_GRACE_S - _END_S} with launch slurm")
        lead_s, minutes = spec.grace_s + _END_S + _EARLY_S, self._minutes(spec)
        if minutes is not None and 60 * minutes <= lead_s:
            flag, mend = f"--minutes={self.minutes}", "give more minutes"
            if minutes != self.minutes:
                flag, mend = f"--budget_usd={spec.budget_usd:g} leaves {minutes} min, which", "give a larger budget"
            raise UserError(
                f"{flag} must be longer than {lead_s} s: Slurm sends SIGTERM --grace={spec.grace_s} and {_END_S} s before the "
                f"end, and up to {_EARLY_S} s earlier: {mend}, or a shorter --grace"
            )
        if spec.capacity != "on_demand":
            raise UserError(f"--capacity={spec.capacity} has no effect with launch slurm: use --partition or --qos")

    def render(self, spec: JobSpec) -> Rendering:
        self.check(spec)
        return Rendering(form=Form.SCRIPT, script="\n".join([*self._head(spec), "", *self._body(spec), ""]))

    def _head(self, spec: JobSpec) -> list[str]:
        slice_ = spec.slice_
        options = {
            "job-name": spec.name,
            "nodes": slice_.hosts,
            "ntasks-per-node": 1,
            "gpus-per-node": slice_.chips_per_host if slice_.machine is not None else None,
            "cpus-per-task": self.cpus,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos or spec.priority,
            "time": self._minutes(spec),
            "comment": ",".join(f"{key}={value}" for key, value in spec.all_labels.items()),
            "output": f"{spec.name}-%j.log",
            "open-mode": "append",
            # To the script alone, which passes it on to the step: without B: Slurm would kill the step's processes.
            "signal": f"B:TERM@{spec.grace_s + _END_S}",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
        # Slurm's own requeue, after a node has failed, would count the budget from zero.
        return ["#!/bin/bash", *lines, f"#SBATCH --{'no-' * (spec.budget_usd is not None)}requeue"]

    def _minutes(self, spec: JobSpec) -> int | None:
        if spec.left_s is None:
            return self.minutes
        return min(self.minutes or _MOST_MINUTES, max(1, round(spec.left_s) // 60))  # 0 is no limit

    def _body(self, spec: JobSpec) -> list[str]:
        # JAX would give one device to each task of Slurm: a node's only task has all of them.
        devices = ",".join(map(str, range(spec.slice_.chips_per_host)))
        exported = [f"export JAX_LOCAL_DEVICE_IDS={devices}"] if spec.slice_.machine is not None else []
        exported += [f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()]
        inherited = [
            f'export {secret.variable}="${{{secret.name}:?must be set where sbatch is called}}"'
            for secret in spec.secrets
        ]
        run = shlex.join(command(spec, python=self.python))
        cpus = (
            f"--cpus-per-task={self.cpus} " if self.cpus is not None else ""
        )  # srun does not take it over from sbatch
        return [
            "set -uo pipefail",
            *exported,
            *inherited,
            "",
            "# JAX finds the other nodes by Slurm's variables. The step gets SIGTERM before the job's time ends.",
            "# To the processes of the step: srun itself would kill them when it gets the signal.",
            "trap 'capibara_signalled=1; scancel --signal=TERM \"$SLURM_JOB_ID\"' TERM",
            "# Its exit code comes through a pipe: that of `wait` is lost if a signal comes at the same moment.",
            "exec 4>&1",
            f"exec 3< <(trap : TERM; srun --kill-on-bad-exit=0 {cpus}{run} >&4 4>&- < /dev/null; echo $?)",
            "capibara_step=$!",
            "# A signal ends `wait`; then the step saves a checkpoint, and is waited for again.",
            'while capibara_signalled=""; wait "$capibara_step"; [ -n "$capibara_signalled" ]; do :; done',
            "read -r capibara_code <&3 || capibara_code=1",
            *([] if spec.budget_usd is not None else _requeued(spec)),
            'exit "$capibara_code"',
        ]


def _check_word(flag: str, value: str | None) -> None:
    if value is not None and not _WORD.fullmatch(value):
        raise UserError(f"{flag}={value!r} must have letters, digits, -, . and _ only")


def _requeued(spec: JobSpec) -> list[str]:
    again = " || ".join(f"capibara_code == {code}" for code in _AGAIN)
    return [
        f"if (( {again} )) && (( ${{SLURM_RESTART_COUNT:-0}} < {spec.restarts} )); then",
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]
