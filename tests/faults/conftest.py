"""The table of faults: after a run of these tests it says what became of each."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections import defaultdict

import pytest


def _load(path: str):
    """A module of these tests by its path: they are no package."""
    file = pathlib.Path(__file__).parent / path
    spec = importlib.util.spec_from_file_location(f"of_{file.parent.name}_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix = _load("matrix.py")
_training, _integration = _load("../training/conftest.py"), _load("../integration/conftest.py")
corpus, make_trainer, train = _training.corpus, _training.make_trainer, _training.train  # fixtures
shell, here, made_here = _integration.shell, _integration.here, _integration.made_here

_outcomes: dict[int, list[tuple[str, str]]] = defaultdict(list)


@pytest.fixture(autouse=True)
def _fault(request, record_property):
    """Tells the report which faults a test injects, also from a worker of pytest-xdist."""
    for marker in request.node.iter_markers("fault"):
        for number in marker.args:
            assert number in matrix.FAULTS, f"no fault {number}"
            record_property("fault", number)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        for name, number in report.user_properties:
            if name == "fault":
                _outcomes[number].append((report.outcome, reason))


def pytest_terminal_summary(terminalreporter):
    if not _outcomes:
        return
    terminalreporter.section("faults")
    for number, (fault, _) in matrix.FAULTS.items():
        outcomes = [outcome for outcome, _ in _outcomes[number]]
        said = ", ".join(
            f"{outcomes.count(word)} {word}" for word in ("passed", "failed", "skipped") if word in outcomes
        )
        reasons = "; ".join(sorted({reason for _, reason in _outcomes[number] if reason}))
        terminalreporter.write_line(f"{number:3}  {fault:52} {said or '-'}{f' ({reasons})' if reasons else ''}")
    survived = sum(all(o == "passed" for o, _ in _outcomes[n]) and bool(_outcomes[n]) for n in matrix.FAULTS)
    terminalreporter.write_line(f"{survived} of {len(matrix.FAULTS)} faults were injected and survived in this run")
