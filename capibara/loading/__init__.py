"""A model to use, whatever it comes in: a run folder of ours, a Hugging Face folder or a .gguf file.

What it gives has a run in every case, so that all that works on runs works on foreign models.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from capibara import config
from capibara.core.types import UserError
from capibara.data.tokenizers.files import MODEL_FILE, TOKENIZER_FILE
from capibara.interop import gin_of, open_model
from capibara.interop.hf import config as hf_config
from capibara.models import api
from capibara.training import origin, run_folder
from capibara.training.run_folder import Loaded, Placed
from capibara.training.trainer import Trainer

# A foreign model may see much more; each row that is answered takes memory for all of it.
_LENGTHS = {api.EncoderDecoderConfig: 512}
_LENGTH = 2048
_LARGEST_OF_BYTES = 512  # vocabulary of a model that may have come without a tokenizer because it reads bytes


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model that is ready.

    Attributes:
      run: its run, the model without adapters, and the parameters.
      path: where it was.
      step: of a run's checkpoint; None: it is foreign.
      weights: "ema" or "raw" of a run, "stored" of a foreign model.
      like: its config.json, or that of what the run began from; empty: there is none.
      adapters: beside it, unmerged (capibara.loading.adapters).
      paths: where these were, by their names.
    """

    run: Loaded
    path: str
    step: int | None
    weights: str
    like: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adapters: tuple[api.Adapter, ...] = ()
    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def about(self) -> dict[str, Any]:
        """Which model it is, as JSON values."""
        about = {"model": self.path, "step": self.step, "weights": self.weights}
        return about | ({"adapters": dict(self.paths)} if self.paths else {})


def load(
    path: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    step: int | None = None,
    weights: str | None = None,
    placed: Placed = run_folder.on_one_device,
    trust: bool = False,
) -> Opened:
    """Parses the model's own configuration, then `gin_files` and `bindings`, and reads its parameters.

    A foreign model's run is much what `convert --format=capibara` would write, with the standard library as data; it
    computes, and its parameters are, in bfloat16, but on CPUs in float32.

    Args:
      path: of the model.
      gin_files, bindings, search_paths: as of config.parse.
      step: of a run's checkpoint; None: the newest.
      weights: of a run: "ema" or "raw"; None: averages where some were kept.
      placed: where the parameters shall lie.
      trust: the modules that a run's configuration names are imported.

    Raises:
      UserError: it is no model, or not whole, has no tokenizer, or no such step or weights.
    """
    given = (gin_files, bindings, search_paths)
    if not path.endswith(".gguf") and run_folder.is_run(path):
        average = None if weights is None else weights == "ema"
        how = {"step": step, "average": average, "placed": placed, "trust": trust}
        found, run, averaged = run_folder.load_step(path, *given, **how)
        like = hf_config.kept_by_run(origin.read(path).get(MODEL_FILE, b"{}"))
        return Opened(run, path, found, "ema" if averaged else "raw", like)
    given_path, path = path, open_model.local_model(path)
    known = ("config.json", "adapter_config.json")  # open_model says how an adapter is merged
    if os.path.exists(os.path.join(path, run_folder.CONFIG)) and not os.path.exists(os.path.join(path, "config.json")):
        raise UserError(
            f"{path} holds no checkpoint yet: train it first; where its {run_folder.CONFIG} is T5X's, capibara convert "
            "takes it in"
        )
    if os.path.isdir(path) and not any(os.path.exists(os.path.join(path, name)) for name in known):
        raise UserError(f"{path} is neither a run folder (config.gin) nor a Hugging Face folder (config.json)")
    for flag, value in (("--step", step), ("--weights", weights)):
        if value is not None:
            raise UserError(f"{flag}={value} is of run folders, and {path} is none: leave it out")
    config.load_modules(gin_files, search_paths)
    run, like = _foreign(path, *given, placed)
    return Opened(run, given_path, None, "stored", like)


def _foreign(
    path: str, gin_files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], placed: Placed
) -> tuple[Loaded, Mapping[str, Any]]:
    """The run, and the model's config.json."""
    foreign = open_model.open_model(path)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"  # which is slow on CPUs
    own = hf_config.from_hf(foreign.config, dtype=dtype)
    longest = hf_config.longest(foreign.config)
    if isinstance(own, api.DecoderConfig) and own.max_length is None:
        own = dataclasses.replace(own, max_length=longest)
    if not foreign.tokenizer and own.vocab_size > _LARGEST_OF_BYTES:
        raise UserError(f"{path} has no tokenizer ({TOKENIZER_FILE}, tokenizer.model): put the model's own beside it")
    folder = path if os.path.isdir(path) else _written(foreign.tokenizer)
    length = min(own.max_length or _LENGTH, _LENGTHS.get(type(own), _LENGTH))
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as file:
        file.write(gin_of.run(own, folder, foreign.tokenizer, length))
        file.flush()
        config.parse([file.name, *gin_files], bindings, search_paths)
    trainer = config.build(Trainer)
    model = api.build(dataclasses.replace(trainer.model, lora=None))
    params = open_model.load_params(foreign, model, placed(trainer, model), dtype=jax.numpy.dtype(model.config.dtype))
    return Loaded(trainer, model, params), foreign.config


def _written(files: Mapping[str, bytes]) -> str:
    """A folder with these files, until this process ends: tokenizers are read when they are needed."""
    folder = tempfile.mkdtemp(prefix="capibara-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in files.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    return folder
