"""Runs a verb here or on a slice: `python -m capibara.launch local -- train --gin_file=F`, `capibara launch gke F`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from capibara.core.fields import did_you_mean
from capibara.core.types import UserError

_DESCRIPTION = """usage: capibara launch WHERE ...

Run a verb on this machine, or a run's Gin file on a slice.

  local    on this machine, in one process or in several; restarts it after a crash, a hang or a kill
  gce      on TPU VMs, by a queued resource
  gke      on Google Kubernetes Engine, or any Kubernetes: a JobSet on TPUs, a Job on GPUs and CPUs
  vertex   on Vertex AI, by a custom job
  slurm    on a cluster with Slurm, by a batch script

examples:
  python -m capibara.launch local --restarts=5 -- train --gin_file=quickstart.gin --emulate=8
  python -m capibara.launch gke base_v5e64.gin --storage=gs://bucket --image=IMAGE --dry-run

`capibara launch WHERE --help` lists the flags of each."""

_LAUNCHED = ("gce", "gke", "vertex", "slurm")
_MODULES = {"local": "local", "staged": "staged", **dict.fromkeys(_LAUNCHED, "job")}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `launch WHERE`; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    where = argv[0] if argv else "--help"
    if where in ("-h", "--help"):
        print(_DESCRIPTION)
        return 0
    if where not in _MODULES:
        known = ["local", *_LAUNCHED]
        raise UserError(f"launch cannot run on {where!r}{did_you_mean(where, known, 'places')} (see --help)")
    module = importlib.import_module(f"capibara.cli.launching.{_MODULES[where]}")
    code: int = module.main(argv)
    return code
