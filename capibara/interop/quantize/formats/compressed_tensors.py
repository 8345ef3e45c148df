"""compressed-tensors: integers packed in words, FP8, and 4, 6 and 8-bit floats in groups, as version 0.20 decompresses them.

Products are rounded once, to the dtype of the scales; of NVFP4 and the formats with exponents for scales to bfloat16.

Shape letters: O outputs, I inputs of a weight, A blocks of outputs, G groups or blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.formats import schemes
from capibara.interop.quantize.formats.schemes import Scheme
from capibara.interop.quantize.values import fp4, streams
from capibara.interop.quantize.values.weights import (
    FLOATS,
    FP8,
    Blocks,
    Folder,
    Quantized,
    Weight,
    bases,
    check,
    float8,
    matrix,
    powers,
    scaled,
)

WORD = 32  # bits
_SCALE = ".weight_scale"
_ACTIVATIONS = tuple(
    f"{side}_{part}" for side in ("input", "output") for part in ("scale", "zero_point", "global_scale")
)
_CACHE = (".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point")
# The values of 6-bit floats (E2M3), by code: those with a sign last.
_STEPS = np.array([step if step < 8 else (8 + step % 8) * 2 ** (step // 8 - 1) for step in range(32)], np.float32) / 8
_FP6 = np.concatenate([_STEPS, -_STEPS])


def compressed_tensors(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder of compressed-tensors."""
    of_module, shapes = schemes.read(about), folder.shapes()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for base in bases(shapes, _SCALE):
        module = _Module(folder, shapes, base, of_module.of(base))
        weights[f"{base}.weight"] = module.weight()
        parts |= module.parts
    for ending in (".weight_packed", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".weight_shape"):
        if rest := [name for name in shapes if name.endswith(ending) and name not in parts]:
            raise UserError(f"{rest[0]} is no part of a weight with scales: the folder is incomplete, copy it again")
    modules = {name.removesuffix("weight") for name in weights}
    activations = {name for name in shapes if name.endswith(_ACTIVATIONS) and name.rpartition(".")[0] + "." in modules}
    caches = {name for name in shapes if name.endswith(_CACHE)}
    notes = [*of_module.unused, *(["a key/value cache with scales"] if caches else [])]
    return Quantized(weights, parts | activations | caches, tuple(notes))


