"""A small decoder of bytes, documents, and an index of them."""

from __future__ import annotations

import json
import os

import jax
import numpy as np
import pytest

from capibara.cli.composition import retrieving
from capibara.inference.engine.reading import Pooling
from capibara.interop import gin_of
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.retrieval import build
from capibara.retrieval.settings import IndexPreparation
from capibara.training import run_folder

TINY = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
WORDS = "river grass swims eats sun water bank night sleeps group call rodent web foot leaf bark pup".split()
SETTINGS = IndexPreparation(chunk_tokens=64, overlap=8, queries=100, recall=0.9, ms=1000.0)


def save_run(folder, seed: int) -> str:
    os.makedirs(folder)
    params = jax.tree.map(lambda x: x * 3, jax.jit(api.build(TINY).init)(jax.random.key(seed)))
    run_folder.save(str(folder), params, gin_of.run(TINY, str(folder), {}))
    return str(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return save_run(tmp_path_factory.mktemp("retrieval") / "model", 0)


@pytest.fixture(scope="session")
def embedder(model):
    return retrieving.embedder(model, Pooling.MEAN)


@pytest.fixture(scope="session")
def documents(tmp_path_factory) -> str:
    """400 documents of up to 40 words, each with a number that no other has."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    lines = (f"number {i}: " + " ".join(rng.choice(WORDS, int(rng.integers(3, 40)))) for i in range(400))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, documents, embedder) -> str:
    """An index of the documents."""
    out = str(tmp_path_factory.mktemp("indices") / "index")
    build.prepare([documents], out, SETTINGS, embedder, lambda topic, detail: None)
    return out
