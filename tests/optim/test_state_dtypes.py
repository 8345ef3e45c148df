"""Moments in bfloat16 and 8 bits: rounding without bias, small errors, little memory, and training like float32's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import optim
from capibara.core import tree
from capibara.core.types import UserError
from capibara.optim import Optimizer, Schedule
from capibara.optim import state_dtypes as optim_state
from capibara.optim.state_dtypes import Blocks, StateDtype

AXES = {
    "embedding": ("vocab", "embed"),
    "layers": {
        "query": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "up_bias": ("layers", "mlp"),
        "norm": ("layers", "norm"),
    },
}
SIZES = dict(vocab=384, embed=64, layers=2, heads=4, head_dim=16, mlp=256, norm=64)
STORED = [StateDtype.BFLOAT16, StateDtype.INT8]
CONSTANT = Schedule(kind="constant", learning_rate=0.01)


def make_params():
    leaves, structure = jax.tree.flatten(AXES, is_leaf=tree.is_axes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return structure.unflatten(
        [0.1 * jax.random.normal(k, [SIZES[a] for a in axes]) for k, axes in zip(keys, leaves, strict=True)]
    )


def dynamic_map(signed):
    """The 8-bit data type of Dettmers et al. (section 1.3): some digits say the decade, the rest lie evenly."""
    positive = []
    for decade in range(7):
        edges = np.linspace(0.1, 1, (2**decade if signed else 2 ** (decade + 1)) + 1)
        positive += list(10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2)
    return np.sort(np.array([*positive, *([-v for v in positive] if signed else []), 0.0, 1.0]))


class TestRounding:
    @pytest.mark.parametrize("x", [1.0, 1.001, -3.3e-5, 7e20, 0.0])
    def test_bfloat16_is_exact_on_average(self, x):
        rounded = optim_state.round_to_bfloat16(jnp.full(200_000, x), 3)
        assert rounded.dtype == jnp.bfloat16
        neighbours = np.unique(np.float32(rounded))
        assert len(neighbours) <= 2 and np.abs(neighbours - x).max() <= abs(x) * 2**-7
        assert np.mean(np.float64(rounded)) == pytest.approx(np.float32(x), rel=2**-8 * 0.01)

    def test_bfloat16_keeps_what_is_not_finite(self):
        rounded = np.float32(optim_state.round_to_bfloat16(jnp.array([jnp.inf, -jnp.inf, jnp.nan]), 1))
        np.testing.assert_array_equal(rounded, [np.inf, -np.inf, np.nan])

    @pytest.mark.parametrize("signed", [True, False])
    def test_8_bits_are_exact_on_average(self, signed):
        x = jnp.geomspace(1e-4, 1.0, 128)
        x = x * jnp.where(jnp.arange(128) % 2 == 0, 1, -1) if signed else x
        tries = jax.vmap(lambda seed: optim_state.dequantize(optim_state.quantize(x, 0, seed, signed=signed)))(
            jnp.arange(4000)
        )
        deviation = np.std(tries, axis=0) / np.sqrt(4000)
        assert (np.abs(np.mean(tries, axis=0) - x) <= 5 * deviation + 1e-6 * np.abs(x)).all()
        np.testing.assert_array_equal(tries[:, 127], np.full(4000, x[127]))  # the largest of a block is kept

    @pytest.mark.parametrize("signed", [True, False])
    def test_8_bits_err_no_more_than_the_dynamic_map(self, signed):
        """Median and 90th percentile of the relative error, both rounded to the nearest: what the codes can do."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(2000, 128)) * np.exp(1.5 * rng.normal(size=(2000, 128)))
        x = x if signed else np.square(x)
        share = x / np.abs(x).max(1, keepdims=True)
        levels = 127 if signed else 255
        ours = np.sign(share) * (np.round(np.abs(share) ** 0.25 * levels) / levels) ** 4
        table = dynamic_map(signed)
        theirs = table[np.clip(np.searchsorted((table[1:] + table[:-1]) / 2, share), 0, len(table) - 1)]
        ours, theirs = (np.abs(r - share) / np.abs(share) for r in (ours, theirs))
        assert np.median(ours) < np.median(theirs) < 0.06 and np.quantile(ours, 0.9) < np.quantile(theirs, 0.9)

    def test_second_moments_never_become_nothing(self):
        x = jnp.array([1.0, 1e-20, 1e-30, 0.0])
        blocks = optim_state.quantize(x, 0, 0, signed=False)
        assert blocks.codes.dtype == jnp.uint8 and bool((blocks.codes > 0).all())
        empty = optim_state.quantize(jnp.zeros(4), 0, 0, signed=False)
        np.testing.assert_array_equal(optim_state.dequantize(empty), np.zeros(4))

    @pytest.mark.parametrize(
        ("size", "block"), [(64, 64), (4096, 128), (768, 128), (11008, 128), (50257, 29), (1009, 1009)]
    )
    def test_block_size_divides(self, size, block):
        assert optim_state.block_size(size) == block

    def test_no_block_for_a_large_prime(self):
        assert optim_state.block_size(50261) is None

    def test_blocks_lie_along_what_is_sharded_least(self):
        assert [optim_state.block_dimension(a) for a in jax.tree.leaves(AXES["layers"], is_leaf=tree.is_axes)] == [
            1, 1, 2, 3, 2, 1,
        ]  # fmt: skip

    @pytest.mark.parametrize("dtype", [pytest.param(StateDtype.BFLOAT16, marks=pytest.mark.heavy), StateDtype.INT8])
    def test_a_second_moment_decays_although_a_step_is_less_than_a_rounding(self, dtype):
        """b2 0.999: gradients of variance 1, then 5000 updates with variance 0.01. Nearest bfloat16 stays at 1."""
        axes = {"w": ("embed", "mlp")}
        tx = Optimizer(b2=0.999, state_dtype=dtype, clip_norm=None).build(10, axes)
        params = {"w": jnp.zeros((8, 256))}

        def step(state, key_and_size):
            key, size = key_and_size
            grads = {"w": size * jax.random.normal(key, (8, 256))}
            return tx.update(grads, state, params)[1], None

        keys = jax.random.split(jax.random.key(0), 10_000)
        sizes = jnp.repeat(jnp.array([1.0, 0.1]), 5000)
        state = jax.jit(lambda s: jax.lax.scan(step, s, (keys, sizes))[0])(tx.init(params))
        nu = np.asarray(optim_state._decode(state[0].inner).nu["w"])
        want = 0.01 + np.exp(-5.0)  # 0.999**5000 of the old variance
        assert np.median(nu) == pytest.approx(want, rel=0.05) and np.mean(nu) == pytest.approx(want, rel=0.05)


