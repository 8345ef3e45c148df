"""A training method is one file: this one adds its own, and nothing else is changed for it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import capibara as cb
from capibara.checkpoints.manager import Checkpointing
from capibara.config import configurable
from capibara.consensus.privacy import Privacy
from capibara.core.types import UserError
from capibara.planner.compiler import proof
from capibara.planner.hardware import slices
from capibara.planner.model import workload
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.strategies.group.member import GroupNode
from capibara.training.methods.hooks import Hooks
from capibara.training.methods.method import Method

TRAINING = pathlib.Path(cb.__file__).parent / "training"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnDescent(Method):
    """Updates by the signs of the gradient (signSGD, Bernstein et al. 2018, arXiv:1802.04434), for so many steps at most.

    Attributes:
      most_steps: after which the run ends.
    """

    most_steps: int = 6

    def unsupported(self, options):
        return {"Trainer.ema_decay": options.ema_decay is not None}

    def gradient(self, parts):
        mean = super().gradient(parts)

        def gradient(trained, frozen, batch, step, scale):
            grads, sums, stats, metrics = mean(trained, frozen, batch, step, scale)
            positive = sum(jnp.sum(g > 0) for g in jax.tree.leaves(grads)) / sum(g.size for g in jax.tree.leaves(grads))
            return jax.tree.map(jnp.sign, grads), sums, stats, metrics | {"positive_share": positive}

        return gradient

    @property
    def unplanned(self):
        return "nobody has planned signs"

    def hooks(self, options, trained, status):
        status(f"{sum(x.size for x in jax.tree.leaves(trained)):,} signs a step")
        return SignHooks(options, self.most_steps)


class SignHooks(Hooks):
    def __init__(self, options, most_steps):
        super().__init__(options)
        self.most_steps = most_steps

    @property
    def last_step(self):
        return min(self.options.steps, self.most_steps)

    @property
    def reason(self):
        return "signs_spent" if self.last_step < self.options.steps else super().reason

    def ended(self, step):
        return f"the signs are spent at step {step}: raise OwnDescent.most_steps to continue"

    def closing(self, step):
        return f"{step} steps of signs"

    def metrics(self, step):
        return {"signs_left": float(self.most_steps - step)}

    def remarks(self, step, metrics):
        if step == 2:
            yield f"step {step}: {metrics['positive_share']:.3%} of the signs are positive"


def test_a_method_of_ones_own_trains_adds_metrics_ends_the_run_and_resumes(make_trainer, train):
    trainer = make_trainer(method=OwnDescent(), checkpointing=Checkpointing(every=2))
    seen = train(trainer)
    assert (seen.outcome.step, seen.outcome.reason) == (6, "signs_spent") and seen.checkpoints == [2, 4, 6]
    assert seen.losses[6] < seen.losses[1]
    # Its step: the gradient that the optimizer gets has signs alone.
    count = sum(x.size for x in jax.tree.leaves(seen.state.params))
    assert seen.metrics[1]["grad_norm"] == pytest.approx(count**0.5, rel=0.05)
    assert 0.2 < seen.metrics[1]["positive_share"] < 0.8
    assert [metrics["signs_left"] for metrics in seen.metrics.values()] == [5, 4, 3, 2, 1, 0]
    assert f"{count:,} signs a step" in seen.statuses and "6 steps of signs" in seen.statuses[-2:]
    assert f"step 2: {seen.metrics[2]['positive_share']:.3%} of the signs are positive" in seen.statuses
    with pytest.raises(UserError, match="the signs are spent at step 6: raise OwnDescent.most_steps to continue"):
        train(trainer)
    more = train(dataclasses.replace(trainer, method=OwnDescent(most_steps=9), log_every=2))
    assert (more.start_step, more.outcome.step, more.outcome.reason) == (6, 9, "signs_spent")
    assert [*more.losses] == [8, 9]  # the last step is logged


def test_it_trains_by_the_package_and_its_run_folder_names_it(make_trainer, capfd):
    trainer = make_trainer(method=OwnDescent(most_steps=2))
    outcome = cb.train(trainer)
    assert (outcome.step, outcome.reason) == (2, "signs_spent")
    folder = pathlib.Path(trainer.model_dir)
    assert "OwnDescent.most_steps = 2" in (folder / "config.gin").read_text()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["signs_left"] for record in records if record["kind"] == "train"] == [1, 0]


def test_what_it_does_not_support_is_refused_by_its_name(make_trainer):
    with pytest.raises(
        UserError, match=r"^Trainer.ema_decay is not supported with Trainer.method \(@OwnDescent\(\)\): leave it out$"
    ):
        make_trainer(method=OwnDescent(), ema_decay=0.9)
    with pytest.raises(UserError, match="^Plan.node is 4 and Trainer.strategy is None"):
        make_trainer(method=OwnDescent(), plan=Plan(batch_size=8, node=4, fsdp=2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"privacy": Privacy(clip_norm=1.0, noise_multiplier=1.0)}, "Trainer.privacy is not supported with Trainer.method"),
        ({"group": GroupNode(exchange="x", name="a")}, "Trainer.group is not supported with Trainer.method"),
        ({"strategy": ConsensusConfig()}, "Trainer.strategy is not supported with Trainer.method"),
    ],
)  # fmt: skip
def test_a_run_has_one_method(make_trainer, changes, told):
    with pytest.raises(UserError, match=told):
        make_trainer(method=OwnDescent(), **changes)


def test_the_planner_knows_what_it_says_of_itself(make_trainer):
    plain, own = make_trainer(), make_trainer(method=OwnDescent())
    workload.check_ordinary(plain)
    with pytest.raises(UserError, match="^nobody has planned signs$"):
        workload.check_ordinary(own)
    slice_ = slices.parse("v5e-8")
    keys = [proof.key(run, slice_) for run in (plain, own, make_trainer(method=OwnDescent(most_steps=7)))]
    assert [key.get("method") for key in keys] == [None, "OwnDescent(most_steps=6)", "OwnDescent(most_steps=7)"]


@pytest.mark.parametrize("name", ["loop", "step", "setup", "checks", "recovery", "assembly", "observers", "base/state"])
def test_what_every_run_has_in_common_names_no_method(name):
    text = (TRAINING / f"{name}.py").read_text(encoding="utf-8")
    words = r"(?i)\b\w*(strateg|privacy|private_|ledger|noise)\w*\b|\b_?(groups?|apart|nodes?)\b"
    assert re.findall(words, text) == []
