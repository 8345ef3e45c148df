"""Options that only work together: each row of the table refuses what has no effect, and lets pass what has one."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib

import pytest

from capibara import config
from capibara.cli.composition import options
from capibara.config import search
from capibara.core.types import UserError
from capibara.data.chat.answers import PreferenceJsonlSource, PromptJsonlSource, UnpairedJsonlSource
from capibara.data.chat.conversations import ChatJsonlSource
from capibara.data.chat.steps import StepsJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.packing.masking import Masking, SpanCorruption
from capibara.data.shards.source import ShardedSource
from capibara.data.sources.hugging_face import HuggingFaceSource
from capibara.data.sources.sources import JsonlSource, TextSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.sample import SampleText, Sampling
from capibara.inference.sampling.sampling import BeamSearch
from capibara.models.api import DecoderConfig, Rope
from capibara.objectives.cpo import Cpo
from capibara.objectives.kto import Kto
from capibara.objectives.preference import Dpo
from capibara.objectives.process_reward import ProcessReward
from capibara.optim import Adafactor, FactorSchedule, Optimizer, Schedule
from capibara.sharding import Plan
from capibara.strategies.distillation.loss import Distillation
from capibara.strategies.distillation.teacher import Teacher
from capibara.strategies.grpo import Grpo
from capibara.strategies.online_dpo import OnlineDpo
from capibara.strategies.policy.cispo import Cispo
from capibara.strategies.policy.clipped import Clipped
from capibara.strategies.policy.gmpo import Gmpo
from capibara.strategies.policy.sapo import Sapo
from capibara.strategies.ppo import Ppo
from capibara.strategies.rewards.functions import exact_answer
from capibara.training.base.options import Evaluation
from capibara.training.profiling.profile import Profile
from capibara.training.stability.loss_scale import LossScaling
from capibara.training.trainer import Trainer

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
TEMPLATE = ChatTemplate(tokenizer="t", template="{{ messages }}")
OF_TEXTS = Dataset(source=JsonlSource(files=("x",)), vocabulary=ByteVocabulary())
RUN = Trainer(
    model_dir="run",
    steps=20,
    model=DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64),
    plan=Plan(batch_size=8),
    dataset=OF_TEXTS,
    optimizer=Optimizer(),
    evaluation=Evaluation(every=5),
)


def replaced(value, changes):
    """A configuration with fields changed by name, in whatever part they are."""
    own = {key.split(".")[1]: new for key, new in changes.items() if key.split(".")[0] == type(value).__name__}
    parts = {
        field.name: replaced(part, changes)
        for field in dataclasses.fields(value)
        if dataclasses.is_dataclass(part := getattr(value, field.name)) and not isinstance(part, type)
    }
    return (
        dataclasses.replace(value, **(parts | own))
        if any(part is not getattr(value, name) for name, part in (parts | own).items())
        else value
    )


def source(cls, **fields):
    one = {"template": TEMPLATE} if "template" in {field.name for field in dataclasses.fields(cls)} else {}
    return cls(files=("x",), **one, **fields)


def of_source(cls, *, validation=True):
    held = {"validation_files": ("y",)} if validation else {}
    made, kind = source(cls, validation_fraction=0.5, **held), {}
    if cls is PreferenceJsonlSource:
        kind = {"Trainer.loss": Dpo()}
    if cls is UnpairedJsonlSource:
        kind = {"Trainer.loss": Kto(kind="apo_zero_unpaired")}
    if cls is StepsJsonlSource:
        kind = {"Trainer.loss": ProcessReward()}
    if cls is PromptJsonlSource:
        kind = {"Trainer.loss": GRPO(), "Dataset.packing": "none"}
    return {"Dataset.source": made, **kind}


def GRPO(**changes):
    return Grpo(rewards=(exact_answer,), group=2, sampling=Sampling(max_new_tokens=16, temperature=1.0), **changes)


def PPO(**changes):
    return Ppo(rewards=(exact_answer,), sampling=Sampling(max_new_tokens=16, temperature=1.0), **changes)


def ONLINE(**changes):
    return OnlineDpo(rewards=(exact_answer,), sampling=Sampling(max_new_tokens=16, temperature=1.0), **changes)


def DISTILLATION(**changes):
    sampling = Sampling(max_new_tokens=16, temperature=1.0)
    return Distillation(teacher=Teacher(path="x", model=RUN.model), sampling=sampling, **changes)


PAIRS = {"Dataset.source": source(PreferenceJsonlSource)}
PROMPTS = {"Dataset.source": source(PromptJsonlSource), "Dataset.packing": "none"}
SEQIO = {"Trainer.dataset": Dataset(mixture_or_task_name="task", vocabulary=ByteVocabulary())}
TASK = lambda **fields: {"Trainer.dataset": dataclasses.replace(SEQIO["Trainer.dataset"], **fields)}  # noqa: E731
TEXT = lambda **fields: {"Trainer.dataset": dataclasses.replace(OF_TEXTS, **fields)}  # noqa: E731
OFF = {"Evaluation.every": 0}
SHOWN = {"SampleText.prompts": ("a",)}
OPTIMIZERS = {
    "b1": ("sgd", "lion", 0.5), "b2": ("adafactor", "muon", 0.5), "eps": ("lion", "muon", 1e-5),
    "momentum": ("adamw", "sgd", 0.5), "nesterov": ("adamw", "muon", False), "muon_rms": ("adamw", "muon", 0.1),
    "factored_min_size": ("adamw", "adafactor", 8), "parameter_scale": ("muon", "adafactor", False),
    "adafactor": ("adamw", "adafactor", Adafactor(decay_rate=0.7)),
}  # fmt: skip
FACTORS = {
    "base_learning_rate": ("rsqrt_decay", "constant", 0.1), "warmup_steps": ("constant", "constant * rsqrt_decay", 5),
    "decay_factor": ("constant", "decay_every", 0.9), "steps_per_decay": ("constant", "decay_every", 5),
    "steps_per_cycle": ("constant", "constant * cosine_decay", 5),
}  # fmt: skip


def factors(names, field, value):
    return {"Optimizer.schedule": FactorSchedule(factors=names, **{field: value})}


# (option, a run in which it has no effect, one in which it has)
CASES = [
    *[
        (option, OFF | {option: value}, {option: value})
        for option, value in {
            "Evaluation.max_batches": 3, "Evaluation.batch_size": 8, "Evaluation.patience": 3,
            "Evaluation.unigram_batches": 3, "SampleText.prompts": ("a",),
        }.items()
    ],
    ("Evaluation.task_metrics", SEQIO | OFF | {"Evaluation.task_metrics": True}, SEQIO | {"Evaluation.task_metrics": True}),
    ("Checkpointing.keep_best", OFF | {"Checkpointing.keep_best": 2}, {"Checkpointing.keep_best": 2, "Checkpointing.every": 5}),
    ("Checkpointing.keep_best", {"Checkpointing.keep_best": 2, "Checkpointing.every": 7}, {"Checkpointing.keep_best": 2, "Checkpointing.every": 2}),
    ("Checkpointing.keep_best", {"Checkpointing.keep_best": 2, "Checkpointing.every": 0}, {"Checkpointing.keep_best": 2, "Checkpointing.every": 100}),
    ("Checkpointing.keep_every", {"Checkpointing.keep_every": 4, "Checkpointing.every": 0}, {"Checkpointing.keep_every": 4, "Checkpointing.every": 3}),
    ("Checkpointing.milestones", {"Checkpointing.milestones": (4,), "Checkpointing.every": 3}, {"Checkpointing.milestones": (4, 20), "Checkpointing.every": 2}),
    ("Checkpointing.milestones", {"Checkpointing.milestones": (4, 20), "Checkpointing.every": 0}, {"Checkpointing.milestones": (20,), "Checkpointing.every": 0}),
    ("SampleText.sampling", {"SampleText.sampling": Sampling(seed=3)}, SHOWN | {"SampleText.sampling": Sampling(seed=3)}),
    *[
        (f"Sampling.{name}", SHOWN | {"SampleText.sampling": Sampling(temperature=0.0, **{name: value})}, SHOWN | {"SampleText.sampling": Sampling(**{name: value})})
        for name, value in {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4}.items()
    ],
    ("Sampling.seed", SHOWN | {"SampleText.sampling": Sampling(seed=4, beams=BeamSearch())}, SHOWN | {"SampleText.sampling": Sampling(seed=4)}),
    ("Trainer.init_with", {"Trainer.init_with": "merged"}, {"Trainer.init_with": "merged", "Trainer.init_from": "x"}),
    ("Trainer.loss_scaling", {"Trainer.loss_scaling": LossScaling(initial=2.0)}, {"Trainer.loss_scaling": LossScaling(initial=2.0), "DecoderConfig.dtype": "float16"}),
    ("Profile.start", {"Trainer.profile": Profile(start=21, stop=22)}, {"Trainer.profile": Profile(start=20, stop=22)}),
    ("Watch.at_least_s", {"Watch.at_least_s": 9.0, "Watch.factor": None}, {"Watch.at_least_s": 9.0}),
    *[
        (f"Anomalies.{name}", {f"Anomalies.{name}": value} | unmet, {f"Anomalies.{name}": value} | met)
        for names, value, unmet, met in (
            (("window", "sigmas"), 9, {}, {"Anomalies.on_spike": "skip"}),
            (("roll_back_steps", "skip_batches", "most_roll_backs"), 9, {"Anomalies.on_spike": "skip"}, {"Anomalies.on_spike": "roll_back"}),
            (("most_in_a_row",), 9, {"Anomalies.skip_nonfinite": False}, {"Anomalies.skip_nonfinite": False, "Anomalies.on_spike": "skip"}),
        )
        for name in names
    ],
    *[
        (f"Optimizer.{name}", {f"Optimizer.{name}": value, "Optimizer.name": unmet}, {f"Optimizer.{name}": value, "Optimizer.name": met})
        for name, (unmet, met, value) in OPTIMIZERS.items()
    ],
    *[
        (f"Schedule.{name}", {"Optimizer.schedule": Schedule(kind=unmet, **{name: value})}, {"Optimizer.schedule": Schedule(kind=met, **{name: value})})
        for name, unmet, met, value in (
            ("decay_steps", "rsqrt", "cosine", 3), ("final_fraction", "constant", "linear", 0.5), ("decay_fraction", "cosine", "wsd", 0.5),
        )
    ],
    ("Schedule.decay_fraction", {"Optimizer.schedule": Schedule(kind="wsd", decay_steps=3, decay_fraction=0.5)}, {"Optimizer.schedule": Schedule(kind="wsd", decay_fraction=0.5)}),
    ("Schedule.warmup_fraction", {"Schedule.warmup_steps": 3, "Schedule.warmup_fraction": 0.5}, {"Schedule.warmup_fraction": 0.5}),
    *[
        (f"FactorSchedule.{name}", factors(unmet, name, value), factors(met, name, value))
        for name, (unmet, met, value) in FACTORS.items()
    ],
    ("Dataset.task_module", TEXT(task_module="tasks"), TASK(task_module="tasks")),
    ("Dataset.use_cached", TEXT(use_cached=True), TASK(use_cached=True)),
    ("Dataset.cache_dirs", TASK(cache_dirs=("x",)), TASK(cache_dirs=("x",), use_cached=True)),
    ("Dataset.cached_order", TASK(cached_order="seqio"), TASK(cached_order="seqio", use_cached=True)),
    ("Dataset.append_eos", TASK(append_eos=False), TEXT(append_eos=False)),
    ("Dataset.append_eos", TEXT(append_eos=False, source=source(ChatJsonlSource)), TEXT(append_eos=False)),
    ("Dataset.workers", TASK(workers=2), TEXT(workers=2)),
    ("Dataset.seed", TEXT(seed=3, shuffle=False), TEXT(seed=3)),
    ("Dataset.span_corruption", TEXT(span_corruption=SpanCorruption(noise_density=0.5)), None),
    ("Dataset.masking", TEXT(masking=Masking(chosen=0.5)), None),
    ("Dataset.too_long", TEXT(too_long="cut"), TEXT(too_long="cut", source=source(ChatJsonlSource))),
    ("Dataset.pairs_per_row", TEXT(pairs_per_row=3), {"Trainer.loss": Dpo(), "Dataset.source": source(PreferenceJsonlSource), "Dataset.pairs_per_row": 3}),
    *[
        (f"{cls.__name__}.validation_fraction", of_source(cls), of_source(cls, validation=False))
        for cls in (JsonlSource, TextSource, ShardedSource, ChatJsonlSource, PreferenceJsonlSource, UnpairedJsonlSource, PromptJsonlSource, StepsJsonlSource)
    ],
    (
        "HuggingFaceSource.validation_fraction",
        {"Dataset.source": HuggingFaceSource(path="x", validation_split="test", validation_fraction=0.5)},
        {"Dataset.source": HuggingFaceSource(path="x", validation_fraction=0.5)},
    ),
    ("Plan.pipeline_microbatches", {"Plan.pipeline_microbatches": 4}, {"Plan.pipeline_microbatches": 4, "Plan.stage": 2}),
    ("Plan.pipeline_repeats", {"Plan.pipeline_repeats": 2}, {"Plan.pipeline_repeats": 2, "Plan.stage": 2}),
    ("Plan.remat_names", {"Plan.remat_names": ("query",), "Plan.remat": "full"}, {"Plan.remat_names": ("query",), "Plan.remat": "save"}),
    *[
        (f"Rope.{name}", {"DecoderConfig.rope": Rope(scaling=unmet, factor=2.0, **{name: value})}, {"DecoderConfig.rope": Rope(scaling=met, **{"factor": 2.0, "original_length": 64, name: value})})
        for name, unmet, met, value in (
            ("original_length", "linear", "yarn", 32), ("low_frequency_factor", "linear", "llama3", 2.0),
            ("high_frequency_factor", "linear", "llama3", 8.0), ("beta_fast", "linear", "yarn", 4.0),
            ("beta_slow", "linear", "yarn", 0.5), ("attention_factor", "linear", "yarn", 2.0),
        )
    ],
    ("Rope.factor", {"DecoderConfig.rope": Rope(factor=4.0)}, {"DecoderConfig.rope": Rope(factor=4.0, scaling="linear")}),
    ("Rope.local_theta", {"DecoderConfig.rope": Rope(local_theta=9.0)}, {"DecoderConfig.rope": Rope(local_theta=9.0), "DecoderConfig.layer_pattern": ("local",), "DecoderConfig.window": 8}),
    ("Grpo.mesh", PROMPTS | {"Trainer.loss": GRPO(where="all", mesh=ServingMesh(tensor=1))}, PROMPTS | {"Trainer.loss": GRPO(mesh=ServingMesh(tensor=1))}),
    ("Dpo.alpha", PAIRS | {"Trainer.loss": Dpo(alpha=0.7)}, PAIRS | {"Trainer.loss": Dpo(alpha=0.7, divergence="alpha_divergence")}),
    ("Dpo.discopop_tau", PAIRS | {"Trainer.loss": Dpo(discopop_tau=0.7)}, PAIRS | {"Trainer.loss": Dpo(discopop_tau=0.7, kind="discopop")}),
    ("Cpo.gamma", PAIRS | {"Trainer.loss": Cpo(gamma=0.7)}, PAIRS | {"Trainer.loss": Cpo(gamma=0.7, kind="simpo")}),
    *[
        (f"{cls.__name__}.{name}", PROMPTS | {"Trainer.loss": GRPO(surrogate=cls(**{name: value}))}, PROMPTS | {"Trainer.loss": GRPO(surrogate=cls(**{name: value}), **{repeated: 2})})
        for cls, name, value, repeated in (
            (Clipped, "low", 0.1, "updates"), (Clipped, "high", 0.3, "mini_batches"), (Clipped, "ceiling", 4.0, "updates"),
            (Cispo, "cap", 4.0, "updates"), (Gmpo, "low", 0.3, "updates"), (Gmpo, "high", 0.3, "updates"),
            (Sapo, "temperature_positive", 2.0, "updates"), (Sapo, "temperature_negative", 2.0, "updates"),
        )
    ],
    ("Grpo.importance_mode", PROMPTS | {"Trainer.loss": GRPO(importance_mode="token_mask", importance_cap=None)}, PROMPTS | {"Trainer.loss": GRPO(importance_mode="token_mask")}),
    ("Ppo.mesh", PROMPTS | {"Trainer.loss": PPO(where="all", mesh=ServingMesh(tensor=1))}, PROMPTS | {"Trainer.loss": PPO(mesh=ServingMesh(tensor=1))}),
    ("OnlineDpo.mesh", PROMPTS | {"Trainer.loss": ONLINE(where="all", mesh=ServingMesh(tensor=1))}, PROMPTS | {"Trainer.loss": ONLINE(mesh=ServingMesh(tensor=1))}),
    ("OnlineDpo.max_staleness", PROMPTS | {"Trainer.loss": ONLINE(max_staleness=1)}, PROMPTS | {"Trainer.loss": ONLINE(max_staleness=1, rollout_devices=4)}),
    ("Distillation.where", {"Trainer.loss": DISTILLATION(where="own")}, {"Trainer.loss": DISTILLATION(where="own", on_policy=0.5), "Dataset.packing": "none"}),
    ("Distillation.mesh", {"Trainer.loss": DISTILLATION(mesh=ServingMesh(tensor=1))}, {"Trainer.loss": DISTILLATION(mesh=ServingMesh(tensor=1), teacher_draws=True), "Dataset.packing": "none"}),
    ("Ppo.kl_horizon", PROMPTS | {"Trainer.loss": PPO(kl_horizon=9)}, PROMPTS | {"Trainer.loss": PPO(kl_horizon=9, kl_target=6.0)}),
    ("Grpo.max_staleness", PROMPTS | {"Trainer.loss": GRPO(max_staleness=1)}, PROMPTS | {"Trainer.loss": GRPO(max_staleness=1, rollout_devices=4)}),
    ("Ppo.max_staleness", PROMPTS | {"Trainer.loss": PPO(max_staleness=8)}, PROMPTS | {"Trainer.loss": PPO(max_staleness=8, rollout_devices=4)}),
    ("Grpo.kl_in", PROMPTS | {"Trainer.loss": GRPO(kl_in="reward")}, PROMPTS | {"Trainer.loss": GRPO(kl_in="reward", kl=0.1)}),
    ("Grpo.unbiased_kl", PROMPTS | {"Trainer.loss": GRPO(unbiased_kl=True)}, PROMPTS | {"Trainer.loss": GRPO(unbiased_kl=True, kl=0.1)}),
]  # fmt: skip


def check(changes):
    with_loss = {name: changes[name] for name in ("Trainer.loss",) if name in changes}
    if with_loss:  # the loss and its data only fit together
        dataset = replaced(OF_TEXTS, changes)
        head = {"head": "score"} if isinstance(changes["Trainer.loss"], ProcessReward) else {}
        model = dataclasses.replace(RUN.model, value_head=isinstance(changes["Trainer.loss"], Ppo), **head)
        run = dataclasses.replace(RUN, loss=changes["Trainer.loss"], dataset=dataset, model=model)
        changes = {}
    else:
        run = replaced(RUN, changes)
    options.check(run, replaced(SampleText(), changes))


@pytest.fixture(autouse=True)
def nothing_bound():
    config.reset()


@pytest.mark.parametrize(("option", "unmet", "met"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_has_no_effect_is_refused(option, unmet, met):
    with pytest.raises(UserError) as told:
        check(unmet)
    needs = [row.needs for row in options.DEPENDENT if option in row.options]
    line = str(told.value)
    assert line.startswith(f"{option} is ") and line.endswith(": set that, or leave it out") and "\n" not in line
    assert any(f", and has no effect without {need}: " in line for need in needs)
    if met is not None:
        check(met)


@pytest.mark.parametrize(
    "given",
    [
        {"DecoderConfig.dtype": "float16"},
        {"Anomalies.on_spike": "skip"},
        {"Anomalies.skip_nonfinite": True},
    ],
    ids=str,
)
def test_each_of_several_needs_is_enough_for_a_limit_of_skipped_batches(given):
    with pytest.raises(UserError, match="Anomalies.most_in_a_row is 9, and has no effect"):
        check({"Anomalies.most_in_a_row": 9, "Anomalies.skip_nonfinite": False})
    check({"Anomalies.most_in_a_row": 9, "Anomalies.skip_nonfinite": False} | given)


def test_a_bound_on_age_is_of_runs_whose_split_the_planner_chooses_too():
    check(PROMPTS | {"Trainer.loss": GRPO(max_staleness=1, rollout_devices=-1)})


def test_every_row_has_a_case():
    assert {option for row in options.DEPENDENT for option in row.options} == {option for option, _, _ in CASES} | {
        "Checkpointing.keep_best"
    }


# Fields that are not in the table: they count alone, they are parts, or their own class says what they need (checked).
ALONE = {
    "Trainer": "model_dir steps model plan dataset optimizer evaluation checkpointing init_from loss strategy group privacy method "
    "seed log_every z_loss label_smoothing loss_normalization ema_decay anomalies watch profile replica_check_every "
    "heartbeat_s dashboard",
    "Evaluation": "every",
    "Checkpointing": "every keep verify cast incremental compression encryption store",
    "SampleText": "",
    "Watch": "factor start_s evaluation_s save_s",
    "Anomalies": "skip_nonfinite on_spike",
    "LossScaling": "initial growth_steps minimum",  # with Trainer.loss_scaling
    "Optimizer": "name schedule weight_decay clip_norm state_dtype",
    "Schedule": "kind learning_rate warmup_steps",
    "FactorSchedule": "factors step_offset min_learning_rate",
    "Plan": "batch_size data fsdp expert context tensor stage node accumulation remat rules slice",
    "Dataset": "source mixture_or_task_name vocabulary kind length encoder_length inputs_length packing shuffle task_shards "
    "prefetch window_rows window_documents domains",
    "Dpo": "kind beta label_smoothing sft_weight divergence",
    "Distillation": "teacher stored beta temperature top_k hard_weight on_policy teacher_draws sampling engine",
    "Cpo": "kind beta label_smoothing nll_weight alpha",
    "Grpo": "rewards reward_weights group sampling overlong_tokens missing_end_penalty mask_truncated kl mini_batches updates engine where rollout_devices surrogate "
    "level token_weights baseline scale normalize_each resample importance_cap importance_floor off_policy_limit environment memory max_chunks",
    "Ppo": "rewards reward_weights group sampling overlong_tokens missing_end_penalty mask_truncated kl mini_batches updates engine where rollout_devices clip "
    "value_clip value_weight gamma gae_lambda whiten_rewards kl_target importance_cap environment",
    "OnlineDpo": "rewards reward_weights group sampling overlong_tokens missing_end_penalty mask_truncated mini_batches updates engine "
    "where rollout_devices preference resample",
    "Vespo": "power_positive decay_positive power_negative decay_negative",
    "Rope": "local_fraction unscaled_tokens theta fraction pairs scaling yarn_bounds short_factors long_factors",
    "ConsensusConfig": "aggregation outer quality_threshold consensus_threshold max_retries seed every fragments num_nodes "
    "voting_strategy merge_strategy merge_shares lambda_reg max_iterations strategies proximal groups group_every frozen "
    "nodes_per_round init_from compression",  # strategies/consensus/settings.py has their table
    "GroupNode": "exchange name every compression timeout_s poll_s",
    "Privacy": "clip_norm noise_multiplier delta budget accounting",
    "Profile": "stop",
}


@pytest.mark.parametrize("name", ALONE)
def test_every_field_is_in_the_table_or_counts_alone(name):
    cls = getattr(importlib.import_module(search.defining_modules()[name]), name)
    dependent = {
        option.partition(".")[2] for row in options.DEPENDENT for option in row.options if option.startswith(f"{name}.")
    }
    alone = {*ALONE[name].split()}
    assert not dependent & alone and {field.name for field in dataclasses.fields(cls)} == dependent | alone


def test_values_of_capibaras_own_files_are_for_some_runs_only(tmp_path):
    (tmp_path / "own.gin").write_text("Evaluation.max_batches = 4\n")
    flags = ["MODEL_DIR = 'x'", "Evaluation.every = 0"]
    config.parse(["quickstart.gin"], flags)
    options.check(config.build(Trainer), config.build(SampleText))
    config.parse(["quickstart.gin", tmp_path / "own.gin"], flags)
    with pytest.raises(
        UserError, match=r"max_batches is 4 \(.*own.gin:1\), and has no effect without Evaluation.every above 0"
    ):
        options.check(config.build(Trainer), config.build(SampleText))
    config.parse(["quickstart.gin"], [*flags, "Sampling.top_p = 0.5", "SampleText.prompts = ()"])
    with pytest.raises(UserError, match=r"SampleText.sampling is .*, and has no effect without SampleText.prompts: "):
        options.check(config.build(Trainer), config.build(SampleText))


def test_the_table_is_that_of_the_docs():
    assert options.table() in (CHECKOUT / "docs" / "training.md").read_text()
