"""Training on given answers as in TRL's GRPOTrainer, RLOOTrainer, GMPOTrainer and OnlineDPOTrainer: their five steps in trl_rollouts.json.

trl_rollouts.json is the steps.json of test_transformers_rollouts.py (trl 1.16 made the committed file), with how far the
parameters moved.
"""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara.checkpoints.manager import Checkpointing
from capibara.data.chat.answers import PromptJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.inference.sampling.sampling import Sampling
from capibara.objectives.preference import Dpo
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.strategies.answering import Answer, Answerer
from capibara.strategies.grpo import Grpo
from capibara.strategies.online_dpo import OnlineDpo
from capibara.strategies.policy.cispo import Cispo
from capibara.strategies.policy.clipped import Clipped
from capibara.strategies.policy.gmpo import Gmpo
from capibara.strategies.policy.sapo import Sapo
from capibara.strategies.policy.vespo import Vespo
from capibara.training.base.options import Evaluation
from capibara.training.trainer import Trainer

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import test_trl  # noqa: E402

LEARNING_RATE = 2e-4
STEPS, GROUP, NEW, LENGTH, END = 5, 4, 12, 32, 2
NARROW = dict(low=0.05, high=0.08)  # one step moves little
CLIP = dict(epsilon=0.05, epsilon_high=0.08)


def given(prompt, answer, record):
    raise AssertionError("the rewards are given")


def case(theirs, *, parts=1, temperature=1.0, **ours):
    """Our loss and TRL's arguments; two steps on each rollout unless they say otherwise."""
    method, more = theirs.get("method", "grpo"), {"num_iterations": 2, "temperature": temperature}
    if method != "rloo":
        more |= {"beta": 0.0, "use_bias_correction_kl": False}
    if method == "grpo":
        more |= {"loss_type": "grpo", **CLIP}
    if parts > 1:
        more["parts"] = parts
    options = {"surrogate": Clipped(**NARROW), "updates": 2, "importance_cap": None} | ours
    loss = Grpo(
        rewards=(given,) * parts, group=GROUP, sampling=Sampling(max_new_tokens=NEW, temperature=temperature), **options
    )
    return loss, {"method": method} | more | theirs


def online(picks, part=0, *, penalty=None, **preference):
    """Our loss of pairs and TRL's arguments, with two answers of each group and one part of their rewards."""
    sampling = Sampling(max_new_tokens=NEW, temperature=0.9)  # their log probabilities are at 1, whatever it is
    loss = OnlineDpo(
        rewards=(given,), sampling=sampling, preference=Dpo(**preference), missing_end_penalty=penalty, updates=1
    )
    theirs = dict(loss_type=preference["kind"], beta=[preference["beta"]], missing_eos_penalty=penalty)
    return loss, dict(method="online_dpo", picks=picks, part=part) | theirs


