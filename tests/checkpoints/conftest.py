"""The tiny run of tests/training."""

from __future__ import annotations

import importlib.util
import pathlib
import sys


def _training():
    file = pathlib.Path(__file__).parents[1] / "training" / "conftest.py"
    spec = importlib.util.spec_from_file_location("of_training_conftest", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


training = _training()
corpus, make_trainer, train = training.corpus, training.make_trainer, training.train  # fixtures
