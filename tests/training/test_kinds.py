"""Runs of encoder-decoders and encoders: they learn, evaluate, resume exactly, and fit their data or say so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from capibara import config
from capibara.core.types import UserError
from capibara.data.dataset import Kind
from capibara.models.api import EncoderConfig, EncoderDecoderConfig
from capibara.training.base.options import Evaluation
from capibara.training.trainer import Trainer

SIZES = dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
MODELS = {
    Kind.ENCODER_DECODER: EncoderDecoderConfig(**SIZES),
    Kind.MASKED: EncoderConfig(**SIZES, max_length=64),
}


@pytest.fixture
def make(make_trainer):
    """(kind, changes of Trainer's fields) -> a run."""

    def run(kind, **changes):
        sizes = dict(length=24, encoder_length=64) if kind is Kind.ENCODER_DECODER else dict(length=64)
        dataset = dataclasses.replace(make_trainer().dataset, kind=kind, **sizes)
        return make_trainer(**{"model": MODELS[kind], "dataset": dataset, "steps": 8} | changes)

    return run


@pytest.mark.parametrize("kind", [Kind.ENCODER_DECODER, Kind.MASKED])
@pytest.mark.heavy
def test_a_run_learns_and_resumes_exactly(make, train, kind, tmp_path):
    evaluation = Evaluation(every=8, max_batches=2)
    whole = train(make(kind, evaluation=evaluation))
    assert whole.losses[8] < whole.losses[1] - 0.3
    assert 0 < whole.evaluations[8]["loss"] < whole.losses[1]
    again = str(tmp_path / "again")
    train(make(kind, steps=5, model_dir=again))
    rest = train(make(kind, model_dir=again, evaluation=evaluation))
    assert rest.start_step == 5 and rest.batches == whole.batches[5:]
    assert rest.losses == {step: loss for step, loss in whole.losses.items() if step > 5}
    assert rest.evaluations == whole.evaluations


@pytest.mark.heavy
def test_accumulation_weighs_every_token_alike(make, train, tmp_path):
    kind = Kind.ENCODER_DECODER
    plans = [dataclasses.replace(make(kind).plan, accumulation=n) for n in (1, 2)]
    one, two = (train(make(kind, plan=plan, steps=3, model_dir=str(tmp_path / str(i)))) for i, plan in enumerate(plans))
    np.testing.assert_allclose(list(two.losses.values()), list(one.losses.values()), rtol=2e-4)


def test_a_model_and_data_that_do_not_fit_are_refused(make, make_trainer):
    with pytest.raises(UserError, match=r"Dataset.kind \('causal'\) does not fit the model: EncoderConfig .* 'masked'"):
        make_trainer(model=MODELS[Kind.MASKED])
    with pytest.raises(UserError, match="Dataset.kind .'masked'. does not fit the model: EncoderDecoderConfig"):
        make(Kind.MASKED, model=MODELS[Kind.ENCODER_DECODER])
    long = dataclasses.replace(make(Kind.MASKED).dataset, length=65)
    with pytest.raises(UserError, match=r"Dataset.length \(65\) must be at most EncoderConfig.max_length \(64\)"):
        make(Kind.MASKED, dataset=long)


@pytest.mark.parametrize("files", [("t5_1_1_small", "pretrain_t5"), ("bert_base", "pretrain_bert")], ids="-".join)
def test_the_gin_files_make_a_run(files):
    model, run = files
    bindings = ["MODEL_DIR = 'run'", "TRAIN_STEPS = 5", "FILES = ('x.jsonl',)"]
    config.parse([f"models/{model}.gin", "tasks/jsonl_pairs.gin", f"runs/{run}.gin"], bindings)
    trainer = config.build(Trainer)
    assert trainer.model.data_kind == trainer.dataset.kind
    assert (trainer.dataset.source.inputs_field, trainer.dataset.source.field) == ("inputs", "targets")
    assert trainer.dataset.encoder_length == (512 if model.startswith("t5") else None)