class TestState:
    @pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
    def test_bytes(self, name):
        """Of every moment of a weight: 4, 2, and 1 + 4 / block; biases and norms stay at 4."""
        params, found = jax.eval_shape(make_params), {}
        for dtype in StateDtype:
            state = jax.eval_shape(Optimizer(name=name, state_dtype=dtype).build(10, AXES).init, params)
            found[dtype] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state) if x.size > 100)
        leaves = {tree_name: leaf for tree_name, leaf in zip(tree.path_names(params), jax.tree.leaves(params))}
        moments = {n: 2 if name == "adamw" else 1 for n in leaves}
        if name == "muon":  # its momentum for hidden matrices, adamw for the rest
            moments |= {n: 2 for n in leaves if n in ("embedding", "layers/up_bias", "layers/norm")}
        vectors = {"layers/up_bias", "layers/norm"}
        per_value = {StateDtype.FLOAT32: 4.0, StateDtype.BFLOAT16: 2.0, StateDtype.INT8: 1.0}
        block = {"embedding": 128, "layers/query": 16, "layers/out": 16, "layers/up": 128, "layers/down": 128}
        for dtype, size in per_value.items():
            scale = {n: 4 / block[n] if dtype is StateDtype.INT8 else 0 for n in block}
            want = sum(moments[n] * leaf.size * (4 if n in vectors else size + scale[n]) for n, leaf in leaves.items())
            assert found[dtype] == want

    @pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
    @pytest.mark.parametrize("dtype", STORED)
    def test_axes_are_the_parameters(self, name, dtype):
        tx, params = Optimizer(name=name, state_dtype=dtype).build(10, AXES), jax.eval_shape(make_params)
        state, axes = jax.eval_shape(tx.init, params), optim.state_axes(tx, params, AXES)

        def check(leaf, names):
            assert tree.is_axes(names) and len(names) == leaf.ndim
            wrong = [n for n, size in zip(names, leaf.shape, strict=True) if n is not None and size != SIZES[n]]
            assert len(wrong) <= (leaf.dtype == jnp.float32)  # of scales, the dimension of the blocks
            assert leaf.size <= 3 or None not in names

        jax.tree.map(check, state, axes)
        names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, Blocks))
        blocks = [n for n in names if isinstance(n, Blocks)]
        assert all(n.codes == n.scales for n in blocks) and bool(blocks) == (dtype is StateDtype.INT8)

    def test_adafactor_is_refused(self):
        with pytest.raises(UserError, match="state_dtype is int8, but adafactor's .* set float32"):
            Optimizer(name="adafactor", state_dtype="int8")


