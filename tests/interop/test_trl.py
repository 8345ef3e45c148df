"""Preference training as in TRL's DPOTrainer: its six steps in trl.json.

trl.json is the found.json of test_transformers_trl.py (trl 1.16 made the committed file), which compares more.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara.checkpoints.manager import Checkpointing
from capibara.core import tree
from capibara.data.chat.answers import PreferenceJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.objectives.preference import Dpo
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation
from capibara.training.trainer import Trainer

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models" / "golden")]

import answers  # noqa: E402
import test_peft  # noqa: E402

MODEL = DecoderConfig(**test_peft.LLAMA | dict(vocab_size=384))
STEPS, ROWS = 6, 4
# Our loss, and TRL's name and arguments of it.
LOSSES = {
    "sigmoid": (Dpo(beta=0.3), dict(loss_type=["sigmoid"], beta=0.3)),
    "hinge": (Dpo(kind="hinge", beta=0.3), dict(loss_type=["hinge"], beta=0.3)),
    "ipo": (Dpo(kind="ipo_mean", beta=0.2), dict(loss_type=["ipo"], beta=0.2)),
    "robust": (
        Dpo(kind="robust", beta=0.3, label_smoothing=0.2),
        dict(loss_type=["robust"], beta=0.3, label_smoothing=0.2),
    ),
}
METRICS = {
    "loss": "loss",
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
    "logps/chosen": "log_prob_chosen",
    "logps/rejected": "log_prob_rejected",
    "grad_norm": "grad_norm",
}
ATOL = 1e-4  # for log-probabilities of about -40 and values computed from them

pytestmark = pytest.mark.standard_promotion


def write_pairs(file):
    words, rng = ["river", "grass", "fish", "sun", "water lily"], np.random.default_rng(0)
    lines = []
    for i in range(STEPS * ROWS):
        word, other = rng.choice(words, 2)
        pair = {"prompt": f"{i}?", "chosen": word.upper() + "!" * (i % 4), "rejected": f"{word} or {other}"}
        lines.append(json.dumps(pair) + "\n")
    file.write_text("".join(lines))


def drawn():
    """The reference's initial parameters."""
    model = api.build(MODEL)
    leaves = zip(tree.path_names(model.abstract_params), jax.tree.leaves(model.abstract_params), strict=True)
    shapes = {name: leaf.shape for name, leaf in leaves}
    values = tensors.read(tables.of("llama", shapes, {}), shapes, answers.draw)
    return tree.map_with_names(lambda name, _: values[name], model.abstract_params)


class Seen(Callback):
    """The metrics of each step."""

    def __init__(self):
        self.metrics = []

    def on_step(self, step, metrics):
        self.metrics.append(dict(metrics))


def trained(loss, params, folder, tokenizer, monkeypatch):
    """The metrics of our steps from these parameters, with FOLDER/pairs.jsonl, and the parameters after them."""
    files, template = (str(folder / "pairs.jsonl"),), ChatTemplate(tokenizer=tokenizer)
    source = PreferenceJsonlSource(files=files, template=template, validation_files=files)  # no rows are held out
    vocabulary = TokenizerJsonVocabulary(path=tokenizer)
    schedule = Schedule(kind="constant", learning_rate=1e-3, warmup_steps=0, warmup_fraction=0.0)
    trainer = Trainer(
        model_dir=str(folder / f"run_{loss.kind}"),
        steps=STEPS,
        model=MODEL,
        init_from="the reference",
        plan=Plan(batch_size=ROWS),
        dataset=Dataset(source=source, vocabulary=vocabulary, length=96, packing="none", shuffle=False),
        optimizer=Optimizer(schedule=schedule, weight_decay=0.0, b2=0.95, eps=1e-6),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=loss,
        log_every=1,
    )
    seen, after, set_up = Seen(), [], loop.set_up

    def watched(trainer, **options):
        run, initial = set_up(trainer, jax.devices()[:1], **options)

        def train_step(state, batch):
            state, metrics = run.train_step(state, batch)
            after[:] = [jax.device_get(state.params)]
            return state, metrics

        return dataclasses.replace(run, train_step=train_step), initial

    monkeypatch.setattr(loop, "set_up", watched)
    put = lambda target: jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), params, target)  # noqa: E731
    loop.train(trainer, seen, load=lambda path: put)
    return seen.metrics, after[0]


def apart(got, want):
    """The largest difference of each metric over the steps."""
    steps = list(zip(got, want, strict=True))
    return {ours: max(abs(mine[ours] - theirs[name]) for mine, theirs in steps) for name, ours in METRICS.items()}


@pytest.mark.parametrize("name", [x if x == "robust" else pytest.param(x, marks=pytest.mark.heavy) for x in LOSSES])
def test_preferences_are_learned_as_by_trl(name, toy_tokenizer, tmp_path, monkeypatch):
    write_pairs(tmp_path / "pairs.jsonl")
    got, _ = trained(LOSSES[name][0], drawn(), tmp_path, toy_tokenizer, monkeypatch)
    found = apart(got, json.loads((HERE / "trl.json").read_text())[name])
    assert {key: value for key, value in found.items() if not value <= ATOL} == {}
