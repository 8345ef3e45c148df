"""DP-SGD: the gradient is the mean of clipped ones with the noise that is counted, and a run ends with its budget."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara import sharding
from capibara.checkpoints.manager import Checkpointing
from capibara.consensus.privacy import Privacy
from capibara.core.types import UserError
from capibara.data.packing.packing import Packing
from capibara.data.shards.source import ShardedSource
from capibara.data.sources.sources import JsonlSource
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora, Moe
from capibara.objectives.base import of_cross_entropy
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.training.base.state import TrainState
from capibara.training.base.trainer import Evaluation
from capibara.training.privacy.gradient import NOISE_KEY, key_sharding, make_private_gradient
from capibara.training.privacy.ledger import Ledger
from capibara.training.stability.anomalies import Anomalies
from capibara.training.step import make_train_step

CONFIG = DecoderConfig(
    vocab_size=128, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=64, dtype="float32"
)
EXPERTS = dataclasses.replace(CONFIG, moe=Moe(num_experts=4, top_k=2))
ROWS, LENGTH = 8, 16
ALMOST_NONE = 1e-9  # a noise multiplier
MESHES = {
    "1": (CONFIG, {"fsdp": 1}),
    "data8": (CONFIG, {"data": 8, "fsdp": 1}),
    "data2-fsdp2-tensor2": (CONFIG, {"data": 2, "fsdp": 2, "tensor": 2}),
    "data2-context2": (CONFIG, {"data": 2, "fsdp": 1, "context": 2}),
    "experts-1": (EXPERTS, {"fsdp": 1}),
    "experts-fsdp2-expert2": (EXPERTS, {"fsdp": 2, "expert": 2}),
}


def batch_of(seed=0):
    """Rows of different lengths; the last one is padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 128, (ROWS, LENGTH)).astype(np.int32)
    real = np.arange(LENGTH) < np.array([*rng.integers(1, LENGTH, ROWS - 1), 0])[:, None]
    return {
        "tokens": tokens,
        "targets": (tokens * 3 + 1) % 128,
        "weights": real.astype(np.float32),
        "segment_ids": real.astype(np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    }


def key_of(*words):
    return np.array(words, np.uint32)


@functools.cache
def weights(config):
    return jax.jit(api.build(config).init)(jax.random.key(0))


@functools.cache
def of_documents(config):
    """The gradient and the loss of each row by itself, on one device."""
    model = api.build(config)
    objective = of_cross_entropy(model, 0.0)

    @jax.jit
    def gradient(params, row):
        def loss(params):
            loss, sums, _ = objective.checked_sums(params, row, Plan(batch_size=1).remat_policy, 0)
            return loss / jnp.maximum(sums.weight, 1.0)

        return jax.grad(loss)(params)

    rows = [{name: value[b : b + 1] for name, value in batch_of().items()} for b in range(ROWS)]
    return [jax.device_get(gradient(weights(config), row)) for row in rows]


@functools.cache
def program(config, sizes, privacy):
    """The gradient of (parameters, batch, step), compiled once; the parameters; the mesh and the rules of both."""
    plan = Plan(batch_size=ROWS, **dict(sizes))
    mesh = sharding.make_mesh(plan, jax.devices()[: int(np.prod([size for _, size in sizes]))])
    model = api.build(config)
    gradient = make_private_gradient(of_cross_entropy(model, 0.0), plan, mesh, privacy)
    placed = jax.device_put(weights(config), sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params))
    return jax.jit(lambda params, batch, step: gradient(params, {}, batch, step, None)), placed, mesh, plan.rules


def private_gradient(config, sizes, privacy, batch, key=(1, 2), step=0):
    call, placed, mesh, rules = program(config, tuple(sizes.items()), privacy)
    batch = sharding.global_batch(sharding.batch_sharding(mesh, rules), batch)
    batch[NOISE_KEY] = jax.device_put(key_of(*key), key_sharding(mesh))
    grads, sums, _, metrics = call(placed, batch, jnp.int32(step))
    return jax.device_get((grads, sums, metrics))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_is_the_mean_of_the_documents_clipped_gradients(mesh):
    config, sizes = MESHES[mesh]
    norms = [float(optax.tree.norm(grads)) for grads in of_documents(config)]
    clip = float(np.median(norms))
    want = jax.tree.map(np.zeros_like, of_documents(config)[0])
    for grads, norm in zip(of_documents(config), norms, strict=True):
        want = jax.tree.map(lambda total, g: total + g * min(1.0, clip / max(norm, 1e-30)) / ROWS, want, grads)
    privacy = Privacy(clip_norm=clip, noise_multiplier=ALMOST_NONE)
    found, sums, metrics = private_gradient(config, sizes, privacy, batch_of())
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6, rtol=1e-4), found, want)
    assert metrics["clipped_share"] == sum(norm > clip for norm in norms) / ROWS
    assert metrics["broken_rows"] == 0 and sums.weight == batch_of()["weights"].sum()


