"""The length of an engine's rows determines their rotary frequencies, if RoPE depends on it."""

import jax
import jax.numpy as jnp
import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.programs import programs
from capibara.models import api
from capibara.models.api import DecoderConfig, Rope


class Built(Exception):
    """Replaces an engine's programs."""


@pytest.mark.parametrize(("scaling", "want"), [("dynamic", 24), ("linear", 48)])
def test_an_engine_says_how_long_its_rows_are(scaling, want, monkeypatch):
    rope = Rope(scaling=scaling, factor=2.0, original_length=16)
    sizes = dict(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=32, dtype="float32")
    model = api.build(DecoderConfig(**sizes, rope=rope, max_length=48))
    seen = []

    def build(model, *rest):
        seen.append(model.config.max_length)
        raise Built

    monkeypatch.setattr(programs, "build", build)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), model.abstract_params)
    with pytest.raises(Built):
        Engine(model, params, ByteVocabulary(), 24)
    assert seen == [want]
