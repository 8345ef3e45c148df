"""Where jobs run: each back end renders a JobSpec as what its system takes."""

from capibara.jobs.backends.names import NAMES, find

__all__ = ["NAMES", "find"]
