"""Trains by each method on one device a process: python methods.py FOLDER NAME METHOD ...

The metrics of a run go to FOLDER/NAME.METHOD.PROCESS.json, its parameters to FOLDER/NAME.METHOD.npz. A test does the same
alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils

import capibara as cb
from capibara.checkpoints.policy import Checkpointing
from capibara.core import tree
from capibara.data.chat.steps import StepsJsonlSource
from capibara.inference.engine.engine import EngineConfig
from capibara.models.api import DecoderConfig
from capibara.multihost import exits, joining
from capibara.objectives.kto import Kto
from capibara.objectives.loss import Loss
from capibara.objectives.process_reward import ProcessReward
from capibara.objectives.reward import Reward
from capibara.sharding import Plan
from capibara.strategies.distillation import storing
from capibara.strategies.ppo import Ppo
from capibara.strategies.rewarded import RewardedLoss
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "interop"))

import test_trl  # noqa: E402
import test_trl_rollouts  # noqa: E402

MODEL = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
GROUP, NEW, STEPS, TOP_K = 4, 8, 3, 6
ENGINE = EngineConfig(slots=8, prefix_cache_mib=0)


def has_digit(prompt, answer, record):
    return float(any(letter.isdigit() for letter in answer))


def is_short(prompt, answer, record):
    return 1.0 / (1 + len(answer))


def preference(name: str) -> Loss:
    return test_trl.LOSSES[name][0]


def rollout(name: str, **options) -> Loss:
    """A loss on the model's own answers: as compared with TRL, on answers that are drawn here."""
    loss = test_trl_rollouts.LOSSES[name][0]
    rewards = (has_digit, is_short)[: len(loss.rewards)]
    sampling = cb.Sampling(max_new_tokens=NEW, temperature=0.7)
    return dataclasses.replace(loss, **{"rewards": rewards, "sampling": sampling, "engine": ENGINE} | options)


def ppo(**options) -> Ppo:
    sampling = cb.Sampling(max_new_tokens=NEW, temperature=0.7)
    return Ppo(rewards=(is_short,), sampling=sampling, engine=ENGINE, updates=2, **options)


METHODS: dict[str, Loss] = {
    **{
        name: preference(name)
        for name in (
            *("sigmoid", "exo_pair", "bco_pair", "aot", "aot_unpaired", "cpo", "simpo", "orpo"),
            *("kto", "apo_zero_unpaired", "reward"),
        )
    },
    "bco": Kto(kind="bco", beta=0.3),
    "process_reward": ProcessReward(),
    **{name: rollout(name) for name in ("bnpo", "dr_grpo", "cispo", "gspo", "rloo", "rloo_normalized", "gdpo")},
    "dapo": rollout("dapo", resample=2),
    "reinforce_pp": rollout("grpo", baseline="none", scale="tokens", kl=0.1, kl_in="tokens"),
    # Keys and values of 8 bits, so that the engine's probabilities differ from those in training.
    **{
        name: rollout(name, importance_cap=1.0005, engine=dataclasses.replace(ENGINE, cache_dtype="int8"))
        for name in ("truncated", "sequence_mask", "vespo_weighed")
    },
    "online_dpo": rollout("online_dpo", group=GROUP),
    "ppo": ppo(),
    "ppo_controlled": ppo(kl=0.1, kl_target=0.5, kl_horizon=8, whiten_rewards=True, mini_batches=2),
    "stored": cb.Distillation(stored="stored"),
}  # fmt: skip


def write_data(folder: pathlib.Path) -> None:
    """Prompts, pairs, labelled answers and solutions with labelled steps."""
    words = ["river", "grass", "fish", "sun"]
    pairs = [
        {
            "prompt": f"{i}?",
            "chosen": words[i % 4].upper() + "!" * (i % 3),
            "rejected": words[i % 4],
            "margin": i % 3 / 2,
        }
        for i in range(30)
    ]
    labels = [i % 3 != 2 for i in range(30)]
    answers = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}
        for pair, label in zip(pairs, labels)
    ]
    solutions = [
        {"prompt": f"{i}?", "steps": words[: 1 + i % 3], "labels": [(i + step) % 2 == 0 for step in range(1 + i % 3)]}
        for i in range(30)
    ]
    for name, lines in {"pairs": pairs, "answers": answers, "solutions": solutions}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def source_of(loss: Loss, folder: pathlib.Path):
    options = dict(template=cb.ChatTemplate(tokenizer=str(folder / "tokenizer")), validation_fraction=0.3)
    pairs = (str(folder / "pairs.jsonl"),)
    match loss:
        case Kto():
            mismatched = loss.kind == "kto"
            return cb.UnpairedJsonlSource(files=(str(folder / "answers.jsonl"),), mismatched=mismatched, **options)
        case ProcessReward():
            return StepsJsonlSource(files=(str(folder / "solutions.jsonl"),), **options)
        case cb.Distillation():
            return cb.ChatJsonlSource(files=pairs, format="chosen", **options)
    if isinstance(loss, RewardedLoss):
        return cb.PromptJsonlSource(files=pairs, **options)
    return cb.PreferenceJsonlSource(files=pairs, scored=isinstance(loss, Reward), **options)


