"""Loads models for inference, conversion and evaluation: run folders, Hugging Face folders, .gguf files, adapters of PEFT."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping

import jax

from capibara import config
from capibara.core import limits
from capibara.core.fields import in_home
from capibara.core.types import UserError
from capibara.data.tokenizers import files, model_rows
from capibara.data.tokenizers.files import MODEL_FILE, TOKENIZER_FILE
from capibara.interop import gin_of, open_model, peft_runs
from capibara.interop.hf import config as hf_config
from capibara.interop.open_model import ForeignModel, LoadedModel, Training
from capibara.models import api
from capibara.training import run_folder
from capibara.training.run_folder import Placed, TrainedRun, origin
from capibara.training.trainer import Trainer

# A foreign model may support much longer rows, but the cache of each row needs memory for its whole length.
_LENGTHS: Mapping[type[api.TransformerConfig], int] = {api.EncoderDecoderConfig: 512}
_LENGTH = 2048
_LARGEST_OF_BYTES = 512  # a model with a smaller vocabulary and without a tokenizer is assumed to read bytes


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model whose own configuration is known, and whose parameters are not read yet.

    Attributes:
      path: as the user wrote it; of an adapter its base's.
      record: the model's own configuration; Gin files and flags come after it.
      foreign: the model, if it is not of a run folder.
      adapter: a folder of PEFT whose adapters are merged into the model; None: there are none.
    """

    path: str
    record: config.Recorded
    foreign: ForeignModel | None = None
    adapter: str | None = None

    def load(
        self,
        trainer: Trainer,
        *,
        step: int | None = None,
        weights: str | None = None,
        placed: Placed = run_folder.on_one_device,
    ) -> LoadedModel:
        """Reads the parameters.

        Args:
          trainer: what `record` configures, with what the user set.
          step, weights: as for `open_path`.
          placed: shardings of the parameters.

        Raises:
          UserError: it is incomplete, or has no such step or weights.
        """
        if self.foreign is None:
            average = None if weights is None else weights == "ema"
            run = run_folder.load(self.path, trainer, step=step, average=average, placed=placed)
            loaded = of_run(run, self.path)
        else:
            self._check_vocabulary(trainer, trainer.model)
            loaded = dataclasses.replace(_foreign(self.foreign, self.record.where, trainer, placed), path=self.path)
        if self.adapter is not None:
            model, params = peft_runs.merged(self.adapter, loaded.model, loaded.params, loaded.like)
            loaded = dataclasses.replace(
                loaded, model=model, params=params, path=self.adapter, step=None, weights="stored"
            )
            self._check_vocabulary(trainer, model.config)
        return loaded

    def _check_vocabulary(self, trainer: Trainer, model: api.TransformerConfig) -> None:
        """Raises UserError unless a model has rows for all tokens; an adapter may add rows to its base."""
        if self.foreign is not None and self.foreign.tokenizer and (self.adapter is None or model is not trainer.model):
            model_rows.check_vocabulary(trainer.dataset.get_vocabulary(), model.vocab_size, self.record.where)


def open_path(
    path: str,
    *,
    base: str | None = None,
    step: int | None = None,
    weights: str | None = None,
    trust: bool = False,
    dtype: str | None = None,
) -> Opened:
    """Opens a run folder, a foreign model, or an adapter of PEFT with its base and, as far as it has one, its own tokenizer.

    A foreign model's configuration is similar to that of `convert --format=capibara`, with the standard library as data;
    its parameters and computations are in bfloat16, on CPUs in float32.

    Args:
      path: path of the model.
      base: path of an adapter's base; None: the one that it names.
      step: a checkpoint step of a run; None: the newest.
      weights: weights of a run, "ema" or "raw"; None: the averages if there are any.
      trust: whether to import the modules that a run's configuration names.
      dtype: in which a foreign model computes; None: that of this machine's devices, which starts JAX.

    Raises:
      UserError: it is not a model, has no tokenizer, or is no run and has no steps and weights to choose from; the base of
        an adapter is not here.
    """
    path = in_home(path)
    local = path if is_run(path) else open_model.local_model(path)
    if peft_runs.is_adapter(local):
        under = peft_runs.base_of(local, base)
        return _with_adapter(local, open_path(under, step=step, weights=weights, trust=trust, dtype=dtype), dtype)
    if base is not None:
        raise UserError(f"base ({base!r}) is for adapters, and {path} is none: leave it out")
    if is_run(path):
        return Opened(path, run_folder.recorded(path, trust=trust))
    if os.path.exists(os.path.join(local, run_folder.CONFIG)) and not os.path.exists(
        os.path.join(local, "config.json")
    ):
        raise UserError(
            f"{local} holds no checkpoint yet: train it first; where its {run_folder.CONFIG} is T5X's, capibara convert "
            "takes it in"
        )
    if os.path.isdir(local) and not os.path.exists(os.path.join(local, MODEL_FILE)):
        raise UserError(f"{local} is neither a run folder (config.gin) nor a Hugging Face folder (config.json)")
    for flag, value in (("--step", step), ("--weights", weights)):
        if value is not None:
            raise UserError(f"{flag}={value} is only for run folders, and {local} is none: leave it out")
    foreign = open_model.open_model(local)
    return Opened(path, _record(foreign, local, dtype or dtype_of_devices(), foreign.tokenizer), foreign)


