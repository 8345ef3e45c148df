"""One GPU, and a tiny run as a user has it; where JAX has no GPU all of these are skipped. `make test-peer PEER=gpu` uses one."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

# What runs in this process leaves most of the memory to the processes that the tests start.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".1")

import jax
import pytest

_INTEGRATION = pathlib.Path(__file__).resolve().parents[1] / "integration" / "conftest.py"
_USERS = {"JAX_PLATFORMS": "", "XLA_FLAGS": "", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".75"}  # what JAX has by default


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The GPU."""
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here: make test-peer PEER=gpu PEER_PYTHON=PATH runs these on one")
    return jax.local_devices()[0]


@pytest.fixture(scope="session")
def users_environment():
    """What a user's process has in its environment where the tests have something else."""
    return dict(_USERS)


@pytest.fixture(scope="session")
def shell(gpu, tmp_path_factory):
    """tests/integration's Shell."""
    spec = importlib.util.spec_from_file_location("of_integration_conftest_gpu", _INTEGRATION)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Shell(tmp_path_factory.mktemp("work"))
