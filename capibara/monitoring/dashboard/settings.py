"""Options of the dashboard that Gin sets."""

from __future__ import annotations

import dataclasses

from capibara.config import configurable
from capibara.core.types import UserError


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DashboardConfig:
    """Options of the dashboard.

    Attributes:
      port: of a dashboard that a run starts (Trainer.dashboard); the next ones are tried if it is in use.
      spike_sigmas: deviations of a loss above the mean of the last `spike_window` logged ones that count as a spike.
      spike_window: logged losses.
      low_goodput: goodput below which a run is reported, once it has run for 15 minutes.
      disk_free_gib: free space of a run folder's disk below which it is reported.
      stall_s: seconds without any line in metrics.jsonl, at least, after which a run counts as stalled.
      stall_train_s: the same for training lines.
      webhooks: URLs that alerts are sent to; those with a secret are better set in CAPIBARA_DASHBOARD_WEBHOOKS.
      allowed_hosts: names in Host that are accepted besides this machine's, such as a proxy's.
      memory_mib: memory for metrics. Of runs that nobody looks at few rows are kept then; a look reads all again.
      requests_per_s: most requests of one address in a second.
    """

    port: int = 8080
    spike_sigmas: float = 6.0
    spike_window: int = 128
    low_goodput: float = 0.5
    disk_free_gib: float = 10.0
    stall_s: float = 120.0
    stall_train_s: float = 900.0
    webhooks: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    memory_mib: int = 2048
    requests_per_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise UserError(f"DashboardConfig.port is {self.port}, must be from 0 to 65535 (0: any free one): try 8080")
        for name in ("spike_sigmas", "spike_window", "stall_s", "stall_train_s", "memory_mib", "requests_per_s"):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"DashboardConfig.{name} is {getattr(self, name)}, must be above 0: try {getattr(type(self), name)}"
                )
        if not 0 <= self.low_goodput <= 1:
            raise UserError(f"DashboardConfig.low_goodput is {self.low_goodput}, must be from 0 to 1: try 0.5")
        if not self.disk_free_gib >= 0:
            raise UserError(f"DashboardConfig.disk_free_gib is {self.disk_free_gib}, must be at least 0: try 10")