class TestNoise:
    def test_depends_on_the_index_and_the_seed_alone(self):
        """Not on the mesh, nor on what ran before: a run that is resumed rounds as it would have."""
        x = jnp.full((64, 256), 1.003)
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("a", "b")))
        want = optim_state.round_to_bfloat16(x, 5)
        np.testing.assert_array_equal(jax.jit(optim_state.round_to_bfloat16)(sharded, 5), want)
        other = optim_state.round_to_bfloat16(x, 6)
        assert 0.3 < float(jnp.mean(other != want)) < 0.6  # 1.003 is 0.38 of the way up: 2 * 0.38 * 0.62 differ

    def test_is_even_and_unrelated_between_neighbours(self):
        u = np.asarray(optim_state._uniform((1000, 1000), 7), np.float64)
        counts = np.histogram(u, bins=100, range=(0, 1))[0]
        assert np.sum(np.square(counts - 10_000) / 10_000) < 160  # chi squared of 99 degrees, p = 1e-4
        later = np.asarray(optim_state._uniform((1000, 1000), 8), np.float64)
        for other in (np.roll(u, 1, 0), np.roll(u, 1, 1), later):
            assert abs(np.corrcoef(u.ravel(), other.ravel())[0, 1]) < 0.005  # five deviations


class TestLearning:
    @pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
    @pytest.mark.parametrize("dtype", [pytest.param(StateDtype.BFLOAT16, marks=pytest.mark.heavy), StateDtype.INT8])
    def test_learns_as_with_float32(self, name, dtype):
        assert final_loss(name, dtype) == pytest.approx(final_loss(name, StateDtype.FLOAT32), rel=0.005)


@functools.cache
def final_loss(name, dtype, steps=300):
    """Of a two-layer classifier over 32 classes of clustered points, the mean of the last 20 steps."""
    axes = {"up": ("embed", "mlp"), "bias": ("mlp",), "down": ("mlp", "vocab")}
    keys = jax.random.split(jax.random.key(1), 3)
    params = {
        "up": jax.random.normal(keys[0], (32, 256)) / 32**0.5,
        "bias": jnp.zeros(256),
        "down": jax.random.normal(keys[1], (256, 32)) / 16,
    }
    centres = jax.random.normal(keys[2], (32, 32))
    rate = {"adamw": 2e-3, "lion": 3e-4, "muon": 5e-3, "sgd": 0.05}[name]
    schedule = Schedule(kind="constant", learning_rate=rate, warmup_steps=10)
    tx = Optimizer(name=name, schedule=schedule, b2=0.999, state_dtype=dtype).build(steps, axes)

    def loss(params, key):
        classes = jax.random.randint(key, (256,), 0, 32)
        x = centres[classes] + 1.2 * jax.random.normal(jax.random.fold_in(key, 1), (256, 32))
        logits = jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), classes[:, None], 1))

    def step(carry, key):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, key)
        updates, state = tx.update(grads, state, params)
        return (jax.tree.map(jnp.add, params, updates), state), value

    keys = jax.random.split(jax.random.key(2), steps)
    losses = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), keys)[1])(params)
    assert losses[-20:].mean() < 0.5 * losses[0]
    return float(losses[-20:].mean())
