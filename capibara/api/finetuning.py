"""Fine-tuning in one call: `capibara.finetune(model, data, out)`, and a function for each method with a loss of its own."""

from __future__ import annotations

import dataclasses
import inspect
import os
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from capibara.api import data as of_python
from capibara.api.results import TrainingResult
from capibara.api.stored import stored_path
from capibara.cli.composition import finetuning, pretrained, training_run
from capibara.cli.composition.finetuning import FineTuning, Method
from capibara.config import configurable
from capibara.config.search import defining_modules
from capibara.core import devices
from capibara.core.fields import did_you_mean, short
from capibara.core.types import Dataclass, UserError
from capibara.interop import hub
from capibara.models.api import Lora
from capibara.strategies.rewarded import RewardedLoss
from capibara.strategies.rewards.verifier import Verifier
from capibara.training.trainer import Trainer

if TYPE_CHECKING:
    from capibara.api.data import Data
    from capibara.api.language_model import LanguageModel

Reward = Callable[..., float]
_ALIASES = {  # option of other libraries -> ours
    "lr": "learning_rate",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "per_device_train_batch_size": "batch_size",
    "max_length": "length",
    "max_seq_length": "length",
    "output_dir": "out",
    "train_dataset": "data",
    "eval_dataset": "eval",
    "peft_config": "lora",
    "reward_funcs": "rewards",
    "logging_steps": "log_every",
}
_BINDINGS = {  # option of TRL -> what `bindings` sets; docs/migrating_from_trl.md has the same names
    "gradient_accumulation_steps": "Plan.accumulation",
    "packing": "Dataset.packing",
    "padding_free": "Dataset.packing",
    "assistant_only_loss": "ChatJsonlSource.train_on",
    "completion_only_loss": "ChatJsonlSource.train_on",
    "lr_scheduler_type": "Schedule.kind",
    "warmup_ratio": "Schedule.warmup_fraction",
    "warmup_steps": "Schedule.warmup_steps",
    "optim": "Optimizer.name",
    "weight_decay": "Optimizer.weight_decay",
    "max_grad_norm": "Optimizer.clip_norm",
    "bf16": "DecoderConfig.dtype",
    "gradient_checkpointing": "Plan.remat",
    "eval_steps": "Evaluation.every",
    "save_steps": "Checkpointing.every",
    "save_total_limit": "Checkpointing.keep",
    "load_best_model_at_end": "Checkpointing.keep_best",
    "report_to": "Monitoring.trackers",
    "desirable_weight": "Kto.desirable_weight",
    "undesirable_weight": "Kto.undesirable_weight",
    "num_generations": "Grpo.group",
    "epsilon": "Clipped.low",
    "epsilon_high": "Clipped.high",
    "num_iterations": "Grpo.updates",
    "importance_sampling_level": "Grpo.level",
    "scale_rewards": "Grpo.scale",
    "max_completion_length": "ANSWER_LENGTH",
    "temperature": "rollout/Sampling.temperature",
    "reward_weights": "Grpo.reward_weights",
    "use_vllm": "Grpo.engine",
}
_OF_REWARDS = {"beta": "Grpo.kl", "loss_type": "Grpo.surrogate"}
_OF_PREFERENCES = {
    "dpo": {"beta": "Dpo.beta", "loss_type": "Dpo.kind", "label_smoothing": "Dpo.label_smoothing"},
    "cpo": {"beta": "Cpo.beta", "loss_type": "Cpo.kind", "label_smoothing": "Cpo.label_smoothing"},
    "simpo": {"beta": "Cpo.beta", "loss_type": "Cpo.kind", "label_smoothing": "Cpo.label_smoothing"},
    "orpo": {"beta": "Orpo.beta"},
    "kto": {"beta": "Kto.beta", "loss_type": "Kto.kind"},
}
_ELSEWHERE = {  # option of TRL -> where that is said here
    "dataset_text_field": "name the field 'text'",
    "formatting_func": "give texts, or rows with 'messages', as data",
    "processing_class": "the tokenizer is the model's: ChatTemplate.tokenizer in bindings is another",
    "tokenizer": "the tokenizer is the model's: ChatTemplate.tokenizer in bindings is another",
    "resume_from_checkpoint": "the same call again resumes",
    "ref_model": "the reference is the initial weights",
}


