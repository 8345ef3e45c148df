"""Connects to the system of a back end."""

from __future__ import annotations

import importlib

from capibara.jobs.backends.backend import Backend
from capibara.jobs.systems.system import System


def connect(backend: Backend) -> System:
    """The system of a back end, in the module of its name.

    Raises:
      UserError: its client is not installed, or this machine has no credentials for it.
    """
    opened = importlib.import_module(f"capibara.jobs.systems.{backend.name}").connect(backend)
    assert isinstance(opened, System)
    return opened
