"""Predicted step times against published ones, which check the assumed efficiencies of chips."""

import importlib.util
import pathlib
import sys

import pytest

FILE = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "planner.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("of_published_times", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_predictions_are_near_published_times(benchmark):
    """Those that the efficiencies were fitted to, and all others."""
    errors = {}
    for name, row in benchmark.TIME.items():
        seconds, predicted = benchmark.published(row)
        errors[row.use, name] = predicted.step_s / seconds - 1
    fitted = {name: error for (use, name), error in errors.items() if use == "calibrate"}
    assert len(fitted) == 4 and max(map(abs, fitted.values())) < 0.01, fitted
    assert max(map(abs, errors.values())) < 0.3, errors
