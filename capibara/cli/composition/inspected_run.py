"""The run that parsed Gin files configure, for verbs that look at it or compile it and do not train it."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara import config
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.models import api
from capibara.optim import Optimizer
from capibara.sharding import Plan
from capibara.training.trainer import Trainer


def run_of_gin(length: int | None = None, encoder_length: int | None = None) -> Trainer:
    """Builds the run, whose run folder is not used.

    If the Gin files only configure a model, it is a run that trains this model with the bound options (Plan, Optimizer,
    Dataset.length) and defaults; rows have 2048 positions, or as many as the model supports. Options without a default
    (steps, initial weights, data) need not be bound.

    Args:
      length, encoder_length: positions in a row; None: the run's own.

    Raises:
      UserError: the Gin files configure neither a run nor a model, or several models.
    """
    given_lengths = {"length": length, "encoder_length": encoder_length}
    lengths: dict[str, Any] = {name: positions for name, positions in given_lengths.items() if positions is not None}
    has_data = config.is_bound("Dataset.source") or config.is_bound("Dataset.mixture_or_task_name")
    if not has_data:
        config.bind("", "Dataset", "mixture_or_task_name", "unused", "run_of_gin")
    steps = {} if config.is_bound("Trainer.steps") else {"steps": 1_000_000}
    if config.is_bound("Trainer.model"):
        unset = steps | ({} if config.is_bound("Trainer.init_from") else {"init_from": None})
        run = config.build(Trainer, model_dir="unused", **unset)
        return dataclasses.replace(run, dataset=dataclasses.replace(run.dataset, **lengths)) if lengths else run
    bound = [kind for kind in api.configurations() if config.is_bound(kind.__name__)]
    if not bound:
        raise UserError("--gin_file configures no model: add one, e.g. --gin_file=models/capibara_8b.gin")
    if len(bound) > 1:
        named = " and ".join(kind.__name__ for kind in bound)
        raise UserError(f"--gin_file configures several models ({named}): keep one, or bind Trainer.model")
    (kind,) = bound
    model = config.build(kind)
    if not config.is_bound("Dataset.length"):
        lengths.setdefault("length", min(2048, model.max_length or 2048))
    if kind is api.EncoderDecoderConfig and not config.is_bound("Dataset.encoder_length"):
        lengths.setdefault("encoder_length", lengths.get("length", 2048))
    data = lengths | {"kind": model.data_kind}
    if model.moe and model.moe.hints:
        data["domains"] = model.moe.hints.domains
    return config.build(
        Trainer,
        model_dir="unused",
        **steps,
        model=model,
        plan=config.build(Plan, **({} if config.is_bound("Plan.batch_size") else {"batch_size": 1})),
        dataset=config.build(Dataset, **data),
        optimizer=config.build(Optimizer),
    )
