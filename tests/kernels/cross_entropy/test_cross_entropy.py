"""Each form of the cross entropy against the plain formula, and that against optax's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara import sharding
from capibara.kernels.cross_entropy import by_tokens, by_vocabulary, dispatch, reference
from capibara.kernels.cross_entropy.dispatch import cross_entropy, token_log_probabilities
from capibara.kernels.cross_entropy.terms import Softmax, Terms
from capibara.sharding import Plan, Rules

V, D = 40, 16
FORMS = ["1 block", "4 blocks", "1 part", "5 parts", "2 parts and a rest"]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Makes a form the one for 24 tokens, whatever the rule says."""
    count = int(request.param[0])
    monkeypatch.setattr(by_tokens, "BLOCK_BYTES", {"cpu": 24 * V * 4 // count})
    if "part" in request.param:
        monkeypatch.setattr(dispatch, "by_vocabulary_on", lambda *_: True)
        monkeypatch.setattr(by_vocabulary, "PART_BYTES", 4 * 24 * {1: V, 5: 9, 2: 18}[count])
        monkeypatch.setattr(by_vocabulary, "_FEWEST", 1)
        monkeypatch.setattr(by_vocabulary, "LANES", 16 if "rest" in request.param else 4)
    return request.param


def case(dtype=jnp.float32, rows=3):
    """Hidden states, head, targets and weights; some weights are 0."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(rows, 8, D)), dtype)
    head = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    weights = jnp.asarray(rng.integers(0, 3, (rows, 8)), jnp.float32)
    return hidden, head, jnp.asarray(rng.integers(0, V, (rows, 8)), jnp.int32), weights


def assert_near(got, want, dtype=jnp.float32):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=(1e-5 if dtype == jnp.float32 else 2e-2) * np.abs(b).max(), rtol=1e-5)


def optax_loss(hidden, head, targets, weights, smoothing):
    logits = hidden.astype(jnp.float32) @ head.astype(hidden.dtype).astype(jnp.float32).T
    wanted = jnp.where(jax.nn.one_hot(targets, V) > 0, 1 - smoothing, smoothing / (V - 1))
    nll = optax.softmax_cross_entropy(logits, wanted) - jnp.sum(jax.scipy.special.entr(wanted), -1)
    z = jnp.square(jax.nn.logsumexp(logits, -1))
    correct = jnp.sum(jnp.where(logits.argmax(-1) == targets, weights, 0.0))
    return jnp.sum(nll * weights) + 0.3 * jnp.sum(z * weights), correct


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy_and_its_gradients_equal_optax(dtype, form, smoothing):
    hidden, head, targets, weights = case(dtype)

    def ours(hidden, head):
        return cross_entropy(hidden, head, targets, weights, z_loss=0.3, label_smoothing=smoothing)

    grad = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (got, sums), got_grads = grad(ours)(hidden, head)
    plain = functools.partial(optax_loss, targets=targets, weights=weights, smoothing=smoothing)
    (want, correct), want_grads = grad(plain)(hidden, head)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert sums.correct == correct and sums.weight == weights.sum()
    total = sums.nll + 0.3 * sums.z + (0.0 if sums.smoothing is None else sums.smoothing)
    np.testing.assert_allclose(total, got, rtol=1e-5)
    assert [x.dtype for x in got_grads] == [dtype, jnp.float32]
    assert_near(got_grads, want_grads, dtype)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_plain_formula_equals_optax(smoothing):
    hidden, head, targets, weights = case()
    grad = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (got, sums), got_grads = grad(reference.cross_entropy)(
        hidden, head, targets, weights, Terms(0.3, smoothing), Softmax()
    )
    (want, correct), want_grads = grad(optax_loss)(hidden, head, targets, weights, smoothing)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert sums[2] == correct
    assert_near(got_grads, want_grads)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_soft_cap_and_the_terms_have_the_plain_gradients(form, dtype):
    hidden, head, targets, weights = case(dtype)
    got = jax.value_and_grad(
        lambda *x: cross_entropy(*x, targets, weights, z_loss=0.1, label_smoothing=0.2, soft_cap=3.0)[0], (0, 1)
    )(hidden, head)
    want = jax.value_and_grad(
        lambda *x: reference.cross_entropy(*x, targets, weights, Terms(0.1, 0.2), Softmax(3.0))[0], (0, 1)
    )(hidden, head)
    assert_near(got, want, dtype)


def test_log_probabilities_have_the_plain_gradients(form):
    """Of ids that cannot be the logit is -inf, in whole parts of the vocabulary too."""
    hidden, head, targets, weights = case()
    targets, softmax = targets % 14, Softmax(3.0, 0.7, 14)
    ours = functools.partial(token_log_probabilities, soft_cap=3.0, temperature=0.7, usable=14)
    got = jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(ours(*x, targets)) * weights), (0, 1))(hidden, head)
    want = jax.value_and_grad(
        lambda *x: jnp.sum(jnp.sin(reference.token_log_probabilities(*x, targets, softmax)) * weights), (0, 1)
    )(hidden, head)
    assert_near(got, want)


def test_a_tied_head_has_both_gradients(form):
    _, head, targets, weights = case()

    def gradient(loss):
        return jax.grad(lambda head: loss(jnp.sin(head[targets]), head)[0])(head)

    got = gradient(lambda hidden, head: cross_entropy(hidden, head, targets, weights))
    want = gradient(lambda *x: reference.cross_entropy(*x, targets, weights, Terms(), Softmax()))
    assert_near(got, want)


def test_what_has_no_weight_may_have_no_id(form):
    hidden, head, *_ = case(rows=1)
    targets, weights = np.array([[3, -100, 7, 40]], np.int32), jnp.asarray([[1.0, 0.0, 1.0, 0.0]])

    def loss(targets):
        return jax.value_and_grad(lambda *x: cross_entropy(*x, targets, weights)[0], (0, 1))(hidden[:, :4], head)

    jax.tree.map(np.testing.assert_array_equal, loss(targets), loss(np.array([[3, 0, 7, 0]], np.int32)))


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2, "stage": 2}])
@pytest.mark.parametrize("length, reduced_bytes", [(8, 2**20), (8, 64), (32, 2**20), (32, 64), (8, None)])
def test_every_mesh_has_the_gradients_of_one_device(axes, reduced_bytes, length, monkeypatch):
    """The head's gradient is reduced to its shards, in one piece or several; that of few tokens is made then.

    None: by parts of the vocabulary, of a head whose shards are no whole rows of a register.
    """
    monkeypatch.setattr(by_tokens, "REDUCED_BYTES", reduced_bytes)
    monkeypatch.setattr(by_tokens, "BLOCK_BYTES", {"cpu": 4 * 40 * 16})
    if reduced_bytes is None:
        monkeypatch.setattr(dispatch, "by_vocabulary_on", lambda *_: True)
        monkeypatch.setattr(by_vocabulary, "PART_BYTES", 4 * 32 * 9)
        monkeypatch.setattr(by_vocabulary, "_FEWEST", 1)
        monkeypatch.setattr(by_vocabulary, "LANES", 4)
        monkeypatch.setattr(by_vocabulary, "_SUBLANES", {"cpu": 12})
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(8, length, 32)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(40, 32)), jnp.float32)
    targets, weights = rng.integers(0, 40, (8, length)), jnp.asarray(rng.integers(0, 2, (8, length)), jnp.float32)
    mesh, rules = sharding.make_mesh(Plan(batch_size=8, **{"fsdp": 1} | axes)), Rules()

    def on_mesh(hidden, head):
        with sharding.activate(mesh, rules):
            return cross_entropy(hidden, head, targets, weights, z_loss=0.1)[0]

    def plain(hidden, head):
        return reference.cross_entropy(hidden, head, targets, weights, Terms(0.1), Softmax())[0]

    want = jax.value_and_grad(plain, (0, 1))(hidden, head)
    placed = jax.device_put(head, jax.sharding.NamedSharding(mesh, rules.spec(("vocab", "embed"))))
    got = jax.jit(jax.value_and_grad(on_mesh, (0, 1)))(hidden, placed)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("vocabulary", "width", "parts"),
    [
        (32_000, 4096, False),
        (32_000, 768, True),
        (32_000, 1025, False),
        (50_304, 2048, True),
        (39_999, 4096, False),
        (40_000, 4096, True),
        (32_064, 8192, True),  # a quarter of 128,256: a gradient of 1 GiB
        (24_576, 8192, True),
        (24_575, 8192, False),
    ],
)
def test_a_tpu_takes_parts_of_all_but_a_small_vocabulary_of_wide_states(vocabulary, width, parts):
    assert dispatch.by_vocabulary_on("tpu", vocabulary, width) is parts
    assert not dispatch.by_vocabulary_on("cpu", vocabulary, width)
    assert not dispatch.by_vocabulary_on("gpu", vocabulary, width)


@pytest.mark.parametrize(
    ("tokens", "width", "ids"),
    [
        (8192, 640, 1024),  # 20 MiB of gradient: a part of 32 MiB
        (16384, 1152, 512),  # 72
        (8192, 2560, 768),  # 80: 24 are left
        (8192, 2848, 2048),  # 89: too few are left, so a part of 64 MiB
        (32768, 576, 1024),  # 72: 32 MiB would be 256 ids, and 64 MiB 512
        (16384, 4096, 1024),
        (2048, 8192, 1024),  # the width counts where it is the larger side
    ],
)
def test_a_part_leaves_the_hidden_gradient_on_the_chip_if_both_fit(tokens, width, ids):
    assert by_vocabulary.part_ids(tokens, width, "TPU v5 lite") == ids
    # 64 MiB hold neither.
    assert by_vocabulary.part_ids(tokens, width, "TPU v5p") == max(1024, 64 * 2**20 // 4 // max(tokens, width))
    assert by_vocabulary.part_ids(tokens, width, "TPU v6 lite") == max(1024, 128 * 2**20 // 4 // max(tokens, width))


@pytest.mark.parametrize(
    "ids, most, size",
    [(256_000, 3640, 3200), (262_208, 3640, 3584), (100, 300, 100), (1000, 100, 128), (384, 300, 256)],
)
def test_parts_divide_all_ids_where_one_nearly_fits(ids, most, size):
    assert by_vocabulary._part_size(ids, most) == size


def test_parts_are_for_all_tokens(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "by_vocabulary_on", lambda *_: True)
    monkeypatch.setattr(by_vocabulary, "part_ids", lambda *of: asked.append(of) or V)
    hidden, head, targets, weights = case(jnp.bfloat16)
    jax.eval_shape(jax.grad(lambda hidden: dispatch.cross_entropy(hidden, head, targets, weights)[0]), hidden)
    assert asked == [(24, D, sharding.device_kind())]


@pytest.mark.parametrize("soft_cap", [None, 3.0, 200.0])
def test_parts_of_a_sharded_vocabulary_have_all_terms(soft_cap, monkeypatch):
    monkeypatch.setattr(dispatch, "by_vocabulary_on", lambda *_: True)
    monkeypatch.setattr(by_vocabulary, "PART_BYTES", 4 * 32 * 9)
    monkeypatch.setattr(by_vocabulary, "_FEWEST", 1)
    monkeypatch.setattr(by_vocabulary, "LANES", 4)
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 8, 32), (40, 32)))
    targets, weights = rng.integers(0, 40, (8, 8)), jnp.asarray(rng.integers(0, 2, (8, 8)), jnp.float32)
    mesh, rules = sharding.make_mesh(Plan(batch_size=8, data=2, fsdp=2, tensor=2)), Rules()

    def on_mesh(hidden, head):
        with sharding.activate(mesh, rules):
            return cross_entropy(hidden, head, targets, weights, z_loss=0.1, label_smoothing=0.2, soft_cap=soft_cap)[0]

    def plain(hidden, head):
        return reference.cross_entropy(hidden, head, targets, weights, Terms(0.1, 0.2), Softmax(soft_cap))[0]

    got = jax.jit(jax.value_and_grad(on_mesh, (0, 1)))(hidden, head)
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(jax.value_and_grad(plain, (0, 1))(hidden, head)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_loss_scale_may_be_larger_than_any_float16():
    rng = np.random.default_rng(0)
    hidden, head = (
        jnp.asarray(rng.normal(size=(1, 8, 16)), jnp.float16),
        jnp.asarray(rng.normal(size=(40, 16)), jnp.float32),
    )
    targets, weights = rng.integers(0, 40, (1, 8)), jnp.full((1, 8), 1e-2)

    def gradient(scale):
        return jax.grad(lambda hidden: scale * cross_entropy(hidden, head, targets, weights)[0])(hidden)

    np.testing.assert_array_equal(gradient(2.0**17).astype(jnp.float32), 2.0**17 * gradient(1.0).astype(jnp.float32))
