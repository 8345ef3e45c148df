"""What a manager has seen of the reports of a job's hosts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from capibara.core.types import TryAgain
from capibara.jobs import reports
from capibara.jobs.spec import JobSpec


@dataclasses.dataclass
class Watch:
    """What this manager has seen of the reports of a job's present attempt.

    The hosts' clocks are not compared with ours: a report is as old as the time since it last changed here.
    """

    attempt: tuple[str, int] = ("", 0)
    read_s: float = -math.inf
    by_host: Mapping[str, reports.Report] = dataclasses.field(default_factory=dict)
    changed_s: dict[str, float] = dataclasses.field(default_factory=dict)
    hosts: int = 0
    clashes: int = 0
    warning: str = ""

    def say_once(self, text: str, say: Callable[[str], None]) -> None:
        """Says what is not what it has said last."""
        if text != self.warning:
            say(text)
        self.warning = text

    def read(self, spec: JobSpec, now_s: float, say: Callable[[str], None]) -> None:
        """Reads the reports; those that cannot be read are as they were, and nothing is silent meanwhile."""
        self._begin(spec)
        try:
            result = reports.read(spec.reports)
        except TryAgain as error:
            self.say_once(f"job {spec.name}: {error}: tried again", say)
            self.changed_s, self.read_s = dict.fromkeys(self.changed_s, now_s), now_s
            return
        for name, report in result.items():
            if report != self.by_host.get(name):
                self.changed_s[name] = now_s
        self.by_host, self.read_s, self.hosts = result, now_s, spec.slice_.hosts

    def _begin(self, spec: JobSpec) -> None:
        attempt = (spec.attempt.launch, spec.attempt.number)
        if attempt != self.attempt:
            self.attempt, self.by_host, self.changed_s, self.read_s = attempt, {}, {}, -math.inf
            self.clashes = 0

    def outcome_of(self, spec: JobSpec) -> reports.Outcome:
        """What the reports amount to."""
        self._begin(spec)
        return reports.outcome(self.by_host, spec.slice_.hosts)

    def silent_s(self, now_s: float) -> float:
        """The seconds for which the host that is silent for longest has not reported.

        A system that starts hosts again elsewhere leaves files of earlier ones: as many files count as there are hosts.
        """
        newest = sorted(self.by_host, key=lambda name: self.changed_s[name], reverse=True)[: self.hosts]
        running = [self.changed_s[name] for name in newest if not self.by_host[name].is_final]
        return now_s - min(running) if running else 0.0

    @property
    def missing(self) -> int:
        """How many hosts have not reported yet."""
        return max(0, self.hosts - len(self.by_host))