def _with_adapter(folder: str, base: Opened, dtype: str | None) -> Opened:
    """An adapter's base with the adapter and with its tokenizer, as far as its folder has one."""
    if (foreign := base.foreign) is None:
        return dataclasses.replace(base, adapter=folder)
    tokenizer = files.over(foreign.tokenizer, folder)
    where = base.record.where if tokenizer == foreign.tokenizer else folder
    record = _record(foreign, where, dtype or dtype_of_devices(), tokenizer)
    return dataclasses.replace(base, record=record, adapter=folder)


def is_run(path: str) -> bool:
    """Whether a path is a run folder."""
    return not path.endswith(".gguf") and run_folder.is_run(path)


def of_run(run: TrainedRun, folder: str) -> LoadedModel:
    """A run of a folder as a loaded model."""
    trainer, came_with = run.trainer, origin.read(folder)
    return LoadedModel(
        model=run.model,
        params=run.params,
        dataset=trainer.dataset,
        path=folder,
        step=run.step,
        weights="ema" if run.is_average else "raw",
        origin=came_with,
        like=hf_config.kept_by_run(came_with.get(MODEL_FILE, b"{}")),
        training=Training(
            trainer.init_from, trainer.init_with, trainer.optimizer, trainer.steps, trainer.checkpointing
        ),
    )


def dtype_of_devices() -> str:
    """The dtype in which a foreign model computes on this machine's devices."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"  # bfloat16 is slow on CPUs


def _record(foreign: ForeignModel, path: str, dtype: str, tokenizer: Mapping[str, bytes]) -> config.Recorded:
    """The configuration of a foreign model: a run that would train it, with the files of a tokenizer."""
    model = hf_config.from_hf(foreign.config, dtype=dtype)
    longest = hf_config.longest(foreign.config)
    if isinstance(model, api.DecoderConfig) and model.max_length is None:
        model = dataclasses.replace(model, max_length=longest)
    if not tokenizer and model.vocab_size > _LARGEST_OF_BYTES:
        raise UserError(f"{path} has no tokenizer ({TOKENIZER_FILE}, tokenizer.model): put the model's own beside it")
    if not tokenizer:
        logging.getLogger(__name__).warning(
            "%s has no tokenizer: texts are read as UTF-8 bytes (@ByteVocabulary())", path
        )
    folder = path if os.path.isdir(path) and tokenizer == foreign.tokenizer else _written(tokenizer)
    length = min(model.max_length or _LENGTH, _LENGTHS.get(type(model), _LENGTH))
    _tell_unread_generation(folder, path)
    return config.Recorded(gin_of.run(model, folder, tokenizer, length), path)


def _tell_unread_generation(folder: str, path: str) -> None:
    if unread := files.unread_generation(folder):
        shown = limits.shortened(", ".join(f"{name} = {value}" for name, value in unread.items()), 200)[1:-1]
        logging.getLogger(__name__).warning(
            "%s: %s has %s, which is not used: requests, flags and Sampling say how texts are sampled",
            path,
            files.GENERATION_FILE,
            shown,
        )


def _foreign(foreign: ForeignModel, path: str, trainer: Trainer, placed: Placed) -> LoadedModel:
    model = api.build(dataclasses.replace(trainer.model, lora=None))
    if model.config.has_gates:
        raise UserError(
            f"StreamingHeads.heads is None, and {path} has no gates: set heads, or DecoderConfig.streaming = @read_streaming_heads()"
        )
    shardings = placed(trainer.plan, model)
    params = open_model.load_params(foreign, model, shardings, dtype=jax.numpy.dtype(model.config.dtype))
    return LoadedModel(model, params, trainer.dataset, path, None, "stored", like=foreign.config)


def _written(contents: Mapping[str, bytes]) -> str:
    """Writes these files to a temporary folder that lasts until this process ends: tokenizers are read on first use."""
    folder = tempfile.mkdtemp(prefix="capibara-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in contents.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    return folder
