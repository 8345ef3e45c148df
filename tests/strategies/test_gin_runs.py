"""The Gin files of preferences and rewards build the runs that they promise."""

from __future__ import annotations

import re
import sys

import pytest

from capibara import config
from capibara.consensus.aggregation import Aggregation, Krum
from capibara.consensus.outer import FedAdam, OuterSgd
from capibara.core.types import UserError
from capibara.data.chat.answers import PreferenceJsonlSource, PromptJsonlSource
from capibara.data.chat.steps import StepsJsonlSource
from capibara.objectives.cpo import Cpo
from capibara.objectives.kto import Kto
from capibara.objectives.orpo import Orpo
from capibara.objectives.preference import Dpo
from capibara.objectives.process_reward import ProcessReward
from capibara.objectives.reward import Reward
from capibara.strategies.policy.cispo import Cispo
from capibara.strategies.policy.clipped import Clipped
from capibara.strategies.policy.sapo import Sapo
from capibara.training import emulation
from capibara.training.trainer import Trainer

FILES = ["models/tiny.gin", "runs/lora.gin"]
GIVEN = ["MODEL_DIR=runs/new", "INIT_FROM=runs/base", "TRAIN_STEPS=10", "FILES=('a.jsonl',)"]


@pytest.fixture
def build(toy_tokenizer):
    def build(task, run, *bindings, before=(), files=FILES):
        config.parse(
            [*before, *files, f"tasks/{task}.gin", f"runs/{run}.gin"], [*GIVEN, f"TOKENIZER={toy_tokenizer}", *bindings]
        )
        return config.build(Trainer)

    return build


def test_dpo(build):
    trainer = build("preferences", "dpo", "Dpo.kind=ipo", "BETA=0.2")
    assert trainer.loss == Dpo(kind="ipo", beta=0.2) and isinstance(trainer.dataset.source, PreferenceJsonlSource)
    assert trainer.init_from == "runs/base" and trainer.dataset.length == 1024 and trainer.model.lora is not None
    with pytest.raises(UserError, match="Dpo.kind"):
        build("preferences", "dpo", "Dpo.kind=hinges")
    with pytest.raises(UserError, match="set Dataset.source = @PreferenceJsonlSource()"):
        build("chat", "dpo")


@pytest.mark.parametrize(
    ("run", "bindings", "loss"),
    [
        ("orpo", ["BETA=0.3"], Orpo(beta=0.3)),
        ("cpo", ["Cpo.kind=hinge"], Cpo(kind="hinge")),
        ("simpo", ["GAMMA=1.6", "Cpo.alpha=0.1"], Cpo(kind="simpo", beta=2.0, gamma=1.6, nll_weight=0.0, alpha=0.1)),
    ],
)
def test_methods_without_a_reference(build, run, bindings, loss):
    assert build("preferences", run, *bindings).loss == loss
    with pytest.raises(UserError, match="set Dataset.source = @PreferenceJsonlSource()"):
        build("unpaired", run)


def test_documents_are_read_with_a_memory(build):
    loss = build("prompts", "memory", "REWARDS=(@exact_answer,)", "MAX_CHUNKS=3", "CHUNK_TOKENS=100").loss
    assert (loss.memory.chunk_tokens, loss.max_chunks, loss.token_weights) == (100, 3, "batch")
    assert loss.rows_of_a_prompt == 8 * 4 and loss.surrogate == Clipped(high=0.28)
    apart = build("prompts", "memory", "REWARDS=(@exact_answer,)", "MAX_CHUNKS=3", "Grpo.rollout_devices=4")
    rollout = apart.loss.rollout(apart.dataset, 2 * 8 * 4)
    prompts = 2 * apart.loss.mini_batches
    assert rollout.answers == prompts * 8 * 4  # a conversation of each chunk, and the answer's
    with pytest.raises(UserError, match="MemoryAgent.update must have each of"):
        build("prompts", "memory", "REWARDS=(@exact_answer,)", "MemoryAgent.update='{chunk}'")


def test_reward_models(build):
    trainer = build("preferences", "reward", "Reward.centering=0.01")
    assert trainer.loss == Reward(centering=0.01) and trainer.dataset.scores_answers and trainer.model.head == "score"


