"""Launches runs and manages them: `python -m capibara.launch local -- train --gin_file=F`, `capibara launch gke F`."""

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
  ssh      on hosts with SSH
  xmanager as an experiment of XManager, on this machine or as jobs of the above
  sweep    on any of these, many times with different bindings: launch sweep WHERE ...

  list     the jobs that were launched from here
  status   one of them, with its history
  logs     its log
  cancel   ends it
  resume   runs one again that has ended
  manage   replaces what is preempted, fails or hangs
  recover  finds jobs by their labels, where the database is lost

examples:
  python -m capibara.launch local --restarts=5 -- train --gin_file=quickstart.gin --emulate=8
  python -m capibara.launch gke base_v5e64.gin --storage=gs://bucket --image=IMAGE --dry-run
  python -m capibara.launch list

`capibara launch WHERE --help` lists the flags of each."""

_LAUNCHED = ("gce", "gke", "vertex", "slurm", "ssh")
_MANAGED = ("list", "status", "logs", "cancel", "resume", "manage")
MODULES = {
    "local": "local",
    "recover": "recover",
    "staged": "staged",
    "sweep": "sweep",
    "xmanager": "xmanager",
    **dict.fromkeys(_LAUNCHED, "job"),
    **dict.fromkeys(_MANAGED, "managed"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `launch WHERE`; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    where = argv[0] if argv else "--help"
    if where in ("-h", "--help"):
        print(_DESCRIPTION)
        return 0
    if where not in MODULES:
        known = ["local", "sweep", "xmanager", *_LAUNCHED, *_MANAGED, "recover"]
        raise UserError(f"launch has no {where!r}{did_you_mean(where, known, 'words')} (see --help)")
    module = importlib.import_module(f"capibara.cli.launching.{MODULES[where]}")
    code: int = module.main(argv)
    return code