def test_the_noise_is_what_the_ledger_counts_and_new_in_each_step_and_start():
    privacy = Privacy(clip_norm=0.5, noise_multiplier=3.0)
    calm = private_gradient(
        CONFIG, {"fsdp": 1}, dataclasses.replace(privacy, noise_multiplier=ALMOST_NONE), batch_of()
    )[0]

    def noise(sizes=None, **options):
        found = private_gradient(CONFIG, sizes or {"fsdp": 1}, privacy, batch_of(), **options)[0]
        leaves = zip(jax.tree.leaves(found), jax.tree.leaves(calm), strict=True)
        return np.concatenate([np.ravel(x - y) for x, y in leaves])

    one = noise()
    deviation = 3.0 * 0.5 / ROWS
    assert np.std(one) == pytest.approx(deviation, rel=0.02) and abs(np.mean(one)) < 4 * deviation / np.sqrt(one.size)
    np.testing.assert_allclose(noise({"data": 2, "fsdp": 2, "tensor": 2}), one, atol=1e-5)
    for other in (noise(step=1), noise(key=(1, 3)), noise(key=(2, 2))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
    sizes = np.cumsum([x.size for x in jax.tree.leaves(calm)])[:-1]
    large = [part[:1000] for part in np.split(one, sizes) if part.size >= 1000]
    assert len(large) > 3 and np.abs(np.corrcoef(large) - np.eye(len(large))).max() < 0.15


def test_a_document_moves_the_sum_by_the_clip_norm_at_most_and_a_broken_one_not_at_all():
    privacy = Privacy(clip_norm=0.01, noise_multiplier=ALMOST_NONE)
    sizes = {"data": 4, "fsdp": 1}
    whole, sums, _ = private_gradient(CONFIG, sizes, privacy, batch_of())
    without = batch_of()
    without["weights"][2] = 0
    found, of_others, _ = private_gradient(CONFIG, sizes, privacy, without)
    moved = optax.tree.norm(jax.tree.map(lambda x, y: (x - y) * ROWS, whole, found))
    assert 0.0099 < moved < 0.0101
    broken = batch_of()
    broken["weights"][2, 0] = np.nan
    same, of_good, metrics = private_gradient(CONFIG, sizes, privacy, broken)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-7), same, found)
    assert metrics["broken_rows"] == 1 and np.isfinite(of_good.nll) and of_good.weight == of_others.weight


# --- runs ---


@pytest.fixture
def make_private(make_trainer):
    """A run on documents of which five batches of 32 hold a pass."""
    base = make_trainer()
    source = dataclasses.replace(base.dataset.source, validation_fraction=0.25)
    dataset = dataclasses.replace(base.dataset, source=source, packing=Packing.NONE)
    assert 128 < len(dataset.documents("train")) <= 160
    own = {"plan": Plan(batch_size=32, fsdp=4, tensor=2), "dataset": dataset, "steps": 12}
    return lambda privacy, **changes: make_trainer(**{"privacy": privacy} | own | changes)


SIGMA = dict(clip_norm=0.5, noise_multiplier=2.0)


def test_a_run_ends_where_its_budget_does_and_a_larger_one_resumes_it(make_private, train):
    two = Privacy(**SIGMA, budget=Privacy(**SIGMA).epsilon(2) + 1e-6)
    seen = train(make_private(two, evaluation=Evaluation(every=6, max_batches=1)))
    assert [*seen.evaluations] == [6, 10]  # the model that comes out, too
    assert (seen.outcome.step, seen.outcome.reason) == (10, "privacy_budget") and seen.checkpoints == [10]
    assert "allows 10 of Trainer.steps (12)" in "; ".join(seen.statuses)
    assert f"epsilon {two.budget:.3g} at delta 1e-05 after step 10, in pass 2 over the data" in seen.statuses[-1]
    for step, metrics in seen.metrics.items():
        assert metrics["epsilon"] == pytest.approx(two.epsilon(1 if step <= 5 else 2))
    with pytest.raises(UserError, match=r"the privacy budget is spent at step 10: raise Privacy.budget to continue"):
        train(make_private(two))
    with pytest.raises(
        UserError, match=r"Privacy.budget is 2.5, and this run has spent epsilon 2.94 by step 10: raise"
    ):
        train(make_private(dataclasses.replace(two, budget=2.5)))
    more = train(make_private(dataclasses.replace(two, budget=100.0)))
    assert (more.start_step, more.outcome.step, more.outcome.reason) == (10, 12, "finished")
    assert more.metrics[11]["epsilon"] == pytest.approx(two.epsilon(3))


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.heavy)])
def test_a_run_learns_and_its_noise_is_secret(make_private, train, tmp_path, steps):
    little = Privacy(clip_norm=1.0, noise_multiplier=0.05, accounting="rdp")
    runs = [train(make_private(little, steps=steps, model_dir=str(tmp_path / name))) for name in ("one", "two")]
    for seen in runs:
        assert seen.losses[steps] < seen.losses[1] - (0.5 if steps == 20 else 0.0)
        # The secret is no part of what is saved.
        assert {leaf.dtype.name for leaf in jax.tree.leaves(seen.state)} <= {"float32", "int32"}
    assert runs[0].losses[1] == runs[1].losses[1] and runs[0].losses[2] != runs[1].losses[2]