def finetune(
    model: LanguageModel | str,
    data: Data,
    out: str,
    *,
    method: str = "lora",
    teacher: LanguageModel | str | None = None,
    eval: Data = None,
    lora: Lora | int | None = None,
    rewards: Sequence[Reward] = (),
    steps: int | None = None,
    epochs: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    length: int | None = None,
    seed: int = 0,
    bindings: Sequence[str] = (),
    others: Sequence[Dataclass] = (),
    emulate: int | None = None,
    **fields: Any,
) -> TrainingResult:
    """Trains a model further; called again with the same `out` it resumes where it was interrupted. `capibara finetune` is the same run.

    Args:
      model: a path or name, as for `load`, or a loaded model, which needs memory beside the one that is trained.
      data: texts, or chats in any usual layout, as for `write_data`; of "dpo", "orpo", "simpo", "cpo" and "reward" pairs of
        answers, of "kto" answers with a label, with rewards prompts.
      out: the run folder.
      method: "lora", "qlora", "full", "distill", "duo_attention", "dpo", "orpo", "simpo", "cpo", "kto", "reward", "process_reward", or one with
        rewards: "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp", "ppo" or "online_dpo".
      teacher: of method "distill": the model that is learned from, as `model`.
      eval: data of evaluations; None: 3% of `data` is held out.
      lora: the adapters, or their rank on all linear layers; None: rank 16. Those of a `Lora()` of your own are on query and
        value unless it says.
      rewards: of methods with rewards: functions (prompt, answer, record) -> a number.
      steps, epochs: the length of the run; by default one pass over the data.
      learning_rate, batch_size: the highest one; rows of a step. None: by the method and the model's size; 8, with rewards 64, of
        "online_dpo" 32 pairs.
      length, seed: tokens of a row, None: 1024, or what the model reads; of adapters and of the data's order.
      bindings: more of the configuration, as Gin has it: "Schedule.kind = 'cosine'".
      others, emulate: as for `train`.
      fields: of `Trainer`, such as log_every=1.

    Raises:
      UserError: the run cannot be trained as described.
    """
    chosen = _method(method)
    _check(chosen, out, lora, rewards, fields)
    devices.start(emulate)
    path, rewards = hub.local_path(stored_path(model)), tuple(_named(reward) for reward in rewards)
    finetuning.check_out(out, path)  # before the data is written there
    files, held_out = _files(data, eval, out)
    asked = FineTuning(
        model=path, files=files, validation_files=held_out, out=os.path.expanduser(out), method=chosen,
        teacher=None if teacher is None else stored_path(teacher), steps=steps, epochs=epochs,
        learning_rate=learning_rate, batch_size=batch_size, length=length, seed=seed,
        bindings=("REWARDS = (@exact_answer,)", *bindings) if rewards else tuple(bindings),
    )  # fmt: skip
    return _trained(asked, lora, rewards, fields, others, emulate)


def distill(
    model: LanguageModel | str, teacher: LanguageModel | str, data: Data, out: str, **options: Any
) -> TrainingResult:
    """Distillation: trains adapters on a teacher's next-token distributions for texts or chats; options as for `finetune`."""
    return finetune(model, data, out, method="distill", teacher=teacher, **options)


def dpo(model: LanguageModel | str, pairs: Data, out: str, **options: Any) -> TrainingResult:
    """Direct preference optimisation on pairs of a chosen and a rejected answer; options as for `finetune`."""
    return finetune(model, pairs, out, method="dpo", **options)


def orpo(model: LanguageModel | str, pairs: Data, out: str, **options: Any) -> TrainingResult:
    """Odds ratio preference optimisation on pairs of answers, without a reference; options as for `finetune`."""
    return finetune(model, pairs, out, method="orpo", **options)