TIS = dict(weighs=True, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.15)
LOSSES = {
    "grpo": case({}),
    "grpo_kl": case(dict(beta=0.3, temperature=0.8), kl=0.3, temperature=0.8),
    "grpo_unbiased_kl": case(dict(beta=0.3, use_bias_correction_kl=True), kl=0.3, unbiased_kl=True),
    "ceiling": case(
        dict(epsilon=0.05, epsilon_high=1e-3, delta=1.002), surrogate=Clipped(low=0.05, high=1e-3, ceiling=1.002)
    ),
    "bnpo": case(dict(loss_type="bnpo", scale_rewards="batch"), token_weights="micro_batch", scale="batch"),
    "dr_grpo": case(dict(loss_type="dr_grpo", scale_rewards="none"), token_weights="max_length", scale="none"),
    "dapo": case(dict(loss_type="dapo"), token_weights="batch"),
    "dapo_masked": case(
        dict(loss_type="dapo", mask_truncated_completions=True, beta=0.1),
        token_weights="batch", mask_truncated=True, kl=0.1,
    ),
    "grpo_masked": case(dict(mask_truncated_completions=True), mask_truncated=True),
    "mini_batches": case(dict(num_iterations=1, steps_per_generation=2), updates=1, mini_batches=2),
    "cispo": case(
        dict(loss_type="cispo", epsilon_high=1.04), surrogate=Cispo(cap=1.04), token_weights="batch"
    ),
    "sapo": case(
        dict(loss_type="sapo", sapo_temperature_pos=1.5, sapo_temperature_neg=3.0),
        surrogate=Sapo(temperature_positive=1.5, temperature_negative=3.0),
    ),
    "vespo": case(dict(loss_type="vespo"), surrogate=Vespo(), token_weights="batch"),
    "vespo_weighed": case(
        dict(loss_type="vespo") | TIS, surrogate=Vespo(), token_weights="batch", importance_cap=1.15
    ),
    "gspo": case(dict(importance_sampling_level="sequence"), level="sequence"),
    "luspo": case(
        dict(loss_type="luspo", importance_sampling_level="sequence"), level="sequence", token_weights="sum"
    ),
    "gmpo": case(
        dict(method="gmpo", **CLIP), surrogate=Gmpo(**NARROW)
    ),
    "rloo": case(
        dict(method="rloo", beta=0.05, epsilon=0.3, epsilon_high=0.4), surrogate=Clipped(low=0.3, high=0.4), level="sequence_sum", baseline="leave_one_out", scale="none", kl=0.05,
        kl_in="reward",
    ),
    "rloo_normalized": case(
        dict(method="rloo", beta=0.05, normalize_advantages=True, **CLIP), level="sequence_sum",
        baseline="leave_one_out", scale="answers", kl=0.05, kl_in="reward",
    ),
    "truncated": case(TIS, importance_cap=1.15),
    "token_mask": case(
        TIS | dict(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_min=0.9),
        importance_mode="token_mask", importance_cap=1.15, importance_floor=0.9,
    ),
    "sequence_truncate": case(
        TIS | dict(vllm_importance_sampling_mode="sequence_truncate"), importance_mode="sequence_truncate",
        importance_cap=1.15,
    ),
    "sequence_mask": case(
        TIS | dict(vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_clip_max=1.25),
        importance_mode="sequence_mask", importance_cap=1.25,
    ),
    "off_policy_limit": case(
        TIS | dict(off_policy_mask_threshold=0.02), importance_cap=1.15, off_policy_limit=0.02
    ),
    "gdpo": case(
        dict(multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5]), parts=2,
        reward_weights=(1.0, 0.5), normalize_each=True, baseline="none", scale="answers",
    ),
    "online_dpo": online((0, 1), part=1, kind="sigmoid", beta=0.3),
    "online_dpo_ipo": online((0, 1), part=1, kind="ipo", beta=0.2),
    "online_dpo_ties": online((2, 0), kind="sigmoid", beta=0.3),  # all rewards are equal
    "online_dpo_missing_end": online((2, 0), penalty=0.5, kind="sigmoid", beta=0.3),  # then those of answer 2 are lower
}  # fmt: skip
IN_CI = (
    "grpo_unbiased_kl",
    "dapo_masked",
    "mini_batches",
    "cispo",
    "gspo",
    "rloo",
    "sequence_mask",
    "online_dpo_missing_end",
)
RTOL = {"loss": 2e-4, "grad_norm": 5e-5}  # losses are differences of answers' terms, and relative to at least 0.01

pytestmark = pytest.mark.standard_promotion


def rollouts():
    """The answers to each prompt, of which some are cut off; `drawn` is without the model's log-probabilities."""
    rng = np.random.default_rng(3)
    groups = []
    for _ in range(4 * STEPS):
        prompt = rng.integers(3, 380, rng.integers(3, 9)).tolist()
        group = []
        for k in range(GROUP):
            tokens = rng.integers(3, 380, rng.integers(2, NEW)).tolist() + [7 if k == 2 else END]
            drawn = rng.normal(0, 0.1, len(tokens)).round(4).tolist()
            parts = [float(k % 2), round(float(rng.uniform()), 3)]
            group.append({"prompt": prompt, "tokens": tokens, "drawn": drawn, "parts": parts})
        groups.append(group)
    return groups


def recorded():
    """The answers with TRL's log-probabilities."""
    groups, drawn = rollouts(), json.loads((HERE / "trl_rollouts.json").read_text())["drawn"]
    return [[one | {"drawn": d} for one, d in zip(group, of_group)] for group, of_group in zip(groups, drawn)]


