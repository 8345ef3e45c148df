"""Whole runs on preference pairs, and what their reference is."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.data.chat.answers import PreferenceJsonlSource, UnpairedJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora
from capibara.objectives import reference
from capibara.objectives.cpo import Cpo
from capibara.objectives.kto import Kto
from capibara.objectives.orpo import Orpo
from capibara.objectives.preference import Dpo
from capibara.objectives.reference import ReferenceLoss
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training.base.options import Evaluation
from capibara.training.trainer import Trainer

MODEL = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")


# Whole runs.


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs whose chosen answers are in capitals."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    words = ["river", "grass", "fish", "sun"]
    lines = []
    for i in range(60):
        word = str(rng.choice(words))
        lines.append({"prompt": f"{i}?", "chosen": word.upper() + "!" * (i % 4), "rejected": word})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def make_trainer(pairs, toy_tokenizer, tmp_path):
    base = Trainer(
        model_dir=str(tmp_path / "run"),
        steps=12,
        model=MODEL,
        plan=Plan(batch_size=8, fsdp=2),
        dataset=Dataset(
            source=PreferenceJsonlSource(
                files=(str(pairs),), template=ChatTemplate(tokenizer=toy_tokenizer), validation_fraction=0.3
            ),
            vocabulary=TokenizerJsonVocabulary(path=toy_tokenizer),
            length=96,
            window_rows=2,
            window_documents=16,
        ),
        optimizer=Optimizer(schedule=Schedule(kind="rsqrt", learning_rate=3e-3, warmup_steps=1), weight_decay=0.0),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=Dpo(beta=0.3),
        log_every=1,
    )
    return lambda **changes: dataclasses.replace(base, **changes)


def same_state(a, b):
    jax.tree.map(np.testing.assert_array_equal, (a.params, a.opt_state), (b.params, b.opt_state))


@pytest.mark.heavy
def test_the_margin_rises_and_held_out_pairs_are_told_apart(make_trainer, train, tmp_path):
    """On a mesh with a tensor axis."""
    plan = Plan(batch_size=8, fsdp=2, tensor=2)
    seen = train(make_trainer(steps=12, plan=plan, evaluation=Evaluation(every=12)), jax.devices()[:4])
    first, last = seen.metrics[1], seen.metrics[12]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-4)  # the model is its own reference
    assert abs(first["reward_margin"]) < 1e-3 and abs(first["log_ratio"]) < 1e-4
    assert last["loss"] < 0.8 * first["loss"] and last["reward_margin"] > 0.3
    held_out = seen.evaluations[12]
    assert held_out["reward_accuracy"] > 0.9 and held_out["reward_margin"] > 0.3 and held_out["pairs"] > 5
    assert held_out["loss"] < 0.6
    spent = [text for text in seen.statuses if text.startswith("reference log-prob")]
    assert any(" train pairs" in text for text in spent) and any(" validation pairs" in text for text in spent)
    assert (tmp_path / "run" / "reference.train.npz").exists()


def test_a_resumed_run_ends_bit_by_bit_as_one_that_was_not_stopped(make_trainer, train, monkeypatch):
    two = jax.devices()[:2]
    whole = train(make_trainer(steps=6, model_dir=make_trainer().model_dir + "_whole"), two)
    train(make_trainer(steps=3), two)
    monkeypatch.setattr(reference.ReferenceTables, "_computed", None)  # it has its tables
    resumed = train(make_trainer(steps=6), two)
    assert resumed.start_step == 3 and whole.batches[3:] == resumed.batches
    same_state(whole.state, resumed.state)


@pytest.mark.heavy
def test_a_signal_ends_the_reference_before_the_first_step(make_trainer, train, monkeypatch, tmp_path):
    two, step = jax.devices()[:2], reference._each

    def signalled(*args):
        for count, one in enumerate(step(*args)):
            if count == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield one

    with monkeypatch.context() as patch:
        patch.setattr(reference, "_each", signalled)
        stopped = train(make_trainer(steps=2), two)
    assert dataclasses.astuple(stopped.outcome) == (0, "interrupted", signal.SIGTERM)
    assert stopped.start_step == 0 and not stopped.losses and not stopped.checkpoints
    assert not (tmp_path / "run" / "reference.train.npz").exists()  # it was left in its middle
    assert sorted(train(make_trainer(steps=2), two).losses) == [1, 2]


@pytest.mark.heavy
def test_the_mesh_accumulation_and_packing_change_nothing(make_trainer, train):
    want = train(make_trainer(steps=3, plan=Plan(batch_size=8)), jax.devices()[:1])
    plans = {
        "context": Plan(batch_size=8, fsdp=2, data=2, context=2),
        "mesh": Plan(batch_size=8, fsdp=2, tensor=2, data=2),
        "accumulated": Plan(batch_size=8, fsdp=4, tensor=2, accumulation=2),
    }
    for name, plan in plans.items():
        got = train(make_trainer(steps=3, plan=plan, model_dir=make_trainer().model_dir + name))
        for step in (1, 2, 3):
            for key in ("loss", "grad_norm", "reward_margin", "log_prob_chosen"):
                assert got.metrics[step][key] == pytest.approx(want.metrics[step][key], rel=2e-4, abs=1e-5), (name, key)


@pytest.fixture
def make_unpaired(make_trainer, pairs, tmp_path):
    """The run of make_trainer on labelled answers: chosen ones of two pairs, the rejected one of the third."""

    def make(loss, **changes):
        lines = []
        for i, line in enumerate(map(json.loads, pairs.read_text().splitlines())):
            label = i % 3 != 2
            lines.append(
                {"prompt": line["prompt"], "completion": line["chosen" if label else "rejected"], "label": label}
            )
        (tmp_path / "unpaired.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        dataset = make_trainer().dataset
        source = UnpairedJsonlSource(
            files=(str(tmp_path / "unpaired.jsonl"),),
            template=dataset.source.template,
            validation_fraction=0.3,
            mismatched=loss.kind == "kto",
        )
        return make_trainer(loss=loss, dataset=dataclasses.replace(dataset, source=source), **changes)

    return make


OTHER_LOSSES = {
    "aot": Dpo(kind="aot", beta=0.3),
    "simpo": Cpo(kind="simpo", beta=2.0, nll_weight=0.5),
    "orpo": Orpo(beta=0.5),
    "kto": Kto(beta=0.3),
    "apo_zero_unpaired": Kto(kind="apo_zero_unpaired", beta=0.3),
    "bco": Kto(kind="bco", beta=0.3),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x == "kto" else pytest.mark.heavy) for x in OTHER_LOSSES])
def test_a_mesh_changes_no_method(name, make_trainer, make_unpaired, train):
    """Evaluations included; those without a reference compute none."""
    loss, runs = OTHER_LOSSES[name], []
    for devices, plan in ((1, Plan(batch_size=8)), (8, Plan(batch_size=8, data=2, fsdp=2, tensor=2))):
        options = dict(
            steps=3, plan=plan, evaluation=Evaluation(every=3), model_dir=f"{make_trainer().model_dir}{devices}"
        )
        trainer = make_unpaired(loss, **options) if isinstance(loss, Kto) else make_trainer(loss=loss, **options)
        runs.append(train(trainer, jax.devices()[:devices]))
        assert os.path.exists(f"{trainer.model_dir}/reference.train.npz") == isinstance(loss, ReferenceLoss)
    want, got = runs
    for step in (1, 2, 3):
        assert got.metrics[step].keys() == want.metrics[step].keys() >= {*loss.means}
        for key in ("loss", "grad_norm", *loss.means):
            assert got.metrics[step][key] == pytest.approx(want.metrics[step][key], rel=2e-4, abs=2e-5), key
    for key in ("loss", *loss.means):
        assert got.evaluations[3][key] == pytest.approx(want.evaluations[3][key], rel=2e-4, abs=2e-5), key
    assert want.metrics[3]["loss"] < want.metrics[1]["loss"] and want.evaluations[3]["pairs"] > 5


@pytest.mark.heavy
def test_packed_pairs_have_the_log_probabilities_of_pairs_alone(make_trainer, train):
    """On one device."""
    tables = []
    for packing in ("best_fit", "none"):
        dataset = dataclasses.replace(make_trainer().dataset, packing=packing)
        folder = f"{make_trainer().model_dir}_{packing}"
        one = make_trainer(steps=1, dataset=dataset, model_dir=folder, plan=Plan(batch_size=8))
        seen = train(one, jax.devices()[:1])
        assert seen.metrics[1]["pairs"] == 8 if packing == "none" else seen.metrics[1]["pairs"] > 8
        tables.append(np.load(f"{folder}/reference.train.npz")["table"])
    np.testing.assert_allclose(*tables, rtol=1e-5)
    assert np.isfinite(tables[0]).all() and len(tables[0]) > 30


@pytest.mark.parametrize("init_from", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_adapters_have_their_base_for_reference(make_trainer, train, init_from):
    trainer = make_trainer(steps=4, plan=Plan(batch_size=8, fsdp=2), checkpointing=Checkpointing(every=4))
    base = api.build(MODEL)
    params = jax.jit(base.init)(jax.random.key(0))
    if init_from:
        params = train(trainer, jax.devices()[:2]).state.params
        trainer = dataclasses.replace(trainer, init_from=trainer.model_dir, model_dir=f"{trainer.model_dir}_adapted")
    adapted = dataclasses.replace(trainer.model, lora=Lora(rank=4, targets=("all-linear",)))
    seen = train(dataclasses.replace(trainer, model=adapted, steps=4), jax.devices()[:2])
    table = np.load(f"{trainer.model_dir}/reference.train.npz")["table"]
    source, vocabulary = trainer.dataset.source, trainer.dataset.vocabulary
    documents, length = source.open("train"), 128  # of which rows are the beginning, so that one program is compiled
    logits = jax.jit(base.logits)
    for number in (0, 7):
        example = documents.example(number)
        for side, one in enumerate((example, example.rejected)):
            ids, offsets = vocabulary.encode_rendered(one.text)
            row = np.pad(ids, (0, length - ids.size))[None]
            batch = {"tokens": row, "positions": np.arange(length)[None]}
            batch["segment_ids"] = (np.arange(length) < ids.size)[None].astype(np.int32)
            of_texts = jax.nn.log_softmax(logits(params, batch)[0])
            log_p = np.asarray(of_texts)[np.arange(ids.size - 1), ids[1:]]
            (begin, end), said = one.loss[-1], offsets[1:]
            want = log_p[(said[:, 1] > begin) & (said[:, 0] < end)].sum()
            np.testing.assert_allclose(table[number, side], want, rtol=1e-5)
    assert abs(seen.metrics[1]["log_ratio"]) < 1e-4 and seen.metrics[4]["reward_margin"] > 0.01
    frozen = api.build(adapted).frozen
    jax.tree.map(np.testing.assert_array_equal, frozen(seen.started.params), frozen(seen.state.params))


@pytest.mark.heavy
def test_a_reference_is_computed_anew_where_it_is_not_of_this_run(make_trainer, train):
    trainer = make_trainer(steps=2, evaluation=Evaluation(every=0))
    two = jax.devices()[:2]
    train(trainer, two)
    path = f"{trainer.model_dir}/reference.train.npz"
    first = np.load(path)["table"]
    with open(path, "wb") as file:
        file.write(b"cut off")
    seen = train(dataclasses.replace(trainer, steps=3), two)  # the weights at its beginning are made again
    assert seen.start_step == 2 and any("train pairs" in text for text in seen.statuses)
    np.testing.assert_array_equal(np.load(path)["table"], first)
    with open(path, "wb") as file:
        file.write(b"cut off")
    with pytest.raises(UserError, match="no longer has the initial weights of this run"):
        train(dataclasses.replace(trainer, steps=5, seed=1), two)


def test_data_of_another_kind_is_refused(make_trainer, make_unpaired):
    with pytest.raises(
        UserError, match=r"@Kto\(\)\) is for unpaired preferences, and Dataset.source holds preferences: set Data"
    ):
        make_trainer(loss=Kto())
    unpaired = make_unpaired(Kto())
    with pytest.raises(
        UserError, match=r"@Cpo\(\)\) is for preferences, .* holds unpaired preferences: set Dataset.source = @P"
    ):
        dataclasses.replace(unpaired, loss=Cpo())
    with pytest.raises(
        UserError, match=r"holds unpaired preferences and Trainer.loss is None: set Trainer.loss = @Kto\(\)"
    ):
        dataclasses.replace(unpaired, loss=None)
    with pytest.raises(
        UserError, match="mismatched is True, and Kto.kind 'apo_zero_unpaired' does not read .*: set it to False"
    ):
        dataclasses.replace(unpaired, loss=Kto(kind="apo_zero_unpaired"))


def test_mistakes_in_the_configuration_are_named(make_trainer, pairs):
    for values, said in [
        ({"beta": 0.0}, "Dpo.beta is 0.0"),
        ({"label_smoothing": 0.5}, "Dpo.label_smoothing is 0.5"),
        ({"sft_weight": -1.0}, "Dpo.sft_weight is -1.0"),
    ]:
        with pytest.raises(UserError, match=said):
            Dpo(**values)
    with pytest.raises(UserError, match="set Trainer.loss = @Dpo()"):
        make_trainer(loss=None)
    with pytest.raises(UserError, match="z_loss"):
        make_trainer(z_loss=0.1)
    with pytest.raises(UserError, match="'cut'"):
        dataclasses.replace(make_trainer().dataset, too_long="cut")
