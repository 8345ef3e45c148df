"""Texts that are read beside an engine: scores over the ids of the vocabulary alone."""

from __future__ import annotations

import jax
import numpy as np

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine
from capibara.models import api
from capibara.models.api import DecoderConfig


def test_scores_are_over_the_ids_of_the_vocabulary():
    vocabulary = ByteVocabulary()
    sizes = dict(vocab_size=vocabulary.size + 128, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
    model = api.build(DecoderConfig(**sizes))
    engine = Engine(model, jax.jit(model.init)(jax.random.key(0)), vocabulary, 32)
    scores = engine.reader.score([5, 6, 7], vocabulary.size)
    np.testing.assert_allclose(np.exp(scores.their_log_probabilities).sum(axis=-1), 1, rtol=0, atol=1e-5)
    assert scores.likeliest.max() < vocabulary.size