class _Module:
    """The tensors of a module with a quantized weight.

    Attributes:
      parts: names of the tensors that its weight is made of.
    """

    def __init__(self, folder: Folder, shapes: Mapping[str, Shape], base: str, scheme: Scheme):
        self._folder, self._shapes, self._base, self._scheme = folder, shapes, base, scheme
        self.parts = {self._named("weight_scale")}

    def weight(self) -> Weight:
        """Its weight, after all shapes and dtypes are checked.

        Raises:
          UserError: tensors are missing, or contradict the scheme.
        """
        match self._scheme.form:
            case "pack-quantized":
                return self._packed()
            case "nvfp4-pack-quantized" | "mxfp4-pack-quantized" | "mxfp6-pack-quantized" | "mxfp8-quantized":
                return self._in_groups()
        return self._plain()

    def _named(self, part: str) -> str:
        return f"{self._base}.{part}"

    def _part(self, part: str, shape: Shape, kinds: tuple[str, ...]) -> str:
        """The name of a tensor that must have this shape and one of these dtypes."""
        name = self._named(part)
        check(self._folder, self._shapes, name, shape, kinds)
        self.parts.add(name)
        return name

    def _packed(self) -> Weight:
        outputs, words = matrix(self._shapes, self._named("weight_packed"))
        codes = self._part("weight_packed", (outputs, words), ("I32",))
        stated = self._folder.stored(self._part("weight_shape", (2,), ("I64", "I32"))).tolist()
        shape, bits = (outputs, stated[1]), self._scheme.bits
        if stated[0] != outputs or words != -(-stated[1] * bits // WORD):
            raise UserError(
                f"{self._named('weight_shape')} is {stated}, and {codes} has {words} words of {bits}-bit codes for "
                f"{outputs} outputs: copy the folder again"
            )
        if WORD % bits and stated[1] % WORD:
            raise UserError(f"{codes} has {stated[1]} inputs, must have a multiple of {WORD} in {bits} bits")
        scale, blocks = self._scales(shape)
        packs_zeros = self._scheme.strategy != "tensor"
        zeros = self._zeros(scale, packed=packs_zeros)
        stored, middle = self._folder.stored, 1 << (bits - 1)

        def values() -> np.ndarray:
            steps = streams.unpacked(stored(codes), bits, shape[1]).astype(np.int16) - middle
            zeros_AG = None if zeros is None else stored(zeros)
            if zeros_AG is not None and packs_zeros:
                zeros_AG = streams.unpacked(zeros_AG.T, bits, outputs).T.astype(np.int16) - middle
            return self._scaled(steps, scale, blocks, zeros_AG)

        return Weight(shape, self._folder.dtype(scale), values)

    def _plain(self) -> Weight:
        shape = matrix(self._shapes, self._named("weight"))
        codes = self._part("weight", shape, (FP8,) if self._scheme.type == "float" else ("I8",))
        scale, blocks = self._scales(shape)
        zeros = self._zeros(scale, packed=False)
        stored, is_float = self._folder.stored, self._scheme.type == "float"

        def values() -> np.ndarray:
            steps = float8(stored(codes)) if is_float else stored(codes)
            return self._scaled(steps, scale, blocks, None if zeros is None else stored(zeros))

        return Weight(shape, self._folder.dtype(scale), values)

    def _scaled(self, codes: np.ndarray, scale: str, blocks: Blocks, zeros: np.ndarray | None) -> np.ndarray:
        scales = np.atleast_2d(self._folder.stored(scale))
        zeros = None if zeros is None else np.atleast_2d(zeros)
        return scaled(codes, scales, blocks, self._folder.dtype(scale), zeros)

    def _in_groups(self) -> Weight:
        """A weight of small floats in groups of inputs."""
        form, size = self._scheme.form, self._scheme.group
        part = "weight" if form == "mxfp8-quantized" else "weight_packed"
        outputs, width = matrix(self._shapes, self._named(part))
        inputs = width * 8 // self._scheme.bits
        codes = self._part(part, (outputs, width), (FP8,) if part == "weight" else ("U8",))
        if inputs % size or width * 8 != inputs * self._scheme.bits:
            raise UserError(f"{codes} has {inputs} inputs, must have a multiple of {size} in {form}")
        is_nvfp4 = form == "nvfp4-pack-quantized"
        scale = self._part("weight_scale", (outputs, inputs // size), (FP8,) if is_nvfp4 else ("U8",))
        divisor = self._part("weight_global_scale", (1,), ("F32",)) if is_nvfp4 else ""
        blocks, stored, decode = Blocks.of((outputs, inputs), 1, size), self._folder.stored, _DECODERS[form]

        def values() -> np.ndarray:
            scales = stored(scale)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                scales_OG = float8(scales).astype(np.float32) / stored(divisor) if is_nvfp4 else _exponents(scales)
            return scaled(decode(stored(codes)), scales_OG, blocks, "bfloat16")

        return Weight((outputs, inputs), "bfloat16", values)

    def _scales(self, shape: Shape) -> tuple[str, Blocks]:
        """The name of the scales, and which scale each value has."""
        outputs, inputs = shape
        scheme = self._scheme
        if scheme.strategy == "group" and inputs % scheme.group:
            raise UserError(
                f"{self._named('weight')} has {inputs} inputs, and its groups have {scheme.group}: must divide them"
            )
        size = {"tensor": shape, "channel": (1, inputs), "group": (1, scheme.group)}.get(scheme.strategy, scheme.block)
        expected: Shape = tuple(-(-length // part) for length, part in zip(shape, size, strict=True))
        if scheme.strategy == "tensor":
            expected = () if self._shapes[self._named("weight_scale")] == () else (1,)
        name, blocks = self._part("weight_scale", expected, FLOATS), Blocks.of(shape, *size)
        if self._named("weight_g_idx") in self._shapes:
            return name, blocks._replace(column_I=self._order(inputs))
        return name, blocks

    def _order(self, inputs: int) -> np.ndarray:
        """The group of each input; -1 in one of them: they are in order."""
        name, size = self._part("weight_g_idx", (inputs,), ("I32", "I64")), self._scheme.group
        if self._scheme.strategy != "group":
            raise UserError(f"{name} has groups of inputs, and the strategy is {self._scheme.strategy}: must be group")
        group_I = self._folder.stored(name)
        if (group_I == -1).any():
            return np.arange(inputs) // size
        count = inputs // size
        if not ((group_I >= 0) & (group_I < count)).all() or (np.bincount(group_I, minlength=count) != size).any():
            raise UserError(f"{name} must have each group from 0 to {count - 1} {size} times: copy the folder again")
        return group_I

    def _zeros(self, scale: str, *, packed: bool) -> str | None:
        """The name of the zero points; None: there are none."""
        name = self._named("weight_zero_point")
        shape = tuple(self._shapes[scale])
        if not self._scheme.symmetric:
            words: Shape = (-(-shape[0] * self._scheme.bits // WORD), *shape[1:]) if packed else shape
            return self._part("weight_zero_point", words, ("I32",) if packed else ("I8",))
        if name in self._shapes:  # of older versions
            self.parts.add(name)
            if self._folder.stored(name).any():
                raise UserError(f"{name} has zero points, and the scheme of {self._base} is symmetric: copy it again")
        return None


def _exponents(scales: np.ndarray) -> np.ndarray:
    """Scales of bytes with exponents, as bfloat16 has them."""
    return powers(scales).astype(ml_dtypes.bfloat16)


def _six_bits(stored: np.ndarray) -> np.ndarray:
    """The values of bytes with four 6-bit floats in three."""
    digits = np.unpackbits(stored, axis=-1, bitorder="little").reshape(*stored.shape[:-1], -1, 6)
    return _FP6[np.packbits(digits, axis=-1, bitorder="little")[..., 0]]


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nvfp4-pack-quantized": fp4.values,
    "mxfp4-pack-quantized": fp4.values,
    "mxfp6-pack-quantized": _six_bits,
    "mxfp8-quantized": float8,
}