def simpo(model: LanguageModel | str, pairs: Data, out: str, **options: Any) -> TrainingResult:
    """Simple preference optimisation on pairs of answers, without a reference; options as for `finetune`."""
    return finetune(model, pairs, out, method="simpo", **options)


def cpo(model: LanguageModel | str, pairs: Data, out: str, **options: Any) -> TrainingResult:
    """Contrastive preference optimisation on pairs of answers, without a reference; options as for `finetune`."""
    return finetune(model, pairs, out, method="cpo", **options)


def kto(model: LanguageModel | str, answers: Data, out: str, **options: Any) -> TrainingResult:
    """Kahneman-Tversky optimisation on answers with a `label`, true or false; options as for `finetune`."""
    return finetune(model, answers, out, method="kto", **options)


def reward_model(model: LanguageModel | str, pairs: Data, out: str, **options: Any) -> TrainingResult:
    """Trains a model that scores answers on pairs of answers, by Bradley-Terry; options as for `finetune`."""
    return finetune(model, pairs, out, method="reward", **options)


def process_reward_model(model: LanguageModel | str, solutions: Data, out: str, **options: Any) -> TrainingResult:
    """Trains a model that scores the steps of solutions, which have `steps` and `labels`; options as for `finetune`."""
    return finetune(model, solutions, out, method="process_reward", **options)


def grpo(
    model: LanguageModel | str,
    prompts: Data,
    out: str,
    rewards: Sequence[Reward],
    *,
    steps: int,
    method: str = "grpo",
    rollout_devices: int = 0,
    max_staleness: int | None = None,
    bindings: Sequence[str] = (),
    **options: Any,
) -> TrainingResult:
    """Group relative policy optimisation, its family, PPO and online DPO: the model's own answers, rewarded by functions.

    Args:
      model, out: as for `finetune`.
      prompts: what is asked, and beside it what the rewards read.
      rewards: functions (prompt, answer, record) -> a number.
      steps: the length of the run.
      method: "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp", "ppo" or "online_dpo".
      rollout_devices: how many devices draw answers while the others train; 0: all do both in turn.
      max_staleness: most steps between the weights that draw answers and those that are trained on them.
      bindings, options: as for `finetune`.
    """
    if isinstance(rewards, Sequence) and not rewards:
        raise UserError("rewards is empty: give functions of (prompt, answer, record), such as [cb.numeric_answer]")
    loss = {"ppo": "Ppo", "online_dpo": "OnlineDpo"}.get(method, "Grpo")
    rollout_options = {"rollout_devices": rollout_devices or None, "max_staleness": max_staleness}
    bindings = [f"{loss}.{name} = {value!r}" for name, value in rollout_options.items() if value is not None] + [
        *bindings
    ]
    return finetune(model, prompts, out, method=method, rewards=rewards, steps=steps, bindings=bindings, **options)


def _trained(
    asked: FineTuning,
    lora: Lora | int | None,
    rewards: tuple[Reward, ...],
    fields: dict[str, Any],
    others: Sequence[Dataclass],
    emulate: int | None,
) -> TrainingResult:
    """Chooses the run and trains it."""
    run = finetuning.choose(asked)
    print(*run.notes, sep="\n", end="\n" * bool(run.notes), flush=True)

    def built(dtype: str | None = None) -> Trainer:
        trainer = pretrained.built(run.gin_files, run.bindings, run.search_paths, dtype)
        return _changed(trainer, asked.method, lora, rewards, fields)

    outcome = training_run.train(built(pretrained.UNKNOWN_DTYPE), *others, emulate=emulate, settled=built)
    return TrainingResult(asked.out, outcome.step, outcome.reason, outcome.signal_number)


def _method(name: str) -> Method:
    known = [str(item) for item in Method]
    if name not in known:
        raise UserError(f"method is {name!r}, must be one of {', '.join(known)}{did_you_mean(str(name), known)}")
    return Method(name)