def test_the_promise_of_a_run_that_resumes_is_the_same(make_private, train):
    train(make_private(Privacy(**SIGMA), steps=5))
    for privacy, words in (
        (Privacy(clip_norm=0.6, noise_multiplier=2.0), r"Trainer.privacy.clip_norm was 0.5, is 0.6"),
        (Privacy(clip_norm=0.5, noise_multiplier=1.0), r"Trainer.privacy.noise_multiplier was 2.0, is 1.0"),
        (None, r"Trainer.privacy was {.*}, is None"),
    ):
        with pytest.raises(UserError, match=words):
            train(make_private(privacy))


def test_adapters_train_with_little_noise(make_private, make_trainer, train, tmp_path):
    train(make_trainer(steps=4, model_dir=str(tmp_path / "base"), checkpointing=Checkpointing(every=4)))
    model = dataclasses.replace(make_trainer().model, lora=Lora(rank=2))
    seen = train(make_private(Privacy(**SIGMA), model=model, init_from=str(tmp_path / "base"), steps=3))
    (warning,) = [line for line in seen.statuses if line.startswith("warning")]
    count = sum(x.size for x in jax.tree.leaves(api.build(model).trained(seen.state.params)))
    assert count < 10_000
    assert f"largest document's (0.5): with 32 documents in a batch and {count:,} parameters it drowns" in warning
    assert seen.outcome.step == 3


def test_what_breaks_the_promise_is_refused(make_private, corpus, tmp_path):
    privacy = Privacy(**SIGMA)
    base = make_private(None)
    changes = {
        "Dataset.packing is 'best_fit', must be 'none'": {
            "dataset": dataclasses.replace(base.dataset, packing=Packing.BEST_FIT)
        },
        "Plan.accumulation is not supported with Trainer.privacy": {
            "plan": Plan(batch_size=32, fsdp=4, tensor=2, accumulation=2)
        },
        "Plan.stage is not supported with": {"plan": Plan(batch_size=32, fsdp=4, stage=2)},
        "Anomalies.on_spike is not supported with": {"anomalies": Anomalies(on_spike="skip")},
        "Trainer.strategy is not supported with": {
            "strategy": ConsensusConfig(every=4),
            "plan": Plan(batch_size=32, node=4, fsdp=2),
        },
        "DecoderConfig.dtype = 'float16' is not": {"model": dataclasses.replace(base.model, dtype="float16")},
        "Evaluation.unigram_batches is not supported": {"evaluation": Evaluation(unigram_batches=2)},
        "Trainer.loss_normalization is not supported": {"loss_normalization": "documents"},
    }
    for words, change in changes.items():
        with pytest.raises(UserError, match=words):
            make_private(privacy, **change)


def test_a_budget_that_the_first_pass_exceeds_ends_before_anything_is_compiled(make_private, train, monkeypatch):
    monkeypatch.setattr("capibara.training.setup.compile_step", lambda *given: pytest.fail("compiled"))
    with pytest.raises(UserError, match=r"Privacy.budget is 0.1, and the first pass over the data costs epsilon"):
        train(make_private(Privacy(**SIGMA, budget=0.1)))


