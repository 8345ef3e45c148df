"""The back ends by name."""

from __future__ import annotations

import importlib

from capibara.jobs.backends.backend import Backend

# Name -> class, in the module of that name.
NAMES = {"gce": "Gce", "gke": "Gke", "slurm": "Slurm", "ssh": "Ssh", "vertex": "Vertex"}


def find(name: str) -> type[Backend]:
    """The class of a back end."""
    result = getattr(importlib.import_module(f"capibara.jobs.backends.{name}"), NAMES[name])
    assert issubclass(result, Backend)
    return result
