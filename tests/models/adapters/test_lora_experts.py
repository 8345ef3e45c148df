"""Adapters of experts agree with merged weights, for every kind of dispatch and on every mesh."""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from capibara import sharding
from capibara.core import tree
from capibara.core.types import UserError
from capibara.kernels.grouped_matmul import dispatch as grouped_matmul
from capibara.models import api
from capibara.models.adapters import lora, lora_experts, lora_merge
from capibara.models.api import DecoderConfig, Lora
from capibara.models.layers.quantized_weights import BaseDtype, Blocks, quantize
from capibara.models.parts import dispatch
from capibara.models.parts.moe import Moe, MoeMLP
from capibara.sharding import Plan

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "parts"))
from test_moe import ragged_all_to_all  # noqa: E402

CONFIG = DecoderConfig(vocab_size=64, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=32, dtype="float32")
LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",))
MOE = Moe(num_experts=4, top_k=2, expert_dim=64, balance_loss=0.1)
MIXTURES = {
    "dropless": MOE,
    "inputs": dataclasses.replace(MOE, score="sigmoid", gates="scores", weighted="inputs"),
    "capacity": dataclasses.replace(MOE, dispatch="capacity", capacity_factor=0.9),
    "expert_choice": dataclasses.replace(MOE, routing="expert_choice", capacity_factor=0.9),
}
LORAS = {
    "lora": LORA,
    "dora": dataclasses.replace(LORA, dora=True, rslora=True),
    "qlora": dataclasses.replace(LORA, base_dtype="int4", double_quantization=True, dropout=0.25),
}
ROWS, LENGTH = 8, 16


class Holder(nnx.Module):
    """One mixture, in the module path where adapters expect layers."""

    def __init__(self, mixture):
        self.layers = MoeMLP(CONFIG, mixture, nnx.Rngs(0))


@dataclasses.dataclass(frozen=True)
class Names:
    names: tuple


def functional(mixture, of):
    """(parameters with effective adapters, axes, f(parameters, x, step) -> (y, stats)) of one mixture."""

    def make():
        holder = Holder(mixture)
        if of is not None:
            lora.attach(holder, of, nnx.Rngs(1))
        return holder

    graphdef, template = nnx.split(nnx.eval_shape(make))
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    axes = nnx.to_pure_dict(jax.tree.map(lambda v: v.replace(Names(v.axes)), template, is_leaf=is_variable))
    axes = jax.tree.map(lambda n: n.names, axes, is_leaf=lambda x: isinstance(x, Names))
    params = drawn(jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))())

    def apply(params, x, step=None):
        state = jax.tree.map(lambda v: v, template)
        nnx.replace_by_pure_dict(state, params)
        with lora.at_step(step):
            return nnx.merge(graphdef, state).layers(x, segments())

    return params, axes, apply


def drawn(params):
    rng = np.random.default_rng(1)
    new = lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), jnp.float32)  # noqa: E731
    return tree.map_with_names(lambda name, x: new(x) if name.endswith("_lora/b") else x, params)


def segments():
    found = np.ones((ROWS, LENGTH), np.int32)
    found[1::2, LENGTH - 3 :] = 0  # some rows end in padding
    return jnp.asarray(found)


def inputs(seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((ROWS, LENGTH, 32)), jnp.float32)


def trained(of, params):
    return tree.part(params, of.trains), tree.part(params, lambda name: not of.trains(name))


def objective(apply, given, step=None):
    """A loss of the trained parameters and the inputs."""
    target = inputs(9)

    def loss(parts, x):
        y, stats = apply(tree.joined(parts, given), x, step)
        return jnp.sum(y * target) + 0.1 * jnp.sum(stats["balance"])

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def assert_close(got, want, tolerance=1e-5):
    """Within `tolerance` of the largest magnitude of each array."""
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * float(np.abs(w).max() + 1e-6)),
        got,
        want,
    )


def on_mesh(mixture, of, sizes, step=None):
    """Loss and gradients on a mesh; on one device if the mesh is empty."""
    params, axes, apply = functional(MIXTURES[mixture], LORAS[of])
    if not sizes:
        parts, frozen = trained(LORAS[of], params)
        return objective(apply, frozen, step)(parts, inputs())
    layout = Plan(batch_size=ROWS, **({"fsdp": 1} | dict(sizes)))
    mesh = sharding.make_mesh(layout, jax.devices()[: int(np.prod([size for _, size in sizes]))])
    params = jax.device_put(params, sharding.shardings(mesh, layout.rules, axes, params))
    parts, frozen = trained(LORAS[of], params)
    with sharding.activate(mesh, layout.rules):
        return objective(apply, frozen, step)(parts, inputs())


@functools.cache
def on_one_device(mixture, of, step):
    return on_mesh(mixture, of, (), step)


