"""A model is laid out by its run's plan, or over whatever devices there are; its answers are in one process."""

from __future__ import annotations

import jax
import pytest
import tokenizers

from capibara import sharding
from capibara.cli.composition.models import open_subject
from capibara.core.types import UserError
from capibara.evaluation.scoring import Pair, Scorer
from capibara.sharding import Plan

from .conftest import SMALL_ROWS


def test_the_plan_of_another_machine_gives_way(run_dir, tmp_path, subject):
    (tmp_path / "two.gin").write_text("Plan.fsdp = 2\nPlan.batch_size = 6\n")
    found = open_subject(run_dir, [str(tmp_path / "two.gin")], SMALL_ROWS[:1])
    assert found.mesh.shape["fsdp"] == 8 and found.trainer.plan.batch_size == 8
    assert {leaf.sharding.mesh.size for leaf in jax.tree.leaves(found.params)} == {8}
    assert found.about == {"model": run_dir, "step": 0, "weights": "raw"} | {"cache_dtype": "compute", "length": 64}
    with pytest.raises(UserError, match="needs 2 devices"):  # whoever says so now means it
        open_subject(run_dir, bindings=[*SMALL_ROWS, "Plan.fsdp = 2"])


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(run_dir, tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(400)}, unk_token="w0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fields = {"path": str(tmp_path), "eos_token": "w1", "pad_token": "w2"}
    of_it = ["Dataset.vocabulary = @TokenizerJsonVocabulary()"]
    of_it += [f"TokenizerJsonVocabulary.{name} = {value!r}" for name, value in fields.items()]
    with pytest.raises(UserError, match="its tokenizer has ids up to 399, its model rows for ids up to 383"):
        open_subject(run_dir, bindings=[*SMALL_ROWS, *of_it])


def test_parts_are_made_once(subject):
    assert subject.engine is subject.engine and subject.scorer is subject.scorer and subject.slots == 8


def test_a_run_of_nodes_is_one_model_for_an_evaluation_elsewhere(run_dir, tmp_path):
    (tmp_path / "nodes.gin").write_text(
        "Plan.node = 16\nPlan.fsdp = 2\nPlan.batch_size = 32\nTrainer.strategy = @ConsensusConfig()\n"
        "ConsensusConfig.every = 1\n"
    )
    found = open_subject(run_dir, [str(tmp_path / "nodes.gin")], SMALL_ROWS[:1])
    assert dict(found.mesh.shape)["fsdp"] == 8 and "node" not in found.mesh.shape and found.trainer.plan.node == 1


def test_nodes_share_the_rows_of_an_evaluation(subject):
    """Three nodes, which do not divide the rows of a batch evenly."""
    plan = Plan(batch_size=6, node=3, fsdp=2)
    mesh = sharding.make_mesh(plan, jax.devices()[:6])
    params = jax.device_put(subject.params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    asked = [Pair([0, 5, 6], [7, 8]), Pair([0, 9], [10, 11, 12]), Pair([0], [3])]
    apart = Scorer(subject.model, params, 64, plan=plan, mesh=mesh)(asked)
    for one, other in zip(apart, subject.scorer(asked), strict=True):
        assert one.log_probability == pytest.approx(other.log_probability, rel=1e-5) and one.greedy == other.greedy
