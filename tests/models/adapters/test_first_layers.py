"""Adapters of models whose first layers have no experts: layers keep their numbers, or it is refused by name."""

import dataclasses

import jax
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.interop.peft import folder as peft
from capibara.interop.quantize import awq
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora, Moe

SIZES = dict(vocab_size=64, embed_dim=32, num_layers=3, num_heads=4, mlp_dim=48, head="separate", dtype="float32")
CONFIG = DecoderConfig(**SIZES, moe=Moe(num_experts=4, top_k=2, expert_dim=16, first_dense=1, shared_experts=1))
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 8)).astype(np.int32)
BATCH = {
    "tokens": TOKENS,
    "segment_ids": np.ones_like(TOKENS),
    "positions": np.tile(np.arange(8, dtype=np.int32), (2, 1)),
}


@pytest.mark.parametrize("places", [dict(first_dense=1), dict(pattern=("dense", "experts", "experts"))])
def test_adapters_of_all_its_weights_merge_to_the_same_logits(places):
    moe = Moe(num_experts=4, top_k=2, expert_dim=16, shared_experts=1, **places)
    model = api.build(dataclasses.replace(CONFIG, moe=moe, lora=Lora(rank=2, targets=("all-linear",))))
    params = jax.jit(model.init)(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.05 * np.float32(np.cos(np.arange(x.size)).reshape(x.shape)), params)
    assert params["layers"]["first_mlp"]["up"].shape[0] == 1 and params["layers"]["mlp"]["router"].shape[0] == 2
    merged = jax.jit(model.plain.logits)(jax.jit(model.merge)(params), BATCH)
    np.testing.assert_allclose(jax.jit(model.logits)(params, BATCH), merged, rtol=0, atol=2e-4 * np.abs(merged).max())


@pytest.mark.parametrize(
    "pattern, name, scales",
    [
        ("layers/2/mlp/shared_up", "mlp/shared_up", [0, 16]),  # of layers 1 and 2
        ("layers/[12]/mlp/shared_up", "mlp/shared_up", None),  # all of its layers
        ("layers/0/first_mlp/up", "first_mlp/up", None),
        ("layers/1/attention/query", "attention/query", [0, 16, 0]),
    ],
)
def test_patterns_have_the_numbers_of_the_models_layers(pattern, name, scales):
    model = api.build(dataclasses.replace(CONFIG, lora=Lora(rank=2, targets=(pattern,))))
    params = jax.jit(model.init)(jax.random.key(0))
    part, last = name.split("/")
    assert [key for key in params["layers"][part] if key.endswith("_lora")] == [last + "_lora"]
    found = params["layers"][part][last + "_lora"].get("scale")
    assert (None if found is None else found.tolist()) == scales


@pytest.mark.parametrize("pattern", ["layers/0/mlp/shared_up", "layers/1/first_mlp/up"])
def test_a_layer_that_lacks_the_module_is_no_match(pattern):
    with pytest.raises(UserError, match="Lora.targets has .*, which must match one of"):
        api.build(dataclasses.replace(CONFIG, lora=Lora(rank=2, targets=(pattern,))))


def test_pefts_folders_of_it_are_refused(tmp_path):
    model = api.build(dataclasses.replace(CONFIG, lora=Lora(rank=2, targets=("query",))))
    params = jax.jit(model.init)(jax.random.key(0))
    with pytest.raises(UserError, match="whose layers differ .1 have first_mlp and 2 have mlp."):
        peft.write_peft(str(tmp_path / "adapter"), params, model, "glm4_moe")


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        ({}, {"attention/query", "attention/out", "mlp/up", "mlp/down"}),
        (dict(attention_clip=1.0), {"attention/query", "mlp/up", "mlp/down"}),
        (dict(inner_norm="layer"), {"attention/query", "mlp/up"}),
        (dict(norm_placement="output"), {"attention/out", "mlp/down"}),
        (dict(residual="shared"), {"attention/out", "mlp/down"}),
        (dict(norm_scale="none"), {"attention/out", "mlp/down"}),
    ],
)
def test_awq_folds_scales_only_where_nothing_stands_between(variant, names):
    """A folded layer answers as before."""
    model = api.build(DecoderConfig(**SIZES | variant))
    params = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    of_layers = [jax.tree.map(lambda x: x[index], params["layers"]) for index in range(3)]
    assert set(awq.foldable(model.config, of_layers[0])) == names
    rng = np.random.default_rng(0)
    for index, layer in enumerate(of_layers):
        for name, channels in awq.foldable(model.config, layer).items():
            scales = np.exp(0.3 * rng.standard_normal(channels.max() + 1)).astype(np.float32)[channels]
            of_layers[index] = awq.fold(of_layers[index], model.config, name, scales)
    folded = params | {"layers": jax.tree.map(lambda *x: np.stack(x), *of_layers)}
    want = np.asarray(jax.jit(model.logits)(params, BATCH))
    np.testing.assert_allclose(jax.jit(model.logits)(folded, BATCH), want, rtol=0, atol=1e-4 * np.abs(want).max())
