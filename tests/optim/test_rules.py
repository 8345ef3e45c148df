"""Several updates of each rule as its paper writes them, in NumPy: an option without effect shows in none of the first."""

from __future__ import annotations

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.optim import Adafactor, Optimizer, Schedule

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from test_optim import orthogonalised  # noqa: E402

RATE, UPDATES = 0.1, 3
AXES = {"kernel": ("embed", "mlp")}


def updates(optimizer, gradients):
    """What each gradient in turn moves a matrix by, over minus the learning rate."""
    tx = optimizer.build(10, AXES)
    params = {"kernel": jnp.zeros(gradients[0].shape)}
    state, found, update = tx.init(params), [], jax.jit(tx.update)
    for gradient in gradients:
        moved, state = update({"kernel": jnp.asarray(gradient, jnp.float32)}, state, params)
        found.append(np.asarray(moved["kernel"]) / -RATE)
    return found


def adamw(b1=0.9, b2=0.95, eps=1e-8):
    m = v = 0.0
    for t in range(1, UPDATES + 1):
        g = yield
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        yield m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)


def lion(b1=0.9, b2=0.99):
    m = 0.0
    for _ in range(UPDATES):
        g = yield
        yield np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g


def sgd(momentum=0.9, nesterov=True):
    m = 0.0
    for _ in range(UPDATES):
        g = yield
        m = g + momentum * m
        yield g + momentum * m if nesterov else m


def muon(momentum=0.95, nesterov=True, muon_rms=0.2):
    """The look-ahead is debiased as Dozat's NAdam has it."""
    m = 0.0
    for t in range(1, UPDATES + 1):
        g = yield
        m = momentum * m + (1 - momentum) * g
        ahead = momentum * m / (1 - momentum ** (t + 1)) + (1 - momentum) * g / (1 - momentum**t)
        yield muon_rms * np.sqrt(max(g.shape)) * orthogonalised(ahead if nesterov else m)


def adafactor(factored=False, clipping_threshold=1.0, decay_rate=0.8, epsilon1=1e-30):
    """Relative to no parameter; factored, the second moment is that of its rows times that of its columns."""
    v = 0.0
    for t in range(1, UPDATES + 1):
        g, decay = (yield), 1 - t**-decay_rate
        v = decay * v + (1 - decay) * (g**2 + epsilon1)
        rows, columns = v.mean(1, keepdims=True), v.mean(0, keepdims=True)
        u = g / np.sqrt(rows * columns / v.mean() if factored else v)
        yield u / max(1.0, np.sqrt(np.mean(u**2)) / clipping_threshold)


CASES = [
    (adamw, dict()),
    (adamw, dict(b1=0.5, b2=0.7, eps=0.3)),
    (lion, dict()),
    (lion, dict(b1=0.9, b2=0.3)),
    (sgd, dict()),
    (sgd, dict(momentum=0.5, nesterov=False)),
    (muon, dict()),
    (muon, dict(momentum=0.3, nesterov=False, muon_rms=0.7)),
    (muon, dict(momentum=0.3)),
]


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("options", [{}, {"clipping_threshold": 0.5}, {"decay_rate": 0.3}, {"epsilon1": 0.5}], ids=str)
def test_updates_are_those_of_adafactor(options, factored):
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=(6, 4)) for _ in range(UPDATES)]
    of = dict(weight_decay=0.0, clip_norm=None, parameter_scale=False, factored_min_size=2 if factored else 128)
    schedule = Schedule(kind="constant", learning_rate=RATE)
    got = updates(Optimizer(name="adafactor", schedule=schedule, adafactor=Adafactor(**options), **of), gradients)
    steps = adafactor(factored=factored, **options)
    for number, (gradient, moved) in enumerate(zip(gradients, got, strict=True)):
        next(steps)
        np.testing.assert_allclose(moved, steps.send(gradient), rtol=1e-4, atol=1e-6, err_msg=f"update {number}")


@pytest.mark.parametrize(("rule", "options"), CASES, ids=[f"{rule.__name__}-{[*options]}" for rule, options in CASES])
def test_updates_are_those_of_the_rule(rule, options):
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=(6, 4)) for _ in range(UPDATES)]
    schedule = Schedule(kind="constant", learning_rate=RATE)
    got = updates(
        Optimizer(name=rule.__name__, schedule=schedule, weight_decay=0.0, clip_norm=None, **options), gradients
    )
    steps = rule(**options)
    for number, (gradient, moved) in enumerate(zip(gradients, got, strict=True)):
        next(steps)
        np.testing.assert_allclose(moved, steps.send(gradient), rtol=2e-3, atol=2e-5, err_msg=f"update {number}")


def test_gradients_are_cut_to_the_norm_before_the_rule():
    gradients = [np.full((6, 4), 2.0), np.full((6, 4), 0.001)]
    plain = Schedule(kind="constant", learning_rate=RATE)
    of = dict(name="sgd", schedule=plain, weight_decay=0.0, momentum=0.0, nesterov=False)
    cut = updates(Optimizer(clip_norm=0.5, **of), gradients)
    np.testing.assert_allclose(cut[0], np.full((6, 4), 0.5 / np.sqrt(24)), rtol=1e-5)
    np.testing.assert_allclose(cut[1], gradients[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        (dict(name="adamw", weight_decay=0.2), 0.2 * RATE),
        (dict(name="adafactor", weight_decay=0.2), 0.2 * RATE),
        (dict(name="adafactor", weight_decay=0.0, adafactor=Adafactor(weight_decay_rate=0.03)), 0.03),
        (dict(name="adafactor", weight_decay=0.0, adafactor=Adafactor(weight_decay_rate_lr_exponent=2.0)), RATE**2),
    ],
    ids=str,
)
def test_without_a_gradient_a_weight_loses_the_share_that_decays(options, share):
    tx = Optimizer(schedule=Schedule(kind="constant", learning_rate=RATE), **options).build(10, AXES)
    params = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)}
    moved, _ = tx.update({"kernel": jnp.zeros((6, 4))}, tx.init(params), params)
    np.testing.assert_allclose(moved["kernel"], -share * params["kernel"], rtol=1e-5)