ALL = (("expert", 2), ("fsdp", 2), ("tensor", 2))
# Both ways to route, and each kind of adapter that is more than one product; the others with the heavy tests.
PAIRS = [("dropless", "dora"), ("expert_choice", "qlora")]
MESHES = (ALL, (("expert", 2), ("context", 2), ("tensor", 2)), (("data", 2), ("fsdp", 2), ("expert", 2)))


def with_others(pairs, meshes=()):
    """`pairs` on the first mesh; every other pair and mesh as a heavy test."""
    cases = [(mixture, of, *mesh) for mixture in MIXTURES for of in LORAS for mesh in (zip(meshes) if meshes else [()])]
    light = [(*pair, *meshes[:1]) for pair in pairs]
    return light + [pytest.param(*case, marks=pytest.mark.heavy) for case in cases if case not in light]


@pytest.mark.parametrize("mixture, of, sizes", with_others(PAIRS, MESHES), ids=str)
def test_every_mesh_gives_the_same_loss_and_gradients(mixture, of, sizes):
    step = 3 if of == "qlora" else None  # which drops inputs
    assert_close(on_mesh(mixture, of, sizes, step), on_one_device(mixture, of, step))


@pytest.mark.heavy
def test_rows_that_travel_by_ragged_all_to_all_take_their_tokens_numbers_along(monkeypatch):
    """The path of TPUs, with test_moe's stand-in for the collective that XLA's CPU back end does not have."""
    want = on_one_device("dropless", "qlora", 3)
    monkeypatch.setattr(dispatch.jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(grouped_matmul.sharding, "platform", lambda: "tpu")
    for name in ("_product", "_frozen_product"):
        product = getattr(grouped_matmul, name)
        monkeypatch.setattr(grouped_matmul, name, lambda *args, of=product: of(*args[:-1], "cpu"))
    got = on_mesh("dropless", "qlora", (("expert", 4), ("tensor", 2)), 3)
    monkeypatch.undo()
    assert_close(got, want)


@pytest.mark.parametrize(
    "mixture, of", with_others([("dropless", "lora"), ("capacity", "qlora"), ("expert_choice", "dora")])
)
def test_gradients_are_those_of_the_merged_weights(mixture, of):
    """The base has no gradients, and the adapters have those of W + scale a b."""
    of = dataclasses.replace(LORAS[of], dropout=0.0)
    params, axes, apply = functional(MIXTURES[mixture], of)
    *_, plain = functional(MIXTURES[mixture], None)
    parts, frozen = trained(of, params)
    got = objective(apply, frozen)(parts, inputs())
    lengths = ["magnitude"] if of.dora else []
    names = ("down", "gate", "router", "up")
    assert tree.path_names(got[1][0]) == [f"layers/{n}_lora/{p}" for n in names for p in ("a", "b", *lengths)]
    merged = lambda params, x, step: plain(lora_merge.merge(params, of, axes, {}), x)  # noqa: E731
    want = objective(merged, frozen)(parts, inputs())
    assert_close(got[0], want[0])
    assert_close(got[1][1], want[1][1], 2e-5)
    if not of.dora:  # its divisor, the column norm, has no gradient
        assert_close(got[1][0], want[1][0], 2e-5)


def test_dora_divides_by_lengths_of_each_expert_without_a_gradient():
    of = dataclasses.replace(LORA, dora=True, targets=("up", "down"))
    params, axes, apply = functional(MOE, of)
    *_, plain = functional(MOE, None)
    parts, frozen = trained(of, params)

    def by_formula(params, x, step):
        layers = dict(params["layers"])
        for name in ("up", "down"):
            adapter = layers.pop(f"{name}_lora")
            weight = layers[name] + of.scale_of(name) * adapter["a"] @ adapter["b"]
            lengths = jax.lax.stop_gradient(jnp.linalg.norm(weight, axis=1))
            layers[name] = weight * (adapter["magnitude"] / lengths)[:, None]
        return plain({"layers": layers}, x)

    assert_close(objective(apply, frozen)(parts, inputs()), objective(by_formula, frozen)(parts, inputs()), 2e-5)


@pytest.mark.heavy
def test_new_adapters_change_nothing_and_every_expert_has_its_own():
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, shared_experts=1))
    model = api.build(dataclasses.replace(config, lora=LORA))
    params = jax.jit(model.init)(jax.random.key(1))
    mlp = params["layers"]["mlp"]
    assert {name.removesuffix("_lora") for name in mlp if name.endswith("_lora")} == {
        "down", "gate", "router", "shared_down", "shared_gate", "shared_up", "up"
    }  # fmt: skip
    assert mlp["up_lora"]["a"].shape == (2, 4, 32, 4) and mlp["up_lora"]["b"].shape == (2, 4, 4, 64)
    assert mlp["router_lora"]["a"].shape == (2, 32, 4) and mlp["router_lora"]["b"].shape == (2, 4, 4)
    assert not mlp["up_lora"]["b"].any() and not np.allclose(mlp["up_lora"]["a"][0, 0], mlp["up_lora"]["a"][0, 1])
    tokens = np.random.default_rng(0).integers(1, 64, (2, 8)).astype(np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
    batch["positions"] = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    base, logits = model.frozen(params), jax.jit(model.logits)
    np.testing.assert_array_equal(logits(params, batch), jax.jit(model.plain.logits)(base, batch))
    params = drawn(params)
    merged = jax.jit(model.merge)(params)
    want = jax.jit(model.plain.logits)(merged, batch)
    assert np.abs(want - logits(model.init(jax.random.key(1)), batch)).max() > 0.01
    np.testing.assert_allclose(logits(params, batch), want, atol=1e-5 * np.abs(want).max())
    again = jax.jit(model.unmerge)(merged, model.trained(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, base)


@pytest.mark.heavy
def test_dropped_inputs_are_of_the_step_and_of_nothing_else():
    of = dataclasses.replace(LORA, dropout=0.5, targets=("up", "down"))
    params, _, apply = functional(MOE, of)
    run = jax.jit(lambda step: apply(params, inputs(), step)[0])
    first, again, second = (run(jnp.int32(step)) for step in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - second).max() > 0.01
    *_, without = functional(MOE, dataclasses.replace(of, dropout=0.0))
    kept = tree.part(params, lambda name: not name.endswith("/seed"))
    np.testing.assert_array_equal(jax.jit(apply)(params, inputs())[0], jax.jit(without)(kept, inputs())[0])
    rows, features = jnp.arange(64, dtype=jnp.int32), jnp.arange(256, dtype=jnp.int32)
    found = lora_experts._mask(jnp.full(64, 7, jnp.uint32), jnp.int32(1), rows, features, 0.25)
    assert abs(np.mean(found) - 0.75) < 0.02
    np.testing.assert_array_equal(
        found[8:16, 128:],
        lora_experts._mask(jnp.full(8, 7, jnp.uint32), jnp.int32(1), rows[8:16], features[128:], 0.25),
    )


@pytest.mark.parametrize("kind", ["nf4", "int4", "int8"])
def test_backward_keeps_the_weight_as_it_is_stored(kind):
    """The residuals of the two products: codes and scales, and no floating-point array of the weight's size."""
    weight = jax.random.normal(jax.random.key(0), (4, 128, 64))
    blocks = quantize(weight, BaseDtype(kind), -2)
    x = jax.random.normal(jax.random.key(1), (40, 128))
    sizes = jnp.array([8, 8, 8, 8], jnp.int32)
    grouped = lambda x: grouped_matmul.grouped_matmul(x, blocks, sizes, 8)  # noqa: E731
    batched = lambda x: lora_experts.batched_matmul(x[:32].reshape(4, 8, 128), blocks).reshape(32, 64)  # noqa: E731
    want = jnp.einsum("GMK,GKN->GMN", x[:32].reshape(4, 8, 128), blocks.astype(jnp.float32)).reshape(32, 64)
    for product in (grouped, batched):
        y, pull = jax.vjp(product, x)
        assert_close(y[:32], want)
        kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= weight.size // 2]
        assert [leaf.dtype for leaf in kept] == [blocks.codes.dtype]
        back = jnp.einsum("GMN,GKN->GMK", y[:32].reshape(4, 8, 64), blocks.astype(jnp.float32)).reshape(32, 128)
        assert_close(pull(y)[0][:32], back)


def test_blocks_that_do_not_divide_over_the_hidden_width_are_taken_apart_after():
    blocks = quantize(jax.random.normal(jax.random.key(0), (2, 64, 8)), BaseDtype.NF4, -2)
    spec = jax.sharding.PartitionSpec("expert", "tensor")
    weight, specs = lora_experts.placed(blocks, spec, ("tensor",), 2, hidden_inputs=True)
    assert isinstance(weight, lora_experts.Part) and specs.whole.codes == jax.sharding.PartitionSpec("expert")
    even = Blocks(*(jnp.concatenate([part, part], 1) for part in (blocks.codes, blocks.scales)), None, None, "nf4", -2)
    assert lora_experts.placed(even, spec, ("tensor",), 2, hidden_inputs=True)[1].scales == spec


def test_a_pattern_that_matches_nothing_names_what_there_is():
    config = dataclasses.replace(CONFIG, moe=MOE, lora=Lora(targets=("w1",)))
    with pytest.raises(UserError, match="targets has 'w1', which must match one of .*mlp/down, .*mlp/router, .*mlp/up"):
        api.build(config)