@pytest.mark.parametrize(
    ("run", "bindings", "fields"),
    [
        ("grpo", ["MINI_BATCHES=2"], {"mini_batches": 2, "surrogate": Clipped(), "token_weights": "answer"}),
        ("dr_grpo", [], {"token_weights": "max_length", "scale": "none", "mini_batches": 1}),
        (
            "dapo",
            ["RESAMPLE=3", "OVERLONG=64"],
            {"surrogate": Clipped(high=0.28), "token_weights": "batch", "resample": 3, "overlong_tokens": 64},
        ),
        ("gspo", ["Clipped.high=5e-4"], {"surrogate": Clipped(low=3e-4, high=5e-4), "level": "sequence"}),
        ("cispo", [], {"surrogate": Cispo(), "token_weights": "batch"}),
        ("sapo", [], {"surrogate": Sapo(), "mini_batches": 4}),
        ("rloo", [], {"level": "sequence_sum", "baseline": "leave_one_out", "kl": 0.05, "kl_in": "reward"}),
        ("reinforce_pp", [], {"group": 1, "baseline": "none", "scale": "tokens", "kl_in": "tokens"}),
        ("grpo", ["Grpo.rollout_devices=4"], {"rollout_devices": 4, "staleness_bound": 1}),
        ("ppo", ["Ppo.rollout_devices=4", "Ppo.max_staleness=16"], {"rollout_devices": 4, "staleness_bound": 16}),
        ("online_dpo", ["Dpo.kind=ipo", "BETA=0.2"], {"group": 2, "preference": Dpo(kind="ipo", beta=0.2), "kl": 0.2}),
        ("online_dpo", ["OnlineDpo.rollout_devices=4"], {"rollout_devices": 4, "staleness_bound": 1}),
        ("ppo", ["Ppo.kl_target=6.0"], {"group": 1, "updates": 2, "mini_batches": 4, "kl_target": 6.0}),
    ],
)
def test_methods_with_rewards(build, run, bindings, fields):
    loss = build("prompts", run, "REWARDS=(@exact_answer,)", *bindings).loss
    assert {name: getattr(loss, name) for name in fields} == fields
    with pytest.raises(UserError, match="set Dataset.source = @PromptJsonlSource()"):
        build("preferences", run, "REWARDS=(@exact_answer,)")


def test_kto(build):
    trainer = build("unpaired", "kto", "BETA=0.2", "Kto.desirable_weight=0.5")
    assert trainer.loss == Kto(beta=0.2, desirable_weight=0.5) and trainer.dataset.source.mismatched
    anchored = ["Kto.kind=apo_zero_unpaired", "UnpairedJsonlSource.mismatched=False"]
    assert build("unpaired", "kto", *anchored).loss.kind == "apo_zero_unpaired"
    with pytest.raises(UserError, match="set it to False"):
        build("unpaired", "kto", anchored[0])


