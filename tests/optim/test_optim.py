"""Optimizers: they learn, mask, stack and shard as they say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara import optim
from capibara.core import tree
from capibara.core.types import UserError
from capibara.models import api
from capibara.optim import Adafactor, Optimizer, OptimizerName, Schedule, ScheduleKind, matrices

AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "position": {"table": ("position", "embed")},
    "layers": {
        "query": {"kernel": ("layers", "embed", "heads", "head_dim"), "bias": ("layers", "heads", "head_dim")},
        "out": {"kernel": ("layers", "heads", "head_dim", "embed"), "bias": ("layers", "embed")},
        "mlp": {"kernel": ("layers", "embed", "mlp")},
        "experts": {"kernel": ("layers", "experts", "embed", "mlp"), "bias": ("layers", "experts", "mlp")},
        "router": {"kernel": ("layers", "embed", "experts")},
        "norm": {"scale": ("layers", "embed")},
    },
    "final_norm": {"scale": ("norm",)},
    "head": {"kernel": ("embed", "vocab")},
}
SIZES = dict(vocab=20, position=9, embed=8, heads=2, head_dim=4, mlp=12, layers=3, experts=2, norm=8)
CONSTANT = Schedule(kind=ScheduleKind.CONSTANT, learning_rate=0.1)


def shape_of(axes):
    return tuple(SIZES[a] for a in axes)


def make_params(seed=0, axes=AXES):
    leaves, treedef = jax.tree.flatten(axes, is_leaf=tree.is_axes)
    rng = np.random.default_rng(seed)
    return treedef.unflatten([jnp.asarray(rng.normal(size=shape_of(a)), jnp.float32) for a in leaves])


def names_where(tree, is_leaf=None):
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in flat if leaf}


MATRICES = {
    "layers/query/kernel", "layers/out/kernel", "layers/mlp/kernel", "layers/experts/kernel", "layers/router/kernel",
}  # fmt: skip
LOOKUPS = {"embedding/table", "position/table", "head/kernel"}


class TestSchedule:
    @pytest.mark.parametrize(
        ("schedule", "points"),
        [
            (dict(kind="constant"), {0: 1.0, 50: 1.0, 99: 1.0}),
            (dict(kind="constant", warmup_steps=4), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0}),
            (dict(kind="constant", warmup_fraction=0.04), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0}),
            (dict(kind="constant", warmup_fraction=0.04, warmup_steps=2), {0: 0.5, 1: 1.0, 3: 1.0}),
            (dict(kind="cosine", warmup_steps=20), {9: 0.5, 20: 1.0, 40: 0.1 + 0.9 * 0.8535534, 60: 0.55, 100: 0.1}),
            (dict(kind="cosine", decay_steps=50, final_fraction=0.0), {25: 0.5, 50: 0.0, 100: 0.0}),
            (dict(kind="linear", warmup_steps=20, final_fraction=0.2), {20: 1.0, 60: 0.6, 100: 0.2, 120: 0.2}),
            (dict(kind="wsd", warmup_steps=10, final_fraction=0.0), {4: 0.5, 10: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
            (dict(kind="wsd", decay_steps=50, final_fraction=0.0), {50: 1.0, 75: 0.5, 100: 0.0}),
            (dict(kind="rsqrt", warmup_steps=16), {7: 0.5, 15: 1.0, 16: 1.0, 64: 0.5, 1600: 0.1}),
        ],
    )
    def test_known_points(self, schedule, points):
        function = Schedule(learning_rate=2.0, **schedule).build(100)
        for step, scale in points.items():
            assert float(function(step)) == pytest.approx(2.0 * scale, rel=1e-5, abs=1e-7), step

    @pytest.mark.parametrize("kind", list(ScheduleKind))
    def test_under_jit_as_outside(self, kind):
        function = Schedule(kind=kind, warmup_steps=3).build(10)
        for step in range(12):
            value = jax.jit(function)(jnp.int32(step))
            assert value.dtype == jnp.float32 and value.shape == ()
            np.testing.assert_allclose(value, function(step), rtol=1e-6)

    @pytest.mark.parametrize("kind", list(ScheduleKind))
    @pytest.mark.parametrize("total_steps", [1, 2, 3])
    def test_very_short_runs(self, kind, total_steps):
        function = Schedule(kind=kind, warmup_fraction=0.01).build(total_steps)
        assert all(0 < float(function(step)) <= 3e-4 * 1.0001 for step in range(total_steps))

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            (dict(warmup_steps=-1), "warmup_steps is -1"),
            (dict(learning_rate=0.0), "learning_rate is 0.0"),
            (dict(learning_rate=float("nan")), "learning_rate is nan"),
            (dict(learning_rate=1e30), r"learning_rate is 1e\+30, must be above 0 and at most 10"),
            (dict(final_fraction=1.5), "final_fraction is 1.5"),
            (dict(decay_steps=0), "decay_steps is 0"),
            (dict(kind="triangle"), "kind .*triangle.*'cosine'"),
        ],
    )
    def test_bad_fields(self, fields, word):
        with pytest.raises(UserError, match=word) as error:
            Schedule(**fields)
        assert "\n" not in str(error.value)

    def test_warmup_longer_than_run(self):
        with pytest.raises(UserError, match=r"warmup_steps \(2000\) must not exceed the run's 1000 steps: try 100"):
            Schedule(warmup_steps=2000).build(1000)

    def test_wsd_decay_longer_than_rest(self):
        for fields, named in [
            (dict(warmup_steps=50, decay_steps=60), r"warm-up \(warmup_steps: 50\) and decay \(decay_steps: 60\)"),
            (dict(warmup_steps=90), r"warm-up \(warmup_steps: 90\) and decay \(decay_fraction = 0.2: 20\)"),
            (dict(warmup_fraction=0.5, decay_steps=60), r"\(warmup_fraction = 0.5: 50\) and decay \(decay_steps: 60\)"),
        ]:
            with pytest.raises(UserError, match=named):
                Schedule(kind="wsd", **fields).build(100)

    def test_wsd_shares_fit_into_the_run(self):
        named = r"warmup_fraction \(0.9\) and decay_fraction \(0.2\) must be at most 1 together"
        with pytest.raises(UserError, match=named):
            Schedule(kind="wsd", warmup_fraction=0.9)
        Schedule(kind="cosine", warmup_fraction=0.9)  # has no decay_fraction
        # Both shares of 3 steps round up to 2: the decay gives way, so the peak is reached.
        function = Schedule(kind="wsd", warmup_fraction=0.5, decay_fraction=0.5, learning_rate=1.0).build(3)
        assert float(function(1)) == 1.0 and float(function(2)) == pytest.approx(1.0)

    def test_no_steps(self):
        with pytest.raises(UserError, match="total_steps is 0"):
            Schedule().build(0)


class TestMasks:
    def test_decay_only_matrices(self):
        assert names_where(optim.decay_mask(AXES)) == MATRICES | LOOKUPS

    def test_hidden_matrices(self):
        found = jax.tree.map(optim.hidden_matrix, AXES, is_leaf=tree.is_axes)
        numbers = lambda x: isinstance(x, optax.contrib.MuonDimensionNumbers)
        assert names_where(found, is_leaf=numbers) == MATRICES
        layers = found["layers"]
        assert layers["query"]["kernel"] == ((1,), (2, 3))
        assert layers["out"]["kernel"] == ((1, 2), (3,))
        assert layers["experts"]["kernel"] == ((2,), (3,))
        assert layers["router"]["kernel"] == ((1,), (2,))
        assert optim.hidden_matrix(("embed", "embed")) == ((0,), (1,))
        assert optim.hidden_matrix(("mlp", "embed")) == ((0,), (1,))

    def test_each_expert_of_a_model_is_a_matrix_of_its_own_and_its_bias_is_none(self):
        """By the names that models give their axes."""
        sizes = dict(vocab_size=64, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32, bias="all")
        model = api.build(api.DecoderConfig(**sizes, moe=api.Moe(num_experts=4, top_k=2, bias="all")))
        mlp = model.axes["layers"]["mlp"]
        assert {name for name in mlp if name.endswith("bias")} == {"up_bias", "gate_bias", "down_bias", "router_bias"}
        found = {name: optim.hidden_matrix(axes) for name, axes in mlp.items()}
        assert {name: dims and tuple(dims) for name, dims in found.items()} == {
            **dict.fromkeys(("up", "gate", "down"), ((2,), (3,))),
            "router": ((1,), (2,)),
            **dict.fromkeys(("up_bias", "gate_bias", "down_bias", "router_bias")),
        }
        assert names_where(optim.decay_mask(mlp)) == {"up", "gate", "down", "router"}
        assert {matrices.own_dims(axes) for name, axes in mlp.items() if name in ("up", "gate", "down")} == {(2, 3)}

    @pytest.mark.parametrize("name", list(OptimizerName))
    def test_weight_decay_reaches_matrices_only(self, name):
        """With zero gradients only decay moves the weights, by learning rate times decay."""
        optimizer = Optimizer(name=name, schedule=CONSTANT, weight_decay=0.5)
        params, tx = make_params(), optimizer.build(10, AXES)
        updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        expected = jax.tree.map(lambda p, d: -0.1 * 0.5 * p * d, params, optim.decay_mask(AXES))
        jax.tree.map(lambda u, e: np.testing.assert_allclose(u, e, rtol=1e-6, atol=1e-7), updates, expected)


def orthogonalised(matrix):
    """Five steps of Newton-Schulz, as in github.com/KellerJordan/Muon."""
    x = matrix / np.linalg.norm(matrix)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def rms_of(x, axes):
    stacked = 2 if axes[:2] == ("layers", "experts") else int(axes[0] == "layers")
    own = tuple(range(stacked, x.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=own, keepdims=True))


def take_step(optimizer, axes, params, grads, steps=3):
    tx = optimizer.build(10, axes)

    @jax.jit
    def one(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = one(params, state)
    return params


class TestRules:
    @pytest.mark.parametrize("name", list(OptimizerName))
    def test_learns_a_regression(self, name):
        """A two-layer linear model with a bias finds a linear map; the loss falls at least 50 times."""
        axes = {"in": ("embed", "mlp"), "bias": ("mlp",), "out": ("mlp", "embed")}
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=(64, 8)), jnp.float32)
        y = x @ jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) + 0.5
        params = jax.tree.map(lambda p: 0.3 * p, make_params(1, axes))
        rate = {"adamw": 0.03, "adafactor": 0.1, "lion": 0.01, "muon": 0.1, "sgd": 0.03}[name]
        schedule = Schedule(kind="cosine", learning_rate=rate, warmup_steps=10)
        tx = Optimizer(name=name, schedule=schedule, weight_decay=0.0, factored_min_size=4).build(300, axes)

        def loss(p):
            return jnp.mean((x @ p["in"] @ p["out"] + p["bias"] @ p["out"] - y) ** 2)

        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        losses = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=300))(params)[1]
        assert losses[-1] < losses[0] / 50, (losses[0], losses[-1])

    @pytest.mark.parametrize("name", list(OptimizerName))
    def test_stacked_layers_equal_separate_layers(self, name):
        """Scanned or not, the weights move alike (Muon's matrices and Adafactor's scales are per layer)."""
        optimizer = Optimizer(name=name, schedule=CONSTANT, factored_min_size=4, clip_norm=None)
        params, grads = make_params(0)["layers"], make_params(1)["layers"]
        axes = AXES["layers"]
        stacked = take_step(optimizer, axes, params, grads)
        for layer in range(SIZES["layers"]):
            pick = lambda tree: jax.tree.map(lambda x: x[layer], tree)
            single_axes = jax.tree.map(lambda a: a[1:], axes, is_leaf=tree.is_axes)
            single = take_step(optimizer, single_axes, pick(params), pick(grads))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), pick(stacked), single)

    def test_muon_is_orthogonal_with_the_stated_rms(self):
        optimizer = Optimizer(name="muon", schedule=CONSTANT, weight_decay=0.0, muon_rms=0.2, clip_norm=None)
        params, grads = make_params(0), make_params(1)
        tx = optimizer.build(10, AXES)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        query = np.asarray(updates["layers"]["query"]["kernel"]).reshape(3, 8, 8) / 0.1
        for matrix in query:
            singular = np.linalg.svd(matrix / (0.2 * np.sqrt(8)), compute_uv=False)
            assert singular.min() > 0.5 and singular.max() < 1.4
        # The head moves as under AdamW, whose first update is the gradient's sign, softened by eps.
        head = grads["head"]["kernel"]
        np.testing.assert_allclose(updates["head"]["kernel"], -0.1 * head / (jnp.abs(head) + 1e-8), rtol=1e-4)

    @pytest.mark.parametrize("nesterov", [True, False])
    def test_muon_is_the_published_rule(self, nesterov):
        """Each layer's and expert's whole matrix, as Jordan's Newton-Schulz in NumPy has it, times 0.2 sqrt(max(in, out))."""
        optimizer = Optimizer(name="muon", schedule=CONSTANT, weight_decay=0.0, clip_norm=None, nesterov=nesterov)
        params, grads = make_params(0), make_params(1)
        tx = optimizer.build(10, AXES)
        layers = jax.jit(tx.update)(grads, tx.init(params), params)[0]["layers"]
        given = grads["layers"]
        for name, matrix in {
            "query": lambda x: x.reshape(3, 8, 2 * 4),
            "out": lambda x: x.reshape(3, 2 * 4, 8),
            "mlp": lambda x: x,  # [3, 8, 12]
            "experts": lambda x: x.reshape(3 * 2, 8, 12),
            "router": lambda x: x,  # [3, 8, 2]
        }.items():
            got, of = np.asarray(matrix(layers[name]["kernel"])), np.asarray(matrix(given[name]["kernel"]), np.float64)
            want = [-0.1 * 0.2 * np.sqrt(max(one.shape)) * orthogonalised(one) for one in of]
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-5, err_msg=name)

    def test_muon_of_heads_smaller_than_the_model(self):
        """[embed, kv_heads, head_dim] is one matrix [8, 4], whatever its three dimensions are; its scale is of the 8."""
        axes = {"key": ("layers", "embed", "kv_heads", "head_dim"), "out": ("layers", "heads", "head_dim", "embed")}
        grads = {
            "key": np.random.default_rng(0).normal(size=(2, 8, 2, 2)).astype(np.float32),
            "out": np.random.default_rng(1).normal(size=(2, 4, 4, 8)).astype(np.float32),
        }
        tx = Optimizer(name="muon", schedule=CONSTANT, weight_decay=0.0, clip_norm=None).build(10, axes)
        updates = tx.update(jax.tree.map(jnp.asarray, grads), tx.init(grads), grads)[0]
        for name, shape in (("key", (8, 4)), ("out", (16, 8))):
            want = [
                -0.1 * 0.2 * np.sqrt(max(shape)) * orthogonalised(np.float64(one).reshape(shape)) for one in grads[name]
            ]
            np.testing.assert_allclose(np.asarray(updates[name]).reshape(2, *shape), want, rtol=2e-3, atol=2e-5)

    @pytest.mark.parametrize("name", ["muon", "adafactor"])
    def test_shards_change_nothing(self, name):
        """The rule is of whole matrices, whatever part of them a device has."""
        axes = {"q": ("layers", "embed", "heads", "head_dim"), "down": ("layers", "mlp", "embed")}
        shapes = {"q": (2, 16, 4, 4), "down": (2, 24, 16)}
        rng = np.random.default_rng(0)
        params, grads = (
            {key: jnp.asarray(rng.normal(size=shape), jnp.float32) for key, shape in shapes.items()} for _ in range(2)
        )
        optimizer = Optimizer(name=name, schedule=CONSTANT, weight_decay=0.0, factored_min_size=16)
        tx = optimizer.build(10, axes)
        want = jax.jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(params, grads)
        mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        specs = {"q": jax.P(None, "fsdp", "tensor"), "down": jax.P(None, "tensor", "fsdp")}
        lie = lambda of: {key: jax.device_put(x, jax.NamedSharding(mesh, specs[key])) for key, x in of.items()}
        got = jax.jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(lie(params), lie(grads))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)

    def test_adafactor_of_dimensions_is_optax(self):
        """The rule of earlier runs, to the bit, with its state under the same names."""
        optimizer = Optimizer(
            name="adafactor", schedule=CONSTANT, factored_min_size=4, adafactor=Adafactor(factoring="dimensions")
        )
        tx = optimizer.build(10, AXES)
        old = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_factored_rms(min_dim_size_to_factor=4),
            optax.stateless(lambda u, p: jax.tree.map(lambda u, a: u / jnp.maximum(1.0, rms_of(u, a)), u, AXES)),
            optax.stateless(lambda u, p: jax.tree.map(lambda u, p, a: u * jnp.maximum(rms_of(p, a), 1e-3), u, p, AXES)),
            optax.add_decayed_weights(0.1, mask=optim.decay_mask(AXES)),
            optax.scale_by_learning_rate(CONSTANT.build(10)),
        )
        params, grads = make_params(0), make_params(1)
        states = tx.init(params), old.init(params)
        assert tree.path_names(states[0]) == tree.path_names(states[1])
        for _ in range(3):
            (ours, mine), (theirs, kept) = (
                jax.jit(t.update)(grads, state, params) for t, state in zip((tx, old), states, strict=True)
            )
            states = mine, kept
            jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves((ours, mine)), jax.tree.leaves((theirs, kept)))

    def test_clip_norm(self):
        axes, params = {"w": ("embed",)}, {"w": jnp.zeros(2)}
        grads = {"w": jnp.array([30.0, 40.0])}
        sgd = Optimizer(name="sgd", schedule=CONSTANT, momentum=0.0, clip_norm=5.0)
        np.testing.assert_allclose(take_step(sgd, axes, params, grads, 1)["w"], [-0.3, -0.4], rtol=1e-5)
        free = dataclasses.replace(sgd, clip_norm=None)
        np.testing.assert_allclose(take_step(free, axes, params, grads, 1)["w"], [-3.0, -4.0], rtol=1e-5)

    def test_adafactor_without_parameter_scale(self):
        axes, params, grads = {"w": ("embed",)}, {"w": jnp.full(4, 5.0)}, {"w": jnp.ones(4)}
        scaled = Optimizer(name="adafactor", schedule=CONSTANT, weight_decay=0.0)
        plain = dataclasses.replace(scaled, parameter_scale=False)
        np.testing.assert_allclose(take_step(scaled, axes, params, grads, 1)["w"], 5.0 - 0.5, rtol=1e-4)
        np.testing.assert_allclose(take_step(plain, axes, params, grads, 1)["w"], 5.0 - 0.1, rtol=1e-4)

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            (dict(b1=1.0), "b1 is 1.0"),
            (dict(momentum=-0.1), "momentum is -0.1"),
            (dict(clip_norm=0.0), "clip_norm is 0.0, must be finite and above 0: None is no limit"),
            (dict(weight_decay=-1.0), "weight_decay is -1.0"),
            (dict(weight_decay=float("inf")), "weight_decay is inf, must be finite"),
            (dict(eps=float("inf")), "eps is inf, must be finite"),
            (dict(eps=0.0), "eps is 0.0"),
            (dict(factored_min_size=1), "factored_min_size is 1"),
            (dict(name="adam"), "did you mean 'adamw'"),
            (
                dict(name="adafactor", adafactor=Adafactor(weight_decay_rate=0.1)),
                "exclude each other: set Optimizer.weight",
            ),
        ],
    )
    def test_bad_fields(self, fields, word):
        with pytest.raises(UserError, match=word):
            Optimizer(**fields)


