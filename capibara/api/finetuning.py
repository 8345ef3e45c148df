"""Fine-tuning in one call: `capibara.finetune(model, data, out)`, `dpo` and `grpo`."""

from __future__ import annotations

import dataclasses
import inspect
import os
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from capibara.api import data as of_python
from capibara.api.results import TrainingResult
from capibara.api.training import train
from capibara.cli.composition import finetuning
from capibara.cli.composition.finetuning import FineTuning, Method
from capibara.config import configurable
from capibara.core.fields import did_you_mean, short
from capibara.core.types import Dataclass, UserError
from capibara.interop import hub
from capibara.strategies.grpo import Grpo
from capibara.training.trainer import Trainer

if TYPE_CHECKING:
    from capibara.api.data import Data
    from capibara.api.language_model import LanguageModel
    from capibara.models.api import Lora

Reward = Callable[..., float]


def finetune(
    model: LanguageModel | str,
    data: Data,
    out: str,
    *,
    method: str = "lora",
    eval: Data = None,
    lora: Lora | None = None,
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
    """Trains a model further; call it again with the same `out` to resume. `capibara finetune` is the same run.

    Args:
      model: a path or name, as for `load`, or a loaded model, which needs memory beside the one that is trained.
      data: texts, or chats in any usual layout, as for `write_data`; of "dpo" pairs of answers, of "grpo" prompts.
      out: the run folder.
      method: "lora", "qlora", "full", "dpo" or "grpo".
      eval: data of evaluations; None: 3% of `data` is held out.
      lora: the adapters; None: rank 16 on all linear layers.
      rewards: of "grpo": functions (prompt, answer, record) -> a number.
      steps, epochs: the length of the run; by default one pass over the data.
      learning_rate: the highest one; None: by the method and the model's size.
      batch_size: rows of a step; None: 8, of "grpo" 64.
      length: tokens of a row; None: 1024, or what the model reads.
      seed: of adapters and of the data's order.
      bindings: more of the configuration, as Gin has it: "Schedule.kind = 'cosine'".
      others, emulate: as for `train`.
      fields: of `Trainer`, such as log_every=1.

    Raises:
      UserError: the run cannot be trained as described.
    """
    _check(fields)
    asked = FineTuning(
        model=hub.local_path(model if isinstance(model, str) else model.path),
        files=_files(data, out, "data"),
        validation_files=() if eval is None else _files(eval, out, "eval"),
        out=os.path.expanduser(out),
        method=_method(method),
        steps=steps,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch_size,
        length=length,
        seed=seed,
        bindings=("REWARDS = (@exact_answer,)", *bindings) if rewards else tuple(bindings),
    )
    trainer = _changed(finetuning.trained(asked), lora, rewards, fields)
    return train(trainer, *others, emulate=emulate)


def dpo(model: LanguageModel | str, pairs: Data, out: str, **options: Any) -> TrainingResult:
    """Direct preference optimisation on pairs of a chosen and a rejected answer; options as for `finetune`."""
    return finetune(model, pairs, out, method="dpo", **options)


def grpo(
    model: LanguageModel | str, prompts: Data, out: str, rewards: Sequence[Reward], *, steps: int, **options: Any
) -> TrainingResult:
    """Group relative policy optimisation: the model's own answers, rewarded by functions; options as for `finetune`.

    Args:
      model, out: as for `finetune`.
      prompts: what is asked, and beside it what the rewards read.
      rewards: functions (prompt, answer, record) -> a number.
      steps: the length of the run.
      options: as for `finetune`.
    """
    if not rewards:
        raise UserError("rewards is empty: give functions of (prompt, answer, record), such as [cb.numeric_answer]")
    return finetune(model, prompts, out, method="grpo", rewards=rewards, steps=steps, **options)


def _method(name: str) -> Method:
    known = [str(one) for one in Method]
    if name not in known:
        raise UserError(f"method is {name!r}, must be one of {', '.join(known)}{did_you_mean(name, known)}")
    return Method(name)


def _files(data: Data, out: str, name: str) -> tuple[str, ...]:
    return of_python.write_data(data, os.path.join(os.path.expanduser(out), "data"), name)


def _check(fields: Iterable[str]) -> None:
    """Raises UserError if an option is neither of `finetune` nor a field of Trainer."""
    of_trainer = {field.name for field in dataclasses.fields(Trainer)}
    for name in fields:
        if name not in of_trainer:
            own = [*inspect.signature(finetune).parameters, *of_trainer]
            raise UserError(f"finetune has no option {name!r}{did_you_mean(name, own)}")


def _changed(trainer: Trainer, lora: Lora | None, rewards: Sequence[Reward], fields: dict[str, Any]) -> Trainer:
    """The run with what Python code says of it."""
    if lora is not None:
        fields = {"model": dataclasses.replace(trainer.model, lora=lora)} | fields
    if rewards:
        if not isinstance(trainer.loss, Grpo):
            raise UserError("rewards are of method 'grpo': set it, or leave them out")
        named = tuple(_named(one) for one in rewards)
        fields = {"loss": dataclasses.replace(trainer.loss, rewards=named)} | fields
    return dataclasses.replace(trainer, **fields)


def _named(reward: Reward) -> Reward:
    """A reward that the run folder's configuration can name."""
    if not isinstance(reward, types.FunctionType) or not reward.__name__.isidentifier():
        raise UserError(
            f"the reward {short(reward)} must be a function with a name: write def my_reward(prompt, answer, record)"
        )
    return configurable(reward)
