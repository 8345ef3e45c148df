"""The systems in which jobs run, as their own clients reach them: one module for each back end."""

from capibara.jobs.systems.connection import connect

__all__ = ["connect"]