class TestAdafactorFields:
    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            (dict(clipping_threshold=0.0), "clipping_threshold is 0.0, must be finite and above 0"),
            (dict(step_offset=-1), "step_offset is -1, must not be negative"),
            (dict(weight_decay_rate=-1.0), "weight_decay_rate is -1.0"),
            (dict(factor_map=(("(", ("row", "column")),)), "must be a regular expression"),
            (dict(factor_map=(("q", ("row", "col")),)), "the role 'col' for 'q', must be one of row, column"),
            (dict(factor_map=(("q", ("row", "none")),)), "must have both rows and columns, or neither"),
            (dict(factoring="dimensions", factor_map=(("q", ("none",)),)), "no effect with factoring 'dimensions'"),
            (dict(factoring="matrix"), "did you mean 'matrices'"),
        ],
    )
    def test_bad_fields(self, fields, word):
        with pytest.raises(UserError, match=word):
            Adafactor(**fields)


class TestStateAxes:
    @pytest.mark.parametrize("name", list(OptimizerName))
    @pytest.mark.parametrize("clip_norm", [None, 1.0])
    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    def test_every_leaf_has_its_axes(self, name, clip_norm, weight_decay):
        optimizer = Optimizer(
            name=name, clip_norm=clip_norm, weight_decay=weight_decay, factored_min_size=4, momentum=0.5
        )
        tx, params = optimizer.build(10, AXES), make_params()
        abstract = jax.eval_shape(lambda: params)
        result = optim.state_axes(tx, abstract, AXES)
        state = jax.eval_shape(tx.init, abstract)
        sizes = {**SIZES, None: None}
        jax.tree.map(lambda leaf, axes: self.check_leaf(leaf, axes, sizes), state, result)
        assert len(jax.tree.leaves(result, is_leaf=tree.is_axes)) == len(jax.tree.leaves(state))

    @staticmethod
    def check_leaf(leaf, axes, sizes):
        assert tree.is_axes(axes) and len(axes) == leaf.ndim
        assert all(name is None or sizes[name] == size for name, size in zip(axes, leaf.shape, strict=True))
        assert leaf.size <= 3 or None not in axes, (leaf, axes)

    def test_adamw_moments_have_the_parameters_axes(self):
        tx = Optimizer(clip_norm=None).build(10, AXES)
        result = optim.state_axes(tx, jax.eval_shape(make_params), AXES)
        assert result[0].mu == AXES and result[0].nu == AXES and result[0].count == ()

    def test_adafactor_square_matrices(self):
        """Rows and columns of a square weight have one shape: only their names tell them apart."""
        axes = {"w": ("layers", "embed", "norm")}
        params = make_params(0, axes)
        tx = Optimizer(name="adafactor", factored_min_size=4, clip_norm=None).build(10, axes)
        result = optim.state_axes(tx, params, axes)[0]
        grads = {"w": params["w"].at[:, 0, :].set(100.0)}
        state = tx.update(grads, tx.init(params), params)[1][0]
        for field in ("v_row", "v_col"):
            names, moment = getattr(result, field)["w"], getattr(state, field)["w"]
            large_first_embed = bool((moment[:, 0] > 5 * moment[:, 1:].max(axis=1)).all())
            assert names == (("layers", "embed") if large_first_embed else ("layers", "norm"))
        assert {result.v_row["w"], result.v_col["w"]} == {("layers", "embed"), ("layers", "norm")}

    def test_attention_is_factored_by_what_its_heads_make_together(self):
        """T5 1.1 XXL, whose heads have 64 features: 18 GiB of moments where each head has its own, 0.02 here."""
        axes = {"query": ("layers", "embed", "heads", "head_dim"), "out": ("layers", "heads", "head_dim", "embed")}
        shapes = {"query": (24, 4096, 64, 64), "out": (24, 64, 64, 4096)}
        abstract = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        optimizer = Optimizer(name="adafactor", clip_norm=None)
        sizes = {}
        for factoring in ("matrices", "stacked", "dimensions"):
            tx = dataclasses.replace(optimizer, adafactor=Adafactor(factoring=factoring)).build(10, axes)
            sizes[factoring] = tree.byte_count(jax.eval_shape(tx.init, abstract))
        assert sizes["dimensions"] > 2 * 24 * 4 * 4096**2
        assert sizes["matrices"] == sizes["stacked"] == 4 * (2 * (2 * 24 * 4096 + 1) + 2)
        found = optim.state_axes(optimizer.build(10, axes), abstract, axes)[0]
        assert found.v_row == {"query": ("layers", "embed"), "out": ("layers", "embed")}
        assert found.v_col == {name: ("layers", "heads", "head_dim") for name in axes}

    def test_adafactor_by_roles_of_the_user(self):
        roles = (("in$", ("row", "none", "column")), ("gate", ("batch", "batch", "none")))
        optimizer = Optimizer(name="adafactor", clip_norm=None, adafactor=Adafactor(factor_map=roles))
        axes = {"in": ("embed", "stack", "mlp"), "gate": ("layers", "embed", "mlp"), "norm": ("embed",)}
        abstract = {
            "in": jax.ShapeDtypeStruct((8, 3, 4), jnp.float32),
            "gate": jax.ShapeDtypeStruct((3, 8, 12), jnp.float32),
            "norm": jax.ShapeDtypeStruct((8,), jnp.float32),
        }
        tx = optimizer.build(10, axes)
        state, names = jax.eval_shape(tx.init, abstract)[0], optim.state_axes(tx, abstract, axes)[0]
        assert (state.v_row["in"].shape, state.v_col["in"].shape) == ((8, 3), (3, 4))
        assert (names.v_row["in"], names.v_col["in"]) == (("embed", "stack"), ("stack", "mlp"))
        assert (
            state.v["gate"].shape == (3, 8, 12) and names.v["gate"] == axes["gate"] and names.v_row["gate"] == (None,)
        )
        with pytest.raises(UserError, match="factor_map has 3 roles for in, which has 2 dimensions"):
            tx = optimizer.build(10, {"in": ("embed", "mlp")})
            jax.eval_shape(tx.init, {"in": abstract["norm"].update(shape=(8, 4))})

    def test_muon_masks(self):
        tx = Optimizer(name="muon", clip_norm=None).build(10, AXES)
        inner = optim.state_axes(tx, make_params(), AXES)[0].inner_states
        muon, adam = inner["muon"].inner_state[0], inner["adamw"].inner_state
        assert muon.mu["layers"]["query"]["kernel"] == AXES["layers"]["query"]["kernel"]
        assert isinstance(muon.mu["embedding"]["table"], optax.MaskedNode)
        assert adam.nu["embedding"]["table"] == ("vocab", "embed")
        assert muon.ns_coeffs == (None,)

    def test_a_parameter_whose_path_ends_another(self):
        axes = {"kernel": ("embed", "mlp"), "a": {"kernel": ("mlp", "embed")}}
        tx = Optimizer(clip_norm=None).build(10, axes)
        assert optim.state_axes(tx, make_params(0, axes), axes)[0].mu == axes

    def test_params_and_axes_differ(self):
        tx = Optimizer().build(10, {"w": ("embed",)})
        with pytest.raises(ValueError, match="differ in"):
            optim.state_axes(tx, {"w": jnp.zeros(2)}, {"v": ("embed",)})
