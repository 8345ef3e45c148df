"""Reads Hugging Face folders with quantized weights, dequantized as the libraries that wrote them do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.formats import (
    auto_round,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gemma,
    mlx,
    modelopt,
    mxfp4,
    quark,
    torchao,
    words,
)
from capibara.interop.quantize.values.weights import Folder, Quantized

# Of config.json: the second one is an older name of compressed-tensors, the last one MLX's.
CONFIG_KEYS = ("quantization_config", "compression_config", mlx.CONFIG_KEY)
_READERS: dict[str, Callable[[Folder, Mapping[str, object]], Quantized]] = {
    "gptq": words.gptq,
    "awq": words.awq,
    "bitsandbytes": bitsandbytes.bitsandbytes,
    "mxfp4": mxfp4.mxfp4,
    "compressed-tensors": compressed_tensors.compressed_tensors,
    "fp8": fp8.fp8,
    "mxfp8": fp8.fp8,
    "modelopt": modelopt.modelopt,
    "mlx": mlx.mlx,
    "auto-round": auto_round.auto_round,
    "fbgemm_fp8": fp8.fbgemm_fp8,
    "gemma": gemma.gemma,
    "quark": quark.quark,
    "torchao": torchao.torchao,
}
_MODELOPT = "hf_quant_config.json"  # of folders whose config.json does not have it
_QUANTO = "quanto_qmap.json"  # beside a config.json without a word of it
_OTHER_NAMES = {"modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "modelopt_mxfp8": "modelopt"}


class QuantizedFolder:
    """A folder's model with every tensor in float16, bfloat16 or float32: an open_model.ForeignModel.

    Args:
      folder: whose config has a quantization_config.

    Raises:
      UserError: the quantization is not supported, or tensors contradict their names and sizes.
    """

    def __init__(self, folder: Folder):
        self._folder = folder
        stated = {key: folder.config[key] for key in CONFIG_KEYS if folder.config.get(key)}
        about = next(iter(stated.values()), None)
        if any(other != about for other in stated.values()):
            raise UserError(f"config.json has {' and '.join(stated)}, which differ: leave the wrong one out")
        self.config = {name: value for name, value in folder.config.items() if name not in CONFIG_KEYS}
        self.tokenizer, self.about = folder.tokenizer, folder.about
        method = about.get("quant_method") if isinstance(about, dict) else None
        method = method or ("bitsandbytes" if _is_bitsandbytes(about) else "mlx" if mlx.is_mlx(about) else None)
        reader = _READERS.get(_OTHER_NAMES.get(method, method)) if isinstance(method, str) else None
        if not isinstance(about, dict) or reader is None:
            raise UserError(
                f"config.json has quant_method = {limits.shortened(method)} in quantization_config, must be one of "
                f"{', '.join(_READERS)}: use the folder before quantization"
            )
        self._weights, parts, unused = reader(folder, about)
        shapes = folder.shapes()
        if twice := sorted(self._weights.keys() & (shapes.keys() - parts)):
            raise UserError(f"{twice[0]} is in the folder as it is and quantized, must be one of them: copy it again")
        self._plain = {name: shape for name, shape in shapes.items() if name not in parts}
        for name in self._plain:
            if folder.kind(name).startswith(("F8", "F6", "F4", "I8", "U8")):
                raise UserError(
                    f"{name} is stored as {folder.kind(name)}, and the tensors beside it do not say its scale: the "
                    "folder is incomplete, or its config.json is another's"
                )
        for note in unused:
            logging.getLogger(__name__).warning("%s: not computed, layers and caches compute in floats", note)

    def shapes(self) -> dict[str, Shape]:
        return self._plain | {name: weight.shape for name, weight in self._weights.items()}

    def dtype(self, name: str) -> str:
        return self._weights[name].dtype if name in self._weights else self._folder.dtype(name)

    def read(self, name: str) -> np.ndarray:
        return self._weights[name].values() if name in self._weights else self._folder.read(name)


def opened(folder: Folder, path: str) -> Folder | QuantizedFolder:
    """A folder with its weights dequantized, if its config.json or ModelOpt's own file says how they are stored.

    Raises:
      UserError: as QuantizedFolder, or ModelOpt's file cannot be read, or the folder is optimum-quanto's.
    """
    file = os.path.join(path, _MODELOPT)
    if not any(folder.config.get(key) for key in CONFIG_KEYS):
        if os.path.exists(os.path.join(path, _QUANTO)):
            raise UserError(
                f"{path} has {_QUANTO}: optimum-quanto's weights are not read, use the folder before quantization"
            )
        if not os.path.exists(file):
            return folder
        about = limits.read_json(file, limits.SMALL_BYTES)
        folder.config = folder.config | {CONFIG_KEYS[0]: {**about, "quant_method": "modelopt"}}
    return QuantizedFolder(folder)


def _is_bitsandbytes(about: object) -> bool:
    return isinstance(about, dict) and bool(about.get("load_in_4bit") or about.get("load_in_8bit"))
