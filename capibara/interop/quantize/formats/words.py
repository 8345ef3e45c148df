"""GPTQ and AWQ: codes in 32-bit words, as GPTQModel (gptq, gptq_v2) and AutoAWQ (gemm) store them.

Rounding follows their own dequantization: the product of scale and code is rounded once, to the scales' dtype.

Shape letters: O outputs, I inputs of a weight, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf import config as hf_config
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.formats.weights import (
    FLOATS,
    Blocks,
    Folder,
    Quantized,
    Weight,
    bases,
    check,
    check_keys,
    matrix,
    scaled,
    whole,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, at each position of one of AWQ's words
_WORD = 32  # bits
_WORDS = ("I32", "U32")
_INPUTS_FIRST = ("gpt2",)  # families whose weights are [I, O]
# Keys that say how the weights were made, or how a program computes with them.
_NEUTRAL = """
quant_method group_size sym desc_act lm_head damp_percent damp_auto_increment true_sequential static_groups dataset tokenizer
model_name_or_path model_file_base_name model_seqlen block_name_to_quantize module_name_preceding_first_block batch_size
pad_token_id use_cuda_fp16 use_exllama exllama_config max_input_length cache_block_outputs modules_in_block_to_quantize
backend meta pack_dtype act_group_aware mse quantizer version modules_to_not_convert zero_point do_fuse fuse_max_seq_len
modules_to_fuse
"""
_GPTQ = frozenset(["bits", "checkpoint_format", *_NEUTRAL.split()])
_AWQ = frozenset(["bits", "version", *_NEUTRAL.split()])


def gptq(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder in GPTQ's format."""
    bits, form = about.get("bits"), about.get("checkpoint_format") or "gptq"
    if type(bits) is not int or bits not in (2, 4, 8):
        raise UserError(f"quantization_config.bits is {limits.shortened(bits)}, must be 2, 4 or 8")
    if form not in ("gptq", "gptq_v2"):
        raise UserError(
            f"quantization_config.checkpoint_format is {limits.shortened(form)}, must be gptq or gptq_v2: save the model "
            "in one of these"
        )
    check_keys(about, _GPTQ)
    inputs_first = hf_config.text_part(folder.config).get("model_type") in _INPUTS_FIRST
    shapes = folder.shapes()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for base in bases(shapes, ".qweight"):
        words_I, outputs = matrix(shapes, f"{base}.qweight")
        inputs, groups = words_I * (_WORD // bits), matrix(shapes, f"{base}.scales")[0]
        check(folder, shapes, f"{base}.qweight", shapes[f"{base}.qweight"], _WORDS)
        check(folder, shapes, f"{base}.scales", (groups, outputs), FLOATS)
        check(folder, shapes, f"{base}.qzeros", (groups, outputs * bits // _WORD), _WORDS)
        _check_groups(about, base, inputs, groups)
        indexed = f"{base}.g_idx" in shapes
        if indexed:
            check(folder, shapes, f"{base}.g_idx", (inputs,), ("I32", "I64"))
            group_I = folder.stored(f"{base}.g_idx")
            if inputs and not 0 <= group_I.min() <= group_I.max() < groups:
                raise UserError(f"{base}.g_idx must be from 0 to {groups - 1}: copy the folder again")
        elif not groups or inputs % groups:
            raise UserError(f"{base}.scales has {groups} groups, must divide {inputs} inputs: copy the folder again")
        parts |= {f"{base}.{part}" for part in ("qweight", "scales", "qzeros", *(["g_idx"] if indexed else []))}

        def values(
            base: str = base, shape: Shape = (outputs, inputs), groups: int = groups, indexed: bool = indexed
        ) -> np.ndarray:
            zeros = folder.stored(f"{base}.qzeros").view(np.uint32)
            if form == "gptq":  # it stores zeros minus 1, subtracted from whole words
                zeros = zeros + np.uint32(sum(1 << position for position in range(0, _WORD, bits)))
            blocks = (
                Blocks.of(shape, 1, shape[1] // groups)
                if not indexed
                else Blocks(np.arange(shape[0]), folder.stored(f"{base}.g_idx"))
            )
            codes_OI = unpacked(np.ascontiguousarray(folder.stored(f"{base}.qweight").T).view(np.uint32), bits)
            scales_OG, zeros_OG = folder.stored(f"{base}.scales").T, unpacked(zeros, bits).T
            weight_OI = scaled(codes_OI, scales_OG, blocks, scales_OG.dtype.name, zeros_OG)
            return np.ascontiguousarray(weight_OI.T) if inputs_first else weight_OI

        shape = (inputs, outputs) if inputs_first else (outputs, inputs)
        weights[f"{base}.weight"] = Weight(shape, folder.dtype(f"{base}.scales"), values)
    return Quantized(weights, parts)


def awq(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder in AWQ's format."""
    bits, version = about.get("bits", 4), str(about.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise UserError(
            f"quantization_config has bits = {limits.shortened(bits)} and version = {limits.shortened(version)}, awq needs "
            "4 bits and version gemm: convert the model to these"
        )
    check_keys(about, _AWQ)
    shapes = folder.shapes()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for base in bases(shapes, ".qweight"):
        inputs, words_O = matrix(shapes, f"{base}.qweight")
        outputs, groups = words_O * 8, matrix(shapes, f"{base}.scales")[0]
        check(folder, shapes, f"{base}.qweight", shapes[f"{base}.qweight"], _WORDS)
        check(folder, shapes, f"{base}.scales", (groups, outputs), FLOATS)
        check(folder, shapes, f"{base}.qzeros", (groups, words_O), _WORDS)
        if not groups or inputs % groups:
            raise UserError(f"{base}.scales has {groups} groups, must divide {inputs} inputs: copy the folder again")
        _check_groups(about, base, inputs, groups)
        parts |= {f"{base}.{part}" for part in ("qweight", "scales", "qzeros")}

        def values(base: str = base, shape: Shape = (inputs, outputs), groups: int = groups) -> np.ndarray:
            codes_IO, zeros_GO = (
                unpacked(folder.stored(f"{base}.{part}").view(np.uint32), 4, AWQ_ORDER)
                for part in ("qweight", "qzeros")
            )
            scales_GO = folder.stored(f"{base}.scales")
            blocks = Blocks.of(shape, shape[0] // groups, 1)
            return np.ascontiguousarray(scaled(codes_IO, scales_GO, blocks, scales_GO.dtype.name, zeros_GO).T)

        weights[f"{base}.weight"] = Weight((outputs, inputs), folder.dtype(f"{base}.scales"), values)
    for name in shapes:  # divisors of activations in some families: already folded into the weights if they are 1
        if name.endswith(".act.scales"):
            parts.add(name)
            if not (folder.read(name) == 1).all():
                raise UserError(f"{name} is not 1: AWQ with scaled activations is not supported")
    return Quantized(weights, parts)


def _check_groups(about: Mapping[str, object], base: str, inputs: int, groups: int) -> None:
    """Raises UserError if the groups of a weight are not of the stated size."""
    size = whole(about, "group_size")
    if size is not None and groups != (1 if size == -1 else -(-inputs // size) if size > 0 else -1):
        raise UserError(
            f"{base}.scales has {groups} groups, and quantization_config.group_size is {size} with {inputs} inputs: the "
            "config.json is another's"
        )


def unpacked(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Codes in words along the last axis, the first one in the lowest bits; uint8."""
    count = _WORD // bits
    codes = np.empty((*words.shape, count), np.uint8)
    for position in range(count):
        codes[..., order[position] if order else position] = words >> np.uint32(bits * position) & np.uint32(
            (1 << bits) - 1
        )
    return codes.reshape(*words.shape[:-1], -1)
