"""An engine that takes parameters over: they are unchanged, and never exist twice."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from capibara.core import tree
from capibara.inference.engine.placement import parameters
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.engine.programs import programs
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig, Lora, Moe

SIZES = dict(vocab_size=384, embed_dim=32, num_heads=4, mlp_dim=64, dtype="bfloat16")
LORA = Lora(rank=2, targets=("all-linear",))
MODELS = {
    "decoder": DecoderConfig(**SIZES, num_layers=3),
    "LoRA": DecoderConfig(**SIZES, num_layers=2, lora=LORA),
    "QLoRA": DecoderConfig(**SIZES, num_layers=2, lora=LORA, quantization="int8"),
    "experts": DecoderConfig(**SIZES, num_layers=2, moe=Moe(num_experts=4)),
    "encoder-decoder": EncoderDecoderConfig(**SIZES, num_layers=2),
}


def of_model(model, mesh):
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.integers(-100, 100, x.shape).astype(x.dtype), model.abstract_params)
    return jax.device_put(params, mesh.shardings(model, jax.devices()))


@pytest.mark.parametrize(
    "name, tensor", [("decoder", 1), ("LoRA", 2), ("QLoRA", 1), ("experts", 2), ("encoder-decoder", 1)]
)
def test_they_are_those_of_a_copy_and_the_given_ones_are_gone(name, tensor):
    config, mesh = MODELS[name], ServingMesh(tensor=tensor, data=1)
    model = api.build(config)
    params = of_model(model, mesh)
    on, rules = programs.mesh_of(params), programs.sharding.Rules()
    sizes = programs.Sizes(1, 8, 8 if isinstance(config, EncoderDecoderConfig) else None, None, 0, 1, None)
    want = programs.build(model, config.vocab_size, sizes, on, rules).serving(params)
    got = parameters.donated(model, params, on, rules)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_no_more_than_the_largest_array_is_there_twice(monkeypatch):
    model = api.build(MODELS["decoder"])
    params = of_model(model, ServingMesh())
    others = tree.byte_count(jax.live_arrays()) - tree.byte_count(params)
    found = []

    def seen(*args, **options):
        program = programs.on_mesh(*args, **options)

        def called(x):
            y = program(x)
            found.append(tree.byte_count([a for a in jax.live_arrays() if not a.is_deleted()]) - others)
            return y

        return called

    monkeypatch.setattr(parameters, "on_mesh", seen)
    whole, largest = tree.byte_count(params), max(x.nbytes for x in jax.tree.leaves(params))
    parameters.donated(model, params, None, programs.sharding.Rules())
    assert len(found) == len(jax.tree.leaves(params))
    assert max(found) <= whole + largest and found[-1] < 0.6 * whole
