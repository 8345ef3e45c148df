"""Opens a model by its path or name, with adapters beside it: `capibara.load`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from capibara.api.scored_model import Adapting
from capibara.api.stored import path_of
from capibara.checkpoints.policy import Checkpointing
from capibara.cli.composition import models, pretrained
from capibara.core.fields import short
from capibara.core.types import PyTree, UserError
from capibara.loading import adapters as beside
from capibara.loading.adapters import Adapters

if TYPE_CHECKING:
    from capibara.api.language_model import LanguageModel
    from capibara.inference.engine.placement.serving_mesh import ServingMesh
    from capibara.interop.open_model import LoadedModel
    from capibara.models.api import Model, TransformerConfig
    from capibara.sharding import Plan
    from capibara.training.trainer import Trainer


def load(
    path: str | os.PathLike[str],
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    adapters: Adapters | None = None,
    base: str | None = None,
    dtype: str | None = None,
    mesh: ServingMesh | None = None,
    step: int | None = None,
    weights: str | None = None,
    trust: bool = False,
) -> LanguageModel:
    """Loads a model: `capibara.load("folder")`. What Gin has parsed before in this process does not count, and is forgotten.

    Args:
      path: a run folder, a Hugging Face folder, a .gguf file, a folder of PEFT, whose adapters are merged into their base, or the
        name of a model on the Hugging Face Hub (OWNER/NAME).
      gin_files, bindings, search_paths: they change the model's own configuration, such as "Dataset.length = 4096".
      adapters: unmerged ones, which requests name, and folders of further ones; None: those that Gin configures.
      base: path of an adapter's base; None: the one that it names.
      dtype: in which the model computes, such as "bfloat16"; None: float32 on a CPU, else bfloat16; a run's own.
      mesh: how the parameters lie on the devices, such as capibara.ServingMesh(tensor=4); None: on one device.
      step: a checkpoint step of a run; None: the newest.
      weights: weights of a run, "ema" or "raw"; None: the averages if there are any.
      trust: whether to import the modules that a run's configuration names.

    Raises:
      UserError: it is not a model, is incomplete, has no tokenizer, or has no such step or weights.
    """
    from capibara.api.language_model import LanguageModel
    from capibara.interop import peft_runs

    path = path_of(path)
    if weights not in (None, "ema", "raw"):
        raise UserError(f"weights is {weights!r}, must be 'ema' or 'raw', or None for the averages if there are any")
    base = None if base is None else path_of(base, "base")
    if peft_runs.is_adapter(path):
        base = peft_runs.base_of(path, base)
    with models.PARSING:  # what is parsed is the process's, not the thread's
        trainer, loaded = models.load_with_run(
            path,
            (gin_files, bindings, search_paths),
            base=base,
            step=step,
            weights=weights,
            placed=_placed(mesh),
            trust=trust,
            change=_in_dtype(dtype),
        )
        loaded, adapting = _adapting(loaded, adapters)
        template, batching = models.chatting(trainer.dataset)
    options = {"step": step, "weights": weights, "gin_files": gin_files or None, "bindings": bindings or None}
    changes = tuple(f"{name}={short(value)}" for name, value in options.items() if value is not None)
    return LanguageModel(
        loaded, trainer, template=template, batching=batching, base=base, changes=changes, adapting=adapting
    )


def _adapting(loaded: LoadedModel, settings: Adapters | None) -> tuple[LoadedModel, Adapting]:
    """A model with adapters beside it, and how further ones are loaded; None: as Gin configures."""
    settings = models.adapter_settings() if settings is None else settings
    loaded = beside.attached(loaded, settings, Checkpointing())
    return loaded, Adapting(models.adapter_slots(settings), models.adapter_folders(loaded, settings))


def model_config(path: str | os.PathLike[str]) -> TransformerConfig:
    """The configuration of a model, such as of `capibara.Trainer(model=...)`; reads none of its weights.

    Args:
      path: as for `load`, but for adapters.

    Raises:
      UserError: as for `load`.
    """
    with models.PARSING:
        return pretrained.read(path_of(path)).model


def _placed(mesh: ServingMesh | None) -> Callable[[Plan, Model], PyTree]:
    from capibara.training import run_folder

    if mesh is None:
        return run_folder.on_one_device

    def shardings(_: Plan, model: Model) -> PyTree:
        import jax

        return mesh.shardings(model, jax.devices())

    return shardings


def _in_dtype(dtype: str | None) -> Callable[[Trainer], Trainer]:
    if dtype is None:
        return lambda trainer: trainer
    fields: dict[str, Any] = {"dtype": dtype}  # which the configuration checks
    return lambda trainer: dataclasses.replace(trainer, model=dataclasses.replace(trainer.model, **fields))
