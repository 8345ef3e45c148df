"""A system in memory that does what a test says, and counts."""

import threading

from capibara.jobs.systems.system import Busy, Exists, Phase, Resource, System


class Cloud(System):
    """Resources by name, as a cluster has them; `faults` are raised by the next calls, one each."""

    def __init__(self, **attributes):
        self.there, self.calls, self.faults, self.lock = {}, [], [], threading.Lock()
        self.phase = Phase.WAITING  # of what is made
        self.lasts = False  # what is deleted stays in DELETING
        self.refuses = None  # raised by submit
        for name, value in attributes.items():
            setattr(self, name, value)

    def _called(self, what):
        with self.lock:
            self.calls.append(what)
            fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault

    def submit(self, spec):
        self._called(("submit", spec.name, spec.attempt.number))
        if self.refuses is not None:
            raise self.refuses
        if spec.name in self.there:
            raise Exists(spec.name)
        self.there[spec.name] = Resource(id=spec.name, labels=spec.all_labels, phase=self.phase)

    def resources(self):
        self._called("resources")
        return [one for one in self.there.values() if one.labels]

    def delete(self, resource):
        self._called(("delete", resource.id))
        self.there.pop(resource.id, None)

    def log(self, spec, resource):
        yield f"log of {resource.id}"

    def close(self):
        self.calls.append("close")

    def become(self, name, phase, **fields):
        """Puts a resource into a phase."""
        old = self.there[name]
        self.there[name] = Resource(id=old.id, labels=old.labels, phase=phase, **fields)

    def submitted(self):
        """What was submitted: (name, attempt), in order."""
        return [call[1:] for call in self.calls if call[0] == "submit"]


__all__ = ["Busy", "Cloud"]
