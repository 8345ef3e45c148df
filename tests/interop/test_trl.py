"""Preference training as in TRL's trainers: their six steps in trl.json.

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
from capibara.data.chat.answers import PreferenceJsonlSource, UnpairedJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.objectives.cpo import Cpo
from capibara.objectives.kto import Kto
from capibara.objectives.orpo import Orpo
from capibara.objectives.preference import Dpo
from capibara.objectives.reward import Reward
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


def dpo(kind, theirs=None, **options):
    """Our loss and TRL's arguments of it, which have our names but for those in `theirs`."""
    return Dpo(kind=kind, **options), dict(method="dpo", loss_type=[kind]) | options | (theirs or {})


def cpo(kind, theirs, **options):
    return Cpo(kind=kind, **options), dict(method="cpo", loss_type=kind) | theirs


LOSSES = {
    "sigmoid": dpo("sigmoid", beta=0.3),
    "hinge": dpo("hinge", beta=0.3),
    "ipo": dpo("ipo_mean", dict(loss_type=["ipo"]), beta=0.2),
    "robust": dpo("robust", beta=0.3, label_smoothing=0.2),
    **{
        kind: dpo(kind, beta=0.1)
        for kind in ("sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
    },
    "discopop": dpo("discopop", beta=0.1, discopop_tau=0.5),
    "exo_pair": dpo("exo_pair", beta=0.1, label_smoothing=1e-3),
    "aot": dpo("aot", beta=0.1, label_smoothing=0.1),
    "aot_unpaired": dpo("aot_unpaired", beta=0.1),
    "forward_kl": (
        Dpo(beta=1e-4, divergence="forward_kl"),
        dict(method="dpo", beta=1e-4, f_divergence_type="forward_kl"),
    ),
    "js_divergence": (
        Dpo(kind="hinge", beta=0.1, divergence="js_divergence"),
        dict(method="dpo", loss_type=["hinge"], beta=0.1, f_divergence_type="js_divergence"),
    ),
    "alpha_divergence": (
        Dpo(beta=0.05, divergence="alpha_divergence", alpha=0.7),
        dict(method="dpo", beta=0.05, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.7),
    ),
    "cpo": cpo("sigmoid", dict(beta=0.1, label_smoothing=0.1), beta=0.1, label_smoothing=0.1),
    "cpo_hinge": cpo("hinge", dict(beta=0.1, cpo_alpha=0.5), beta=0.1, nll_weight=0.5),
    "cpo_ipo": cpo("ipo", dict(beta=0.2), beta=0.2),
    "simpo": cpo("simpo", dict(beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0), beta=2.0, gamma=1.0, nll_weight=0.0),
    "alphapo": cpo("simpo", dict(beta=2.0, loss_type="alphapo", alpha=0.1), beta=2.0, alpha=0.1, nll_weight=0.0),
    "orpo": (Orpo(beta=0.5), dict(method="orpo", beta=0.5)),
    "kto": (
        Kto(beta=0.1, desirable_weight=1.2, undesirable_weight=0.8),
        dict(method="kto", beta=0.1, desirable_weight=1.2, undesirable_weight=0.8),
    ),
    "reward": (Reward(), dict(method="reward")),
    "reward_centred": (Reward(centering=0.01), dict(method="reward", center_rewards_coefficient=0.01)),
    "apo_zero_unpaired": (
        Kto(kind="apo_zero_unpaired", beta=0.1),
        dict(method="kto", loss_type="apo_zero_unpaired", beta=0.1),
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
    "log_odds_chosen": "log_odds_ratio",
    "kl": "kl",
    "accuracy": "reward_accuracy",
    "margin": "reward_margin",
    "grad_norm": "grad_norm",
}
UNPAIRED = {"rewards/chosen": "reward_desirable", "rewards/rejected": "reward_undesirable"}
IN_CI = ("robust", "simpo", "orpo", "kto", "reward")
ATOL = 1e-4  # for log-probabilities of about -40 and values computed from them
RTOL = 5e-5  # of gradient norms: float32 has log-probabilities of about -100 to 1e-5, and "forward_kl" is their exponential

pytestmark = pytest.mark.standard_promotion


def write_lines(folder):
    """pairs.jsonl, and unpaired.jsonl, of which one batch has only desirable answers.

    TRL takes a mismatched answer from the line before in the batch, for the first line from the last one; we take that of
    the line before in the file. The last answer of each batch is the same, and so both have the same.
    """
    write_pairs(folder / "pairs.jsonl")
    unpaired = []
    for i, line in enumerate((folder / "pairs.jsonl").read_text().splitlines()):
        pair, label = json.loads(line), i // ROWS == 1 or i % 3 != 1
        completion = "sun or fish" if i % ROWS == ROWS - 1 else pair["chosen" if label else "rejected"]
        unpaired.append({"prompt": pair["prompt"], "completion": completion, "label": label})
    (folder / "unpaired.jsonl").write_text("".join(json.dumps(line) + "\n" for line in unpaired))


def write_pairs(file):
    words, rng = ["river", "grass", "fish", "sun", "water lily"], np.random.default_rng(0)
    lines = []
    for i in range(STEPS * ROWS):
        word, other = rng.choice(words, 2)
        pair = {"prompt": f"{i}?", "chosen": word.upper() + "!" * (i % 4), "rejected": f"{word} or {other}"}
        pair["margin"] = 0.5 * (i % 3)  # which reward models read
        lines.append(json.dumps(pair) + "\n")
    file.write_text("".join(lines))


def drawn():
    """The reference's initial parameters."""
    model = api.build(MODEL)
    leaves = zip(tree.path_names(model.abstract_params), jax.tree.leaves(model.abstract_params), strict=True)
    shapes = {name: leaf.shape for name, leaf in leaves}
    values = tensors.read(tables.of("llama", shapes, {}), shapes, answers.draw)
    return tree.map_with_names(lambda name, _: values[name], model.abstract_params)


def with_scores(name, params):
    """Parameters for the loss of this name: a reward model has the peer's scores in the place of the output projection."""
    if not isinstance(LOSSES[name][0], Reward):
        return params
    rest = {key: value for key, value in params.items() if key != "output"}
    return rest | {"score": np.linspace(-0.5, 0.5, MODEL.embed_dim, dtype=np.float32)}


class Seen(Callback):
    """The metrics of each step."""

    def __init__(self):
        self.metrics = []

    def on_step(self, step, metrics):
        self.metrics.append(dict(metrics))


def trained(name, params, folder, tokenizer, monkeypatch):
    """The metrics of our steps with the loss of this name, from these parameters, and the parameters after them."""
    loss = LOSSES[name][0]
    is_kto, template = isinstance(loss, Kto), ChatTemplate(tokenizer=tokenizer)
    files = (str(folder / ("unpaired.jsonl" if is_kto else "pairs.jsonl")),)
    options = dict(files=files, template=template, validation_files=files)  # no rows are held out
    is_reward = isinstance(loss, Reward)
    source = PreferenceJsonlSource(scored=is_reward, **options)
    if is_kto:
        source = UnpairedJsonlSource(mismatched=loss.kind == "kto", **options)
    vocabulary = TokenizerJsonVocabulary(path=tokenizer)
    schedule = Schedule(kind="constant", learning_rate=1e-3, warmup_steps=0, warmup_fraction=0.0)
    trainer = Trainer(
        model_dir=str(folder / f"run_{name}"),
        steps=STEPS,
        model=dataclasses.replace(MODEL, head="score") if is_reward else MODEL,
        init_from="the reference",
        plan=Plan(batch_size=ROWS),
        dataset=Dataset(source=source, vocabulary=vocabulary, length=96, packing="none", shuffle=False),
        optimizer=Optimizer(schedule=schedule, weight_decay=0.0, b2=0.95, eps=1e-6),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=loss,
        log_every=1,
    )
    return steps_of(trainer, params, 1, monkeypatch)


def steps_of(trainer, params, devices, monkeypatch, others=()):
    """The metrics of a run's steps from these parameters, and the parameters after them; `others`: those of other models by path."""
    seen, after, set_up = Seen(), [], loop.set_up

    def watched(trainer, **options):
        run, initial = set_up(trainer, jax.devices()[:devices], **options)

        def train_step(state, batch):
            state, metrics = run.train_step(state, batch)
            after[:] = [jax.device_get(state.params)]
            return state, metrics

        return dataclasses.replace(run, train_step=train_step), initial

    monkeypatch.setattr(loop, "set_up", watched)

    def load(path, model, merge):
        values = dict(others).get(path, params)
        return lambda target: jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), values, target)

    loop.train(trainer, seen, load=load)
    return seen.metrics, after[0]


def apart(got, want):
    """The largest difference of each metric over the steps that have it; of gradient norms the relative one."""
    differences = {}
    for mine, theirs in zip(got, want, strict=True):
        for name, key in (METRICS | (UNPAIRED if "kl" in mine else {})).items():
            if name in theirs and key in mine:
                difference, scale = abs(mine[key] - theirs[name]), max(abs(theirs[name]), 1e-2)
                differences[key] = max(
                    differences.get(key, 0.0), difference / scale if key == "grad_norm" else difference
                )
    return differences


def too_large(differences):
    return {key: value for key, value in differences.items() if not value <= (RTOL if key == "grad_norm" else ATOL)}


@pytest.mark.parametrize("name", [x if x in IN_CI else pytest.param(x, marks=pytest.mark.heavy) for x in LOSSES])
def test_preferences_are_learned_as_by_trl(name, toy_tokenizer, tmp_path, monkeypatch):
    write_lines(tmp_path)
    got, _ = trained(name, with_scores(name, drawn()), tmp_path, toy_tokenizer, monkeypatch)
    assert too_large(apart(got, json.loads((HERE / "trl.json").read_text())[name])) == {}
