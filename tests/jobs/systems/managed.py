"""One job under a manager that is quick, for the systems whose jobs run on this machine."""

import dataclasses
import time

from capibara.jobs.managing import spec_file
from capibara.jobs.managing.lifecycle import Rules
from capibara.jobs.managing.manager import Manager, Times
from capibara.jobs.managing.records import Record, Records
from capibara.jobs.spec import Attempt, Bundle

RULES = Rules(settle_s=0.1, vanish_s=0.1, first_s=0.01, longest_s=0.02)


def until(found, longest_s=300.0):
    """What a function returns as soon as it is true."""
    until_s = time.monotonic() + longest_s
    while not (value := found()):
        assert time.monotonic() < until_s, "that did not come"
        time.sleep(0.05)
    return value


class Managed:
    """A job on a place, with its files and a database in a folder; use it in a `with` block."""

    def __init__(self, folder, place, spec):
        self.folder, self.place = folder, place
        bundle = Bundle(url=f"{folder}/jobs/{spec.name}/0123456789abcdef", files=spec.bundle.files)
        self.spec = spec_file.signed(place, dataclasses.replace(spec, bundle=bundle))
        spec_file.write(place, self.spec)
        self.records = Records(folder / "jobs.sqlite")
        text = spec_file.text_of(place, self.spec)
        launch = Attempt(launch=spec.attempt.launch)
        self.records.add(Record(name=spec.name, text=text, attempt=launch, launched_s=time.time()))

    def __enter__(self):
        self.manager = Manager(
            self.records, rules=RULES, times=Times(poll_s=0.05, reports_s=0.0), say=lambda line: None
        )
        self.manager.__enter__()
        return self

    def __exit__(self, *_):
        self.manager.__exit__()
        self.records.close()

    def lose(self):
        """Its manager and the database are lost."""
        self.__exit__()
        (self.folder / "jobs.sqlite").unlink()
        self.records = Records(self.folder / "jobs.sqlite")

    def comes_to(self, state, number=0):
        """Its record, once it is in a state of an attempt."""

        def look():
            (record,) = self.manager.look()
            return (record.state, record.attempt.number) == (state, number) and record

        return until(look, 60)

    def ends(self):
        """Its record, once it has ended."""
        (record,) = self.manager.run(lambda found: found[0].state.is_final)
        return record
