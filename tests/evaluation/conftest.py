"""A run folder with a model whose weights are large, so that one token stands out and equal numbers are no accident."""

from __future__ import annotations

import os

import jax
import pytest

from capibara.cli.composition.models import open_subject
from capibara.interop import gin_of
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.training import run_folder

TINY = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
SMALL_ROWS = ("Dataset.length = 64", "Plan.batch_size = 8")


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs") / "tiny")
    os.makedirs(folder)
    params = jax.tree.map(lambda x: x * 3, jax.jit(api.build(TINY).init)(jax.random.key(1)))
    run_folder.save(folder, params, gin_of.run(TINY, folder, {}))
    return folder


@pytest.fixture(scope="session")
def subject(run_dir):
    """On a mesh of all 8 devices."""
    return open_subject(run_dir, bindings=SMALL_ROWS)