def trained(name, params, groups, folder, tokenizer, monkeypatch, mesh=(), devices=1):
    """The metrics of our steps with the loss of this name, from these parameters, and the parameters after them."""
    loss, theirs = LOSSES[name]
    is_online = isinstance(loss, OnlineDpo)  # a row has two answers, and a batch four pairs
    picks, first = theirs.get("picks", range(GROUP)), theirs.get("part", 0)
    weights = loss.reward_weights or (1.0,) * len(loss.rewards)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(len(groups))))

    def answer(one):
        parts = tuple(one["parts"][first : first + len(weights)])
        reward = sum(weight * part for weight, part in zip(weights, parts))
        return Answer(one["prompt"], one["tokens"], one["drawn"], reward, parts, one["tokens"][-1] != END)

    monkeypatch.setattr(Answerer, "load", lambda self, params: None)
    monkeypatch.setattr(
        Answerer,
        "answers",
        lambda self, split, asked, *_: [[answer(groups[p.number][k]) for k in picks] for p in asked],
    )
    monkeypatch.setattr(  # TRL samples from ids without a token, too
        Grpo, "drawn_from", lambda self, *_: {"temperature": self.sampling.temperature, "usable": None}
    )
    schedule = Schedule(kind="constant", learning_rate=LEARNING_RATE, warmup_steps=0, warmup_fraction=0.0)
    source = PromptJsonlSource(
        files=(str(prompts),), template=ChatTemplate(tokenizer=tokenizer), validation_files=(str(prompts),)
    )
    vocabulary = TokenizerJsonVocabulary(path=tokenizer)
    trainer = Trainer(
        model_dir=str(folder / f"run_{name}_{devices}"),
        steps=STEPS,
        model=test_trl.MODEL,
        init_from="the reference",
        plan=Plan(batch_size=GROUP if is_online else 2 * GROUP, **dict(mesh)),
        dataset=Dataset(
            source=source, vocabulary=vocabulary, length=LENGTH * (1 + is_online), packing="none", shuffle=False
        ),
        optimizer=Optimizer(schedule=schedule, weight_decay=0.0, b2=0.95, eps=1e-6),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=loss,
        log_every=1,
    )
    return test_trl.steps_of(trainer, params, devices, monkeypatch)


def apart(got, want):
    """The largest difference of each metric over the steps, relative for those in RTOL."""
    differences = {}
    for mine, theirs in zip(got, want, strict=True):
        for name, key in test_trl.METRICS.items():
            # Which of two equal log-probabilities is larger, rounding says.
            if name in theirs and not (key == "reward_accuracy" and theirs["rewards/margins"] == 0):
                difference = abs(mine[key] - theirs[name]) / (max(abs(theirs[name]), 1e-2) if key in RTOL else 1.0)
                differences[key] = max(differences.get(key, 0.0), difference)
    return differences


def moved(params, base):
    """How far parameters are from others, as a norm."""
    squares = jax.tree.map(lambda a, b: float(np.square(np.asarray(a, np.float64) - b).sum()), params, base)
    return float(np.sqrt(sum(jax.tree.leaves(squares))))


def too_large(differences):
    return {name: value for name, value in differences.items() if not value <= RTOL.get(name, test_trl.ATOL)}


@pytest.mark.parametrize("name", [x if x in IN_CI else pytest.param(x, marks=pytest.mark.heavy) for x in LOSSES])
def test_answers_are_learned_as_by_trl(name, toy_tokenizer, tmp_path, monkeypatch):
    want = json.loads((HERE / "trl_rollouts.json").read_text())[name]
    got, params = trained(name, base := test_trl.drawn(), recorded(), tmp_path, toy_tokenizer, monkeypatch)
    assert too_large(apart(got, want["steps"])) == {}
    assert moved(params, test_trl.drawn()) == pytest.approx(want["moved"], rel=2e-4), base.keys()


MESH = dict(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    "name",
    [
        "rloo",
        "online_dpo",
        *(pytest.param(x, marks=pytest.mark.heavy) for x in ("dapo_masked", "gspo", "vespo_weighed")),
    ],
)
def test_a_mesh_and_one_device_learn_alike(name, toy_tokenizer, tmp_path, monkeypatch):
    want, _ = trained(name, test_trl.drawn(), recorded(), tmp_path, toy_tokenizer, monkeypatch)
    monkeypatch.undo()
    got, _ = trained(name, test_trl.drawn(), recorded(), tmp_path, toy_tokenizer, monkeypatch, MESH, 8)
    assert too_large(apart(got, want)) == {}
