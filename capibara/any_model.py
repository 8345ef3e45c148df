"""Opens a model to use it, whatever it comes in: a run folder of ours, a Hugging Face folder or a .gguf file.

What it gives is a run (`run_folder.Loaded`) in every case, so that all that works on runs works on foreign models.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import jax

from capibara import config
from capibara.interop import checkpoint, gin_of, hf_config
from capibara.models import api
from capibara.training import run_folder
from capibara.training.run_folder import Loaded
from capibara.training.state import with_shardings
from capibara.training.trainer import Trainer


class Opened(NamedTuple):
    """A model that is ready.

    Attributes:
      run: its run, the model without adapters, and the parameters, on one device.
      path: where it was.
    """

    run: Loaded
    path: str


def load(
    path: str, gin_files: Sequence[str] = (), bindings: Sequence[str] = (), search_paths: Sequence[str] = ()
) -> Opened:
    """Parses the model's own configuration, then `gin_files` and `bindings`, and reads its parameters.

    A foreign model's run is what `convert --format=capibara` would write: rows of 1024 places (Dataset.length), the
    standard library as data, its own tokenizer.

    Args:
      path: of the model.
      gin_files, bindings, search_paths: as of config.parse.

    Raises:
      UserError: it is no model, or not whole.
    """
    given = (gin_files, bindings, search_paths)
    return Opened(run_folder.load(path, *given) if run_folder.is_run(path) else _foreign(path, *given), path)


def _foreign(path: str, gin_files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str]) -> Loaded:
    foreign = checkpoint.open_model(path)
    # bfloat16 is slow on CPUs.
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model_config = hf_config.from_hf(foreign.config, dtype=dtype)
    longest = hf_config.text_part(foreign.config).get("max_position_embeddings")
    if isinstance(model_config, api.DecoderConfig) and model_config.max_length is None:
        model_config = dataclasses.replace(model_config, max_length=longest)
    folder = path if os.path.isdir(path) else _unpacked(foreign.tokenizer)
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as file:
        file.write(gin_of.run(model_config, folder, foreign.tokenizer))
        file.flush()
        config.parse([file.name, *gin_files], bindings, search_paths)
    trainer = config.build(Trainer)
    model = api.build(dataclasses.replace(trainer.model, lora=None))
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = with_shardings(model.abstract_params, jax.tree.map(lambda _: here, model.abstract_params))
    return Loaded(trainer, model, checkpoint.loader(path, model)(target))


def _unpacked(tokenizer: dict[str, bytes]) -> str:
    """A folder with these files, until this process ends: tokenizers are read when they are needed."""
    folder = tempfile.mkdtemp(prefix="capibara-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in tokenizer.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    return folder
