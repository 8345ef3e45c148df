"""Adapters: what they compute, which weights have one, and the merged model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from capibara.core import tree
from capibara.core.types import UserError
from capibara.models import api
from capibara.models.adapters import lora
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig, Lora
from capibara.models.layers import layers
from capibara.models.parts.moe import Moe

SIZES = dict(vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48, dtype="float32")
LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",))
CONFIG = DecoderConfig(**SIZES, lora=LORA)
ROWS, LENGTH = 2, 8
MOE = Moe(num_experts=4, top_k=2, shared_experts=1)
DENSE = ["attention/key", "attention/out", "attention/query", "attention/value", "mlp/down", "mlp/gate", "mlp/up"]
FUSED = (("query", "key", "value"), ("gate", "up"))
OF_LAYERS = dict(
    targets=("layers/1/attention/query", "layers/0/*/out", "up"),
    rank_pattern=(("layers/1/mlp/up", 2),),
    alpha_pattern=(("layers/[1]/attention/*", 3.0),),
)


def variant(**changes):
    return dataclasses.replace(CONFIG, lora=dataclasses.replace(LORA, **changes))


def batch_of(length=LENGTH):
    tokens = np.random.default_rng(0).integers(1, 64, (ROWS, length)).astype(np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (ROWS, 1))
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": positions}
    return batch | {f"encoder_{name}": value for name, value in batch.items()}


def logits(model, params):
    return jax.jit(model.logits)(params, batch_of())


def drawn(model, seed=1):
    """Parameters whose adapters all have an effect."""
    params = jax.jit(model.init)(jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def one(name, leaf):
        new = name.endswith("_lora/b")
        return jnp.asarray(0.1 * rng.normal(size=leaf.shape), jnp.float32) if new else leaf

    return tree.map_with_names(one, params)


def adapted(config):
    """The names of the weights with an adapter."""
    names = tree.path_names(api.build(config).abstract_params)
    return [name.removesuffix("_lora/a").removeprefix("layers/") for name in names if name.endswith("_lora/a")]


@pytest.mark.parametrize(
    ("config", "count"),
    [
        pytest.param(CONFIG, 7, marks=pytest.mark.heavy),
        pytest.param(
            dataclasses.replace(CONFIG, layer_loop="unroll", activation="gelu", bias="all"), 6, marks=pytest.mark.heavy
        ),
        pytest.param(EncoderConfig(**SIZES, lora=LORA), 6, marks=pytest.mark.heavy),
        pytest.param(EncoderDecoderConfig(**SIZES, lora=LORA), 7 + 11, marks=pytest.mark.heavy),
        pytest.param(variant(dora=True, rslora=True), 7, marks=pytest.mark.heavy),
        pytest.param(
            variant(base_dtype="bfloat16", dora=True, modules_to_save=("*norm/scale",)), 7, marks=pytest.mark.heavy
        ),
        (variant(base_dtype="nf4", double_quantization=True, dora=True, modules_to_save=("embedding",)), 7),
        (variant(fused=FUSED, rank_pattern=(("down", 2),), rslora=True), 4),
        pytest.param(variant(fused=FUSED, dora=True, dropout=0.1), 4, marks=pytest.mark.heavy),
        pytest.param(dataclasses.replace(variant(fused=FUSED), moe=MOE), 3 + 1 + 3 + 1, marks=pytest.mark.heavy),
        (variant(**OF_LAYERS), 3),
        pytest.param(
            variant(dora=True, rank_pattern=(("layers/1/*", 2),), base_dtype="bfloat16"), 7, marks=pytest.mark.heavy
        ),
        pytest.param(dataclasses.replace(variant(base_dtype="int4"), moe=MOE), 4 + 3 + 3 + 1, marks=pytest.mark.heavy),
        pytest.param(dataclasses.replace(variant(base_dtype="int8"), layer_loop="unroll"), 7, marks=pytest.mark.heavy),
    ],
    ids=[
        "decoder",
        "unrolled",
        "encoder",
        "encoder_decoder",
        "dora",
        "bfloat16",
        "nf4",
        "fused",
        "fused_dora",
        "fused_moe",
        "layers",
        "layers_dora",
        "int4_moe",
        "int8",
    ],  # fmt: skip
)
def test_adapters_compute_what_the_merged_weights_do(config, count):
    model = api.build(config)
    assert len(adapted(config)) == count
    params, new = drawn(model), jax.jit(model.init)(jax.random.key(1))
    merged = jax.jit(model.merge)(params)
    assert jax.tree.structure(merged) == jax.tree.structure(model.plain.abstract_params)
    want = logits(model.plain, merged)
    got = logits(model, params)
    assert np.abs(want - logits(model, new)).max() > 0.01  # they have an effect
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_new_adapters_change_nothing_and_leave_the_base_as_it_is():
    model, key = api.build(CONFIG), jax.random.key(3)
    params, base = jax.jit(model.init)(key), jax.jit(model.plain.init)(key)
    jax.tree.map(np.testing.assert_array_equal, model.frozen(params), base)
    np.testing.assert_array_equal(logits(model, params), logits(model.plain, base))
    given = jax.jit(model.adapt)(base, jax.random.key(9))
    jax.tree.map(np.testing.assert_array_equal, model.frozen(given), base)
    a = given["layers"]["attention"]["query_lora"]["a"]
    assert a.shape == (2, 32, 4) and abs(np.std(a) / (3 * 32) ** -0.5 - 1) < 0.2 and not np.allclose(a[0], a[1])


def test_unmerging_gives_the_base_back():
    model = api.build(CONFIG)
    params = drawn(model)
    base = jax.jit(model.unmerge)(jax.jit(model.merge)(params), model.trained(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), base, model.frozen(params))


def test_gradients_are_those_of_the_merged_formula():
    """dL/da = scale x^T (dy b^T) and dL/db = scale (x a)^T dy, as differentiating W + scale a b gives them."""
    model = api.build(CONFIG)
    params, batch = drawn(model), batch_of()
    weights = np.random.default_rng(2).normal(size=(ROWS, LENGTH, 64)).astype(np.float32)
    trained, frozen = model.trained(params), model.frozen(params)

    def gradients(logits):
        loss = lambda trained: jnp.sum(logits(tree.joined(trained, frozen), batch) * weights)  # noqa: E731
        return jax.jit(jax.grad(loss))(trained)

    got = gradients(model.logits)
    want = gradients(lambda params, batch: model.plain.logits(model.merge(params), batch))
    assert tree.path_names(got) == [f"layers/{name}_lora/{part}" for name in DENSE for part in "ab"]
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max()), got, want)


def test_dora_divides_by_a_length_without_gradient():
    """The gradients of m, a and b of y = m x V / |V| with V = W + scale a b and |V| a constant."""
    config = dataclasses.replace(variant(dora=True, targets=("up",)), num_layers=1)
    model = api.build(config)
    params = drawn(model)
    mlp = params["layers"]["mlp"]
    x, dy = np.random.default_rng(0).normal(size=(2, 5, 32)), np.random.default_rng(1).normal(size=(2, 5, 48))
    x, dy = x.astype(np.float32), dy.astype(np.float32)
    weight, scale = mlp["up"][0], LORA.alpha / LORA.rank
    lengths = jnp.linalg.norm(weight + scale * mlp["up_lora"]["a"][0] @ mlp["up_lora"]["b"][0], axis=0)

    def formula(adapter):
        a, b, m = (adapter[name][0] for name in ("a", "b", "magnitude"))
        return jnp.sum(dy * (x @ (weight + scale * a @ b) * m / lengths))

    def ours(adapter):
        one = nnx.eval_shape(lambda: lora.Adapter("up", config.lora, weight, ("embed", "mlp"), nnx.Rngs(0)))
        graphdef, state = nnx.split(one)
        nnx.replace_by_pure_dict(state, {name: value[0] for name, value in adapter.items()})
        return jnp.sum(dy * layers.dense(x, weight, adapter=nnx.merge(graphdef, state)))

    got, want = jax.jit(jax.grad(ours))(mlp["up_lora"]), jax.jit(jax.grad(formula))(mlp["up_lora"])
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max()), got, want)


def test_dropout_is_of_the_step_and_the_layer_and_of_nothing_else():
    config = variant(dropout=0.5)
    model, batch = api.build(config), batch_of()
    params = drawn(model)
    hidden = jax.jit(lambda params, step: model.hidden(params, batch, "none", step)[0])
    first, again, second = (hidden(params, jnp.int32(step)) for step in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - second).max() > 0.01
    outside = jax.jit(model.hidden)(params, batch)[0]
    without = api.build(CONFIG)
    np.testing.assert_array_equal(outside, jax.jit(without.hidden)(without_seeds(params), batch)[0])
    seeds = params["layers"]["mlp"]["up_lora"]["seed"]
    assert seeds[0] != seeds[1] and not model.config.lora.trains("layers/mlp/up_lora/seed")


def test_dropped_inputs_are_a_share_and_the_mean_stays():
    of = dataclasses.replace(LORA, dropout=0.25)
    one = lora.Adapter("up", of, jnp.zeros((32, 48)), ("embed", "mlp"), nnx.Rngs(0))
    with lora.at_step(jnp.int32(1)):
        dropped = np.asarray(one._dropped(jnp.ones((8, 64, 32))))
    assert sorted(np.unique(dropped)) == pytest.approx([0.0, 1 / 0.75])
    assert abs(dropped.mean() - 1) < 0.02


def without_seeds(params):
    return tree.part(params, lambda name: not name.endswith("/seed"))


@pytest.mark.parametrize(
    ("targets", "want"),
    [
        (("query", "value"), ["attention/query", "attention/value"]),
        (("*attention*",), DENSE[:4]),
        (("*/mlp/up", "out"), ["attention/out", "mlp/up"]),
        (("all-linear",), DENSE),
    ],
    ids=str,
)
def test_targets(targets, want):
    assert adapted(dataclasses.replace(CONFIG, lora=Lora(targets=targets))) == want


def test_ranks_and_scales_by_pattern():
    of = Lora(rank=4, alpha=8.0, targets=("query", "up"), rank_pattern=(("up", 2),), alpha_pattern=(("*/mlp/*", 3.0),))
    model = api.build(dataclasses.replace(CONFIG, lora=of))
    assert model.abstract_params["layers"]["mlp"]["up_lora"]["b"].shape == (2, 2, 48)
    assert (of.scale_of("layers/mlp/up"), of.scale_of("layers/attention/query")) == (1.5, 2.0)
    assert dataclasses.replace(of, rslora=True).scale_of("layers/attention/query") == 4.0
    params = drawn(model)
    want = logits(model.plain, jax.jit(model.merge)(params))
    np.testing.assert_allclose(logits(model, params), want, atol=1e-5 * np.abs(want).max())


def gradients_of(model, params):
    weights = np.random.default_rng(2).normal(size=(ROWS, LENGTH, 64)).astype(np.float32)
    frozen = model.frozen(params)
    loss = lambda trained: jnp.sum(model.logits(tree.joined(trained, frozen), batch_of()) * weights)  # noqa: E731
    return jax.jit(jax.grad(loss))(model.trained(params))


def test_fused_adapters_train_what_they_share_once():
    """Like one adapter of the concatenated weights: the gradient of its `a` is the sum of the separate ones."""
    model, apart = api.build(variant(fused=FUSED)), api.build(CONFIG)
    params = drawn(model)
    attention = params["layers"]["attention"]
    assert [name for name in attention if name.endswith("_lora") and "a" in attention[name]] == ["key_lora", "out_lora"]
    same = {"attention": ("key", ("query", "value")), "mlp": ("gate", ("up",))}
    layers = params["layers"]
    for block, (first, others) in same.items():
        shared = {
            f"{name}_lora": layers[block][f"{name}_lora"] | {"a": layers[block][f"{first}_lora"]["a"]}
            for name in others
        }
        layers = layers | {block: layers[block] | shared}
    got, want = (gradients_of(m, p)["layers"] for m, p in ((model, params), (apart, params | {"layers": layers})))
    for block, (first, others) in same.items():
        total = sum(want[block][f"{name}_lora"]["a"] for name in (first, *others))
        np.testing.assert_allclose(got[block][f"{first}_lora"]["a"], total, atol=1e-5 * np.abs(total).max())
        for name in (first, *others):
            b = want[block][f"{name}_lora"]["b"]
            np.testing.assert_allclose(got[block][f"{name}_lora"]["b"], b, atol=1e-5 * np.abs(b).max())


def test_what_a_layer_does_not_have_is_zero_and_has_no_gradient():
    model = api.build(variant(**OF_LAYERS))
    new, key = jax.jit(model.init)(jax.random.key(0)), lambda tree: tree["layers"]["attention"]["query_lora"]  # noqa: E731
    assert not np.any(key(new)["a"][0]) and np.any(key(new)["a"][1])
    up = new["layers"]["mlp"]["up_lora"]
    assert not np.any(up["a"][1, :, 2:]) and np.all(up["a"][0]) and list(up["scale"]) == [2.0, 4.0]
    params = drawn(model)
    of = {"query_lora": (0, slice(None)), "out_lora": (1, slice(None))}
    for name, (layer, ranks) in of.items():
        params["layers"]["attention"][name]["b"] = params["layers"]["attention"][name]["b"].at[layer, ranks].set(0)
    params["layers"]["mlp"]["up_lora"]["b"] = params["layers"]["mlp"]["up_lora"]["b"].at[1, 2:].set(0)
    got = gradients_of(model, params)["layers"]
    for name, (layer, _) in of.items():
        assert not np.any(got["attention"][name]["a"][layer]) and not np.any(got["attention"][name]["b"][layer])
        assert np.any(got["attention"][name]["b"][1 - layer])
    up = got["mlp"]["up_lora"]
    assert not np.any(up["a"][1, :, 2:]) and not np.any(up["b"][1, 2:]) and np.all(up["b"][1, :2])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(fused=(("query", "q"),)), "Lora.fused has 'q', must be one of query, key, "),
        (dict(fused=(("query", "key"), ("key", "value"))), "Lora.fused has 'key', .* each in one group"),
        (
            dict(fused=FUSED, rank_pattern=(("query", 2),)),
            r"Lora.fused groups layers/attention/value .* \(\[32, 16\] and \[32, 2\]\): give them one rank",
        ),
        (dict(targets=("layers/2/*",)), "targets has 'layers/2/.', which must match one of layers/attention/key"),
        (dict(targets=("layers/1/*",), dora=True), "dora is set, and layers/attention/key has no adapter in layer 0"),
        (dict(targets=("q_proj",)), r"targets has 'q_proj', which must match one of layers/attention/key, .*mlp/up"),
        (
            dict(targets=("query",), rank_pattern=(("up", 2),)),
            "rank_pattern has 'up', .* one of layers/attention/query",
        ),
        (dict(rank=0), "Lora.rank is 0, must be at least 1: try 16"),
        (dict(alpha_pattern=(("up", -1.0),)), "alpha_pattern 'up' is -1.0, must be finite and above 0"),
        (dict(targets=()), "Lora.targets is empty"),
        (dict(modules_to_save=("query",)), "modules_to_save has layers/attention/query, which has an adapter"),
        (dict(modules_to_save=("lm_head",)), "modules_to_save has 'lm_head', which must match one of embedding, "),
        (dict(dropout=1.0), "Lora.dropout is 1.0, must be from 0 to below 1"),
        (dict(double_quantization=True), "base_dtype is 'float32': set 'nf4'"),
    ],
    ids=str,
)
def test_mistakes_are_named(changes, told):
    with pytest.raises(UserError, match=told):
        api.build(dataclasses.replace(CONFIG, lora=Lora(**changes)))


@pytest.mark.parametrize("head", ["tied", "separate"])
def test_rows_of_the_embedding_are_trained_and_begin_as_they_are(head):
    """The plain model's outputs before training; after training, those of the merged model."""
    config = DecoderConfig(
        vocab_size=40, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=24, dtype="float32", head=head
    )
    model = api.build(dataclasses.replace(config, lora=Lora(rank=2, trainable_tokens=(7, 39, 2))))
    base = jax.jit(model.plain.init)(jax.random.key(0))
    params = jax.jit(model.adapt)(base, jax.random.key(1))
    np.testing.assert_array_equal(params["embedding_lora"]["rows"], base["embedding"][np.array([7, 39, 2])])
    assert model.trained(params).keys() == {"embedding_lora", "layers"} and model.trains_head == (head == "tied")
    tokens = np.array([[7, 1, 39, 2, 7, 3]], np.int32)
    batch = {"tokens": tokens, "positions": np.arange(6, dtype=np.int32)[None], "segment_ids": np.ones_like(tokens)}
    plain_logits, logits = jax.jit(model.plain.logits), jax.jit(model.logits)
    want = plain_logits(base, batch)
    np.testing.assert_allclose(logits(params, batch), want, rtol=0, atol=1e-6)
    params["embedding_lora"]["rows"] += 0.1
    got = logits(params, batch)
    assert np.abs(got - want).max() > 1e-3
    np.testing.assert_allclose(got, plain_logits(model.merge(params), batch), rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="Lora.trainable_tokens has replaced rows"):
        model.unmerge(base, model.trained(params))


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ((3, 3), "has 3 twice"),
        ((-1,), "has -1, must be token ids"),
        ((40,), r"has 40, must be below vocab_size \(40\)"),
    ],
    ids=str,
)
def test_tokens_that_cannot_be_trained_are_refused(ids, told):
    config = DecoderConfig(vocab_size=40, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=24)
    with pytest.raises(UserError, match=f"Lora.trainable_tokens {told}"):
        api.build(dataclasses.replace(config, lora=Lora(trainable_tokens=ids)))