def test_each_document_is_in_one_step_of_a_pass(make_private, train, tmp_path, monkeypatch):
    """Also if their number is no multiple of the rows, and some are empty."""
    texts = [f"{number}:" + "x" * (number % 50) for number in range(70)]
    texts[3] = texts[40] = ""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    base = make_private(None).dataset
    dataset = dataclasses.replace(base, source=JsonlSource(files=(str(path),), validation_files=(str(path),)))
    read = []
    monkeypatch.setattr(
        "capibara.training.feed.sharding.global_batch",
        lambda placed, batch, make=sharding.global_batch: (read.append(batch["targets"].copy()), make(placed, batch))[
            1
        ],
    )
    trainer = make_private(Privacy(**SIGMA), dataset=dataset, steps=7)
    train(dataclasses.replace(trainer, steps=4))  # it resumes within the second pass
    train(trainer)
    assert len(read) == 7
    for first in (0, 3):
        found = [bytes(row[row > 2].astype(np.uint8) - 3) for batch in read[first : first + 3] for row in batch]
        numbers = [int(text.split(b":")[0]) for text in found if b":" in text]
        assert sorted(numbers) == [number for number in range(70) if number not in (3, 40)]


def lines(path, count):
    path.write_text("".join(json.dumps({"text": f"{number}:x"}) + "\n" for number in range(count)))
    return (str(path),)


def test_documents_that_do_not_suit_the_promise_are_told_before_anything_is_compiled(
    make_private, train, tmp_path, monkeypatch
):
    monkeypatch.setattr("capibara.training.setup.compile_step", lambda *given: pytest.fail("compiled"))
    base = make_private(None).dataset
    few = JsonlSource(files=lines(tmp_path / "few.jsonl", 20), validation_files=lines(tmp_path / "valid.jsonl", 2))
    with pytest.raises(UserError, match=r"has 20 documents, must have at least one for each of the 32 rows of a batch"):
        train(make_private(Privacy(**SIGMA), dataset=dataclasses.replace(base, source=few)))
    shards = ShardedSource(files=few.files, validation_files=few.validation_files)
    with pytest.raises(UserError, match="Trainer.privacy needs documents with random access"):
        train(make_private(Privacy(**SIGMA), dataset=dataclasses.replace(base, source=shards)))


def test_every_row_is_read_without_shuffling_too(make_private, train, tmp_path):
    """The last batch of a pass is padded."""
    source = JsonlSource(files=lines(tmp_path / "some.jsonl", 40), validation_files=lines(tmp_path / "valid.jsonl", 2))
    dataset = dataclasses.replace(make_private(None).dataset, source=source, shuffle=False)
    assert train(make_private(Privacy(**SIGMA), dataset=dataset, steps=5)).outcome.step == 5


def test_a_delta_that_promises_nothing_is_warned_of(corpus, make_private):
    dataset = make_private(None).dataset
    (line,) = Ledger.of(Privacy(**SIGMA, delta=0.1), dataset, 32).remarks(5, 1)
    assert "Privacy.delta is 0.1, and one over the number of documents (" in line and "try 7e-04" in line
    assert not list(Ledger.of(Privacy(**SIGMA), dataset, 32).remarks(5, 1))


def step_of(privacy, **options):
    """The jitted step of a run on a device, and its first state."""
    plan, model = Plan(batch_size=ROWS, fsdp=1), api.build(CONFIG)
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    gradient = make_private_gradient(of_cross_entropy(model, 0.0), plan, mesh, privacy)
    step = make_train_step(model, optax.sgd(0.1), lambda _: 0.1, plan, mesh, private=gradient, anomalies=Anomalies())
    return jax.jit(step), TrainState(jnp.int32(0), weights(CONFIG), optax.sgd(0.1).init(weights(CONFIG)), None)


def test_a_step_is_not_skipped_because_of_one_document():
    """A batch whose one document is broken changes the model as one in which it counts as zero."""
    step, state = step_of(Privacy(**SIGMA))
    none = batch_of() | {"weights": np.zeros((ROWS, LENGTH), np.float32), NOISE_KEY: key_of(1, 2)}
    broken = none | {"weights": none["weights"].copy()}
    broken["weights"][3, 0] = np.nan
    (without, _), (after, metrics) = step(state, none), step(state, broken)
    jax.tree.map(np.testing.assert_array_equal, after.params, without.params)
    assert metrics["skipped"] == 0 and np.isnan(metrics["loss"]) and metrics["broken_rows"] == 1
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True))


def test_a_model_that_has_diverged_does_not_look_perfect():
    """Its rows are all left out."""
    step, state = step_of(Privacy(**SIGMA))
    state = dataclasses.replace(state, params=jax.tree.map(lambda x: x * np.nan, state.params))
    _, metrics = step(state, batch_of() | {NOISE_KEY: key_of(1, 2)})
    assert np.isnan(metrics["loss"]) and metrics["broken_rows"] == ROWS
