"""A teacher's distributions: in the order of the batch, whatever the mesh divides."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import capibara as cb
from capibara import sharding
from capibara.models import api
from capibara.strategies.distillation.teacher import make_teacher

MODEL = cb.DecoderConfig(vocab_size=16, embed_dim=8, num_layers=1, num_heads=2, mlp_dim=16, dtype="float32")


@pytest.mark.parametrize("context", [1, 2])
def test_log_probabilities_stand_at_their_tokens(context):
    """Also where a context axis has the positions in another order."""
    model, draw = api.build(MODEL), np.random.default_rng(0)
    params = model.init(jax.random.key(0))
    batch = {name: draw.integers(0, 16, (2, 32), np.int32) for name in ("tokens", "targets")}
    batch |= {"segment_ids": np.ones((2, 32), np.int32), "positions": np.tile(np.arange(32, dtype=np.int32), (2, 1))}
    batch["weights"] = np.ones((2, 32), np.float32)
    hidden, _ = model.hidden(params, batch)
    want = log_softmax(np.asarray(hidden, np.float64) @ np.asarray(model.head(params), np.float64).T / 1.5, axis=-1)
    plan = cb.Plan(batch_size=2, context=context)
    mesh = sharding.make_mesh(plan, jax.devices()[:context])
    rows = sharding.batch_sharding(mesh, plan.rules)
    ask = make_teacher(model, plan, mesh, rows, vocab_size=16, temperature=1.5, top_k=3)
    outputs = jax.device_get(ask(params, sharding.global_batch(rows, batch)))
    order = np.argsort(-want, axis=-1)[..., :3]
    np.testing.assert_array_equal(outputs["teacher_ids"], order)
    np.testing.assert_allclose(outputs["teacher_log_p"], np.take_along_axis(want, order, -1), rtol=1e-4, atol=1e-5)
