"""Predicted step times against published ones, which check the assumed efficiencies of chips."""

import argparse
import importlib.util
import pathlib
import statistics
import sys

import pytest

from capibara.planner.model import memory

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def benchmark():
    yield from loaded("planner")


@pytest.fixture(scope="module")
def time_model(benchmark):
    yield from loaded("time_model")


def test_predictions_are_near_published_times(benchmark):
    """Those that the efficiencies were fitted to, and all others."""
    errors = {}
    for name, row in benchmark.TIME.items():
        seconds, predicted = benchmark.published(row)
        errors[name] = abs(predicted.step_s / seconds - 1)
    others = [error for name, error in errors.items() if name not in benchmark.FITTED]
    assert len(others) == len(errors) - len(benchmark.FITTED) == 31
    assert statistics.median(others) < 0.05 and max(errors.values()) < 0.15, errors


def test_predictions_are_near_the_compilers_cycles_of_small_models(time_model):
    """Kernels and collectives left out; recorded, so that nothing is compiled here."""
    found = time_model.cycles(argparse.Namespace(points=None, compile=False))
    errors = {name: abs(result["error"]) for name, result in found.items()}
    assert len(errors) >= 14 and statistics.median(errors.values()) < 0.03, errors
    assert max(errors[name] for name in errors if name not in time_model.TEST) < 0.07, errors
    assert max(errors[name] for name in time_model.TEST) < 0.24, errors


def test_predicted_peaks_are_near_those_that_the_compiler_said(benchmark):
    """Recorded, so that nothing is compiled here."""
    errors = {}
    for name, point in benchmark.MEMORY.items():
        if point.compiled_gib is not None:
            case = benchmark.case(point)
            chip = case.slice_.chip
            predicted = memory.memory(case.work, case.choice, chip, most_bytes=chip.device_usable_hbm_bytes)
            errors[name] = predicted.peak / 2**30 / point.compiled_gib - 1
    assert len(errors) >= 6 and -0.03 < min(errors.values()) and max(errors.values()) < 0.06, errors