def trainer_of(folder: pathlib.Path, name: str, method: str) -> cb.Trainer:
    """A run of two micro-batches of several rows."""
    loss = METHODS[method]
    if isinstance(loss, cb.Distillation):
        loss = dataclasses.replace(loss, stored=str(folder / "stored"))
    head = {"head": "score"} if isinstance(loss, Reward | ProcessReward) else {}
    draws = isinstance(loss, RewardedLoss)
    return cb.Trainer(
        model_dir=str(folder / f"{name}_{method}"),
        steps=STEPS,
        model=dataclasses.replace(MODEL, value_head=isinstance(loss, Ppo), **head),
        plan=Plan(batch_size=16 if draws else 8, accumulation=2),
        dataset=cb.Dataset(
            source=source_of(loss, folder),
            vocabulary=cb.TokenizerJsonVocabulary(path=str(folder / "tokenizer")),
            length=48 if not draws or method == "online_dpo" else 24,
            packing="none",
        ),
        # A larger eps: gradients that are 0 but for rounding move nothing.
        optimizer=cb.Optimizer(
            schedule=cb.Schedule(kind="constant", learning_rate=1e-2, warmup_steps=0, warmup_fraction=0.0),
            weight_decay=0.0,
            eps=1e-3,
        ),
        evaluation=Evaluation(every=STEPS),
        checkpointing=Checkpointing(every=0),
        loss=loss,
        log_every=1,
    )


def store_teacher(folder: pathlib.Path) -> None:
    """Writes the log-probabilities of a teacher on the documents of the method "stored"."""
    model = dataclasses.replace(MODEL, embed_dim=16)
    (folder / "teacher").mkdir()
    trainer, teacher = trainer_of(folder, "teacher", "stored"), cb.Teacher(path=str(folder / "teacher"), model=model)

    def load(path, model, merge):
        params = jax.jit(model.init)(jax.random.key(5))
        return lambda target: jax.tree.map(lambda x, to: jax.device_put(2 * x, to.sharding), params, target)

    loss = cb.Distillation(teacher=teacher, top_k=TOP_K)
    trainer = dataclasses.replace(trainer, loss=loss, plan=Plan(batch_size=8))
    storing.store(trainer, loss, teacher, str(folder / "stored"), load=load, show=lambda *_: None)


class Seen(Callback):
    def __init__(self):
        self.steps, self.evaluations = {}, {}

    def on_step(self, step, metrics):
        self.steps[step] = dict(metrics)

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = dict(metrics)


@contextlib.contextmanager
def devices_and_state(devices):
    """Has runs train on some devices; yields a list with the parameters after the last step."""
    set_up, last = loop.set_up, []

    def hooked(trainer, **options):
        run, initial = set_up(trainer, devices, **options)

        def stepped(state, batch):
            state, metrics = run.train_step(state, batch)
            last[:] = [multihost_utils.process_allgather(state.params, tiled=True)]
            return state, metrics

        return dataclasses.replace(run, train_step=stepped), initial

    with mock.patch.object(loop, "set_up", hooked):
        yield last


def trained(folder: pathlib.Path, name: str, method: str, devices=None) -> dict:
    """Metrics by step and evaluation; on process 0, which writes the parameters."""
    seen = Seen()
    with devices_and_state(devices) as last:
        loop.train(trainer_of(folder, name, method), seen)
    if jax.process_index() == 0:
        leaves = zip(tree.path_names(last[0]), jax.tree.leaves(last[0]), strict=True)
        np.savez(folder / f"{name}.{method}.npz", **{key: np.asarray(leaf) for key, leaf in leaves})
    return {"steps": seen.steps, "evaluations": seen.evaluations, "samples": []}


def main(argv: list[str] | None = None) -> int:
    folder, name, *methods = sys.argv[1:] if argv is None else argv
    jax.config.update("jax_num_cpu_devices", 1)
    joining.join(joining.Joining(), {}, emulated=True)
    for method in methods:
        result = trained(pathlib.Path(folder), name, method)
        path = pathlib.Path(folder) / f"{name}.{method}.{jax.process_index()}.json"
        path.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(exits.run_process(main))