def _files(data: Data, validation: Data, out: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files of the training data, and those of the validation data, in the run folder; none: a fraction is held out."""
    folder = os.path.join(os.path.expanduser(out), "data")
    data, validation = of_python.by_splits(data, validation)
    files = of_python.write_data(data, folder, "data")
    return files, () if validation is None else of_python.write_data(validation, folder, "eval")


def _check(method: Method, out: str, lora: Lora | int | None, rewards: Sequence[Reward], fields: Iterable[str]) -> None:
    """Raises UserError for options that are wrong whatever the model and the data are."""
    of_trainer = {field.name for field in dataclasses.fields(Trainer)} - {"model_dir", "steps"}
    for name in fields:
        if name not in of_trainer:
            raise UserError(f"finetune has no option {name!r}{_hint(method, name, of_trainer)}")
    if not isinstance(out, str) or not out.strip():
        raise UserError(f"out is {out!r}, must be the run folder: try out='runs/mine'")
    if os.path.exists(out) and not os.path.isdir(out):
        raise UserError(f"out ({out}) is a file, must be a folder: name another")
    if lora is not None and (isinstance(lora, bool) or not isinstance(lora, (int, Lora))):
        raise UserError(f"lora is {short(lora)}, must be a rank or capibara.Lora(...): try 16, or leave it out")
    if not isinstance(rewards, Sequence) or isinstance(rewards, str):
        raise UserError(f"rewards is {short(rewards)}, must be a list of functions: try rewards=[cb.numeric_answer]")
    if rewards and not method.is_rewarded:
        known = ", ".join(f"'{item}'" for item in Method if item.is_rewarded)
        raise UserError(f"rewards are of methods {known}, and method is {str(method)!r}: set one, or leave them out")


def _hint(method: Method, name: str, of_trainer: Iterable[str]) -> str:
    """What an unknown option is here, if it is another library's or misspelled, as the end of an error."""
    bindings = _BINDINGS | (_OF_REWARDS if method.is_rewarded else _OF_PREFERENCES.get(method, {}))
    if name in _ALIASES:
        return f": did you mean {_ALIASES[name]}?"
    if name in _ELSEWHERE:
        return f": {_ELSEWHERE[name]}"
    if name in bindings:
        return f': try bindings=["{bindings[name]} = ..."]'
    return did_you_mean(name, [*inspect.signature(finetune).parameters, *of_trainer])


def _changed(
    trainer: Trainer, method: Method, lora: Lora | int | None, rewards: tuple[Reward, ...], fields: dict[str, Any]
) -> Trainer:
    """The run with what Python code says of it."""
    if lora is not None:
        if method in (Method.FULL, Method.DUO_ATTENTION):
            raise UserError(f"lora is of adapters, and method is {str(method)!r}: leave one out")
        if isinstance(lora, int):  # alpha as the method has it, twice the rank
            usual = trainer.model.lora
            assert isinstance(usual, Lora), "the method's adapters"
            lora = dataclasses.replace(usual, rank=lora, alpha=2.0 * lora)
        if method is Method.QLORA:  # the base's bits are what the method says
            base: dict[str, Any] = {"base_dtype": "nf4", "double_quantization": True}
            lora = dataclasses.replace(lora, **base)
        fields = {"model": dataclasses.replace(trainer.model, lora=lora)} | fields
    if rewards:
        assert isinstance(trainer.loss, RewardedLoss), "the method's loss"
        fields = {"loss": dataclasses.replace(trainer.loss, rewards=rewards)} | fields
    return dataclasses.replace(trainer, **fields)


def _named(reward: Reward) -> Reward:
    """A reward that the run folder's configuration can name."""
    if isinstance(reward, Verifier):
        return reward
    if isinstance(reward, types.FunctionType) and reward.__module__.startswith("capibara."):
        return reward
    if not isinstance(reward, types.FunctionType) or not reward.__name__.isidentifier():
        raise UserError(
            f"the reward {short(reward)} must be a function with a name or a verifier: write def my_reward(prompt, answer, record)"
        )
    if reward.__name__ in defining_modules():
        raise UserError(f"the reward {reward.__name__} has the name of {reward.__name__} of capibara: give it another")
    return configurable(reward)
