"""Scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def load_benchmark():
    """Loads a script by its name; what it does to sys.path and the environment is undone."""

    def load(name):
        path, environment = list(sys.path), dict(os.environ)
        spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path[:] = path
            os.environ.clear()
            os.environ.update(environment)
        return module

    return load