def test_grpo_with_rewards_of_ones_own(build, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "from capibara.config import configurable\n\n"
        "@configurable\ndef short(prompt, answer, record, *, most=10):\n    return float(len(answer) <= most)\n"
    )
    (tmp_path / "mine.gin").write_text("import my_rewards\nshort.most = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    wanted = ["REWARDS=(@short, @exact_answer)", "Grpo.reward_weights=(1.0, 0.5)", "exact_answer.field=result"]
    trainer = build("prompts", "grpo", *wanted, before=[str(tmp_path / "mine.gin")])
    short, exact = trainer.loss.rewards
    assert (short("", "abc", {}), short("", "abcd", {})) == (1.0, 0.0)
    assert exact("", "4", {"result": 4}) == 1.0
    assert (
        trainer.loss.group == 8
        and trainer.loss.sampling.max_new_tokens == 512
        and trainer.loss.sampling.temperature == 1
    )
    assert isinstance(trainer.dataset.source, PromptJsonlSource) and trainer.dataset.packing == "none"
    assert "Grpo.rewards = (@short, @exact_answer)" in " ".join(config.operative().split()).replace(
        "%REWARDS", "(@short, @exact_answer)"
    )
    with pytest.raises(UserError, match="REWARDS"):
        build("prompts", "grpo")
    with pytest.raises(UserError, match="no configurable named @exact_anser.*did you mean exact_answer"):
        build("prompts", "grpo", "REWARDS=(@exact_anser,)")


def test_another_reward_is_another_configuration(build, tmp_path):
    """Its parameters are in the run folder's config.gin before it is first called, and parse back."""
    build("prompts", "grpo", "REWARDS=(@exact_answer,)", "exact_answer.field=result")
    before = config.operative()
    build("prompts", "grpo", "REWARDS=(@exact_answer,)", "exact_answer.pattern='= (.*)'")
    assert config.diff(before, config.operative()) == [
        "exact_answer.field: 'result' -> 'answer'",
        "exact_answer.pattern: None -> '= (.*)'",
    ]
    (tmp_path / "config.gin").write_text(before)
    config.parse([str(tmp_path / "config.gin")])
    assert config.build(Trainer).loss.rewards[0]("", "4", {"result": 4}) == 1.0
    assert config.diff(before, config.operative()) == []


@pytest.mark.parametrize(
    ("task", "run", "more"), [("preferences", "dpo", []), ("prompts", "grpo", ["REWARDS=(@exact_answer,)"])]
)
def test_an_emulated_run_keeps_pairs_and_groups_whole(build, task, run, more):
    files = ["models/smollm2_135m.gin"]
    trainer = build(task, run, *more, files=files)
    emulated = emulation.shrunk(trainer, 8)
    assert emulated.model.embed_dim == 128 < trainer.model.embed_dim
    assert emulated.dataset.length == trainer.dataset.length and emulated.dataset.too_long == "drop"
    assert emulated.plan.batch_size == 8 * emulated.loss.rows_of_a_prompt


def consensus(*bindings, run="consensus"):
    given = ["MODEL_DIR=runs/new", "TRAIN_STEPS=100", "FILES=('a.jsonl',)", *bindings]
    config.parse(["models/tiny.gin", "tasks/text.gin", f"runs/{run}.gin"], given)
    trainer = config.build(Trainer)
    assert not config.check_used(trainer.later)
    return trainer


def test_consensus_training():
    trainer = consensus("ROUND=5", "Aggregation.rule=@Krum()", "Aggregation.faults=1", "NODES=8")
    assert trainer.plan.node == 8 and trainer.strategy.every == 5
    assert trainer.strategy.aggregation == Aggregation(rule=Krum(), faults=1)
    assert trainer.strategy.outer == OuterSgd(learning_rate=0.7, momentum=0.9)


def test_each_strategy_has_a_file():
    strategy = consensus("GROUP_ROUND=25", run="hierarchical").strategy
    assert strategy.does("hierarchical") and (strategy.groups, strategy.group_every, strategy.every) == (2, 25, 50)
    assert consensus("PROXIMAL=0.1", run="convexity").strategy.proximal == 0.1
    assert consensus(run="incremental_soup").strategy.averages
    trainer = consensus("NODES_PER_ROUND=3", run="federated")
    assert (trainer.plan.node, trainer.strategy.nodes_per_round, type(trainer.strategy.outer)) == (8, 3, FedAdam)
    strategy = consensus(run="integrated").strategy
    assert [strategy.share(name) for name in ("aggregation", "convex", "incremental_soup")] == [0.4, 0.4, 0.2]
    trainer = consensus("INIT_FROM='runs/base'", "MODELS=('runs/a', 'runs/b')", run="hf_consensus")
    assert (trainer.init_from, trainer.strategy.starts) == ("runs/base", ("runs/a", "runs/b"))
    assert trainer.strategy.outer == OuterSgd()  # momentum would repeat the way from the base to the models


@pytest.mark.parametrize(
    "bindings, message",
    [
        (["NODES=1"], "Plan.node is 1, must be at least 2 for Trainer.strategy (@ConsensusConfig()): try 4"),
        (["Trainer.strategy=None"], "Plan.node is 4 and Trainer.strategy is None: set Trainer.strategy = @ConsensusConfig(), "
         "or Plan.node = 1 and Plan.data = 4 for one model"),
        (["NODES=0"], "Plan.node is 0, must be at least 1"),
        (["Aggregation.rule=@Krum()", "Aggregation.faults=1"], "Aggregation.faults is 1, must be at most 0 of 4 nodes for Krum"),
        (["ROUND=0"], "ConsensusConfig.every is 0, must be at least 1: try 50"),
        (["ConsensusConfig.consensus_threshold=0"], "consensus_threshold is 0.0, must be above 0 and at most 1: try 0.75"),
        (["ConsensusConfig.quality_threshold=85"], "quality_threshold is 85.0, must be from 0 to 1, or None: try 0.85"),
        (["ConsensusConfig.max_retries=-1"], "max_retries is -1, must be at least 0: try 3"),
        (["Trainer.ema_decay=0.9"], "Trainer.ema_decay is not supported with Trainer.strategy (@ConsensusConfig())"),
        (["Anomalies.skip_nonfinite=False"], "Anomalies.skip_nonfinite = False is not supported with Trainer.str"),
        (["Plan.stage=2"], "Plan.stage is not supported with Trainer.strategy (@ConsensusConfig())"),
        (["TRAIN_STEPS=130"], "Trainer.steps (130) must be a multiple of the 50 steps of a round (@ConsensusConfig()), or the "
         "last ones would not count: try 150"),
        (["Evaluation.every=20", "Evaluation.patience=3"], "Evaluation.every (20) must be a multiple of the 50 steps"),
        (["Rules.batch=('node',)"], "Rules.batch names the mesh axis 'node', which has the rows first by itself"),
    ],
)  # fmt: skip
def test_what_consensus_training_refuses(bindings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        consensus(*bindings)


def test_process_reward_models(build):
    trainer = build("steps", "process_reward")
    assert trainer.loss == ProcessReward() and trainer.model.head == "score"
    assert isinstance(trainer.dataset.source, StepsJsonlSource)
    with pytest.raises(UserError, match="set Dataset.source = @StepsJsonlSource()"):
        build("chat", "process_reward")


def test_distillation(build):
    trainer = build("chat", "distill", "Distillation.stored=runs/teacher", "ANSWER_LENGTH=9", "Distillation.beta=1.0")
    assert (trainer.loss.beta, trainer.loss.sampling.max_new_tokens, trainer.loss.draws) == (1.0, 9, False)
    with pytest.raises(UserError, match="exactly one of teacher and stored, and neither is set: set TEACHER"):
        build("chat", "distill")
    with pytest.raises(UserError, match="Distillation.on_policy is 1.0, and Distillation.stored is of given answers"):
        build("chat", "distill", "Distillation.stored=runs/teacher", "Distillation.on_policy=1.0")
    with pytest.raises(UserError, match=r"Trainer.loss \(@Distillation\(\)\) is for texts"):
        build("prompts", "distill", "Distillation.stored=runs/teacher")


def test_tools_in_rollouts(build, tmp_path, monkeypatch):
    (tmp_path / "my_tools.py").write_text(
        "from capibara.config import configurable\n\n@configurable\ndef multiply(a, b):\n    return a * b\n"
    )
    (tmp_path / "mine.gin").write_text("import my_tools\nFunctionTools.functions = (@multiply,)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_tools", raising=False)
    bindings = ["REWARDS=(@exact_answer,)", "Grpo.environment=@FunctionTools()", "FunctionTools.turns=3"]
    environment = build("prompts", "grpo", *bindings, before=[str(tmp_path / "mine.gin")]).loss.environment
    call = {"id": "1", "function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}}
    (answer,) = environment.begin({}).step([{"role": "assistant", "tool_calls": [call]}])
    assert environment.turns == 3 and answer["content"] == "42"
    bindings = ["REWARDS=(@exact_answer,)", "Ppo.environment=@FunctionTools()", "FunctionTools.turns=2"]
    assert build("prompts", "ppo", *bindings, before=[str(tmp_path / "mine.gin")]).loss.environment.turns == 2
