"""GPTQ and AWQ: codes in 32-bit words, as GPTQModel (gptq, gptq_v2) and AutoAWQ (gemm) store them.

Rounding follows their own dequantization: the product of scale and code is rounded once, to the scales' dtype.

Shape letters: O outputs, I inputs of a weight, G groups of inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf import config as hf_config
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.values import patterns, streams
from capibara.interop.quantize.values.weights import (
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
_ROW_BITS = (2, 3, 4, 5, 6, 7, 8)
_INPUTS_FIRST = ("gpt2",)  # families whose weights are [I, O]
# Keys that say how the weights were made, or how a program computes with them.
_NEUTRAL = """
quant_method group_size sym desc_act lm_head damp_percent damp_auto_increment true_sequential static_groups dataset tokenizer
model_name_or_path model_file_base_name model_seqlen block_name_to_quantize module_name_preceding_first_block batch_size
pad_token_id use_cuda_fp16 use_exllama exllama_config max_input_length cache_block_outputs modules_in_block_to_quantize
backend meta pack_dtype act_group_aware mse quantizer version modules_to_not_convert zero_point do_fuse fuse_max_seq_len
modules_to_fuse autoround_version provider data_type to_quant_block_names iters lr enable_quanted_input
enable_minmax_tuning nsamples seqlen low_gpu_mem_usage scale_dtype
"""
_GPTQ = frozenset(["bits", "checkpoint_format", "format", "method", "dynamic", *_NEUTRAL.split()])
# Of a module in `dynamic`: keys that say how its codes are stored, and those that say how they were made.
_DYNAMIC = frozenset(["bits", *_NEUTRAL.split()])
_AWQ = frozenset(["bits", "version", *_NEUTRAL.split()])


def gptq(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder in GPTQ's format."""
    form, older = about.get("format"), about.get("checkpoint_format")
    if form and older and form != older:
        raise UserError(
            f"quantization_config has format = {limits.shortened(form)} and checkpoint_format = {limits.shortened(older)}, "
            "must be equal: they say how zeros are stored"
        )
    form = form or older or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise UserError(
            f"quantization_config.checkpoint_format is {limits.shortened(form)}, must be gptq or gptq_v2: save the model "
            "in one of these"
        )
    if about.get("method") not in (None, "gptq"):
        raise UserError(f"quantization_config.method is {limits.shortened(about['method'])}, must be gptq")
    check_keys(about, _GPTQ)
    return in_rows(folder, _Dynamic(about).of, less_one=form == "gptq")


class _Dynamic:
    """The schemes of modules in GPTQModel's `dynamic`: the first pattern that matches from the start of a name counts.

    Raises:
      UserError: `dynamic` is malformed.
    """

    def __init__(self, about: Mapping[str, object]):
        dynamic = about.get("dynamic") or {}
        if not isinstance(dynamic, dict) or not all(isinstance(changes, dict) for changes in dynamic.values()):
            raise UserError(
                f"quantization_config.dynamic is {limits.shortened(dynamic)}, must be patterns and what differs there"
            )
        for changes in dynamic.values():
            check_keys(changes, _DYNAMIC, "quantization_config.dynamic")
        texts = [text.removeprefix("-:").removeprefix("+:") for text in dynamic]
        compiled = patterns.compiled(texts, "quantization_config.dynamic")
        self._about = about
        self._changes = [
            (compiled[text], not stated.startswith("-:"), changes)
            for text, (stated, changes) in zip(texts, dynamic.items(), strict=True)
        ]

    def of(self, module: str) -> WordScheme:
        """The scheme of a module.

        Raises:
          UserError: it must not be quantized.
        """
        matching = (
            (is_quantized, changes) for pattern, is_quantized, changes in self._changes if pattern.match(module)
        )
        is_quantized, changes = next(matching, (True, {}))
        if not is_quantized:
            raise UserError(f"{module} has codes, and quantization_config.dynamic leaves it out: copy the folder again")
        stated = {**self._about, **changes}
        return WordScheme(stated.get("bits"), whole(stated, "group_size"))


class WordScheme(NamedTuple):
    """How a module's codes are stored: their bits, and the inputs of a group; -1: all, None: not stated."""

    bits: object
    group_size: int | None


def in_rows(folder: Folder, scheme_of: Callable[[str], WordScheme], *, less_one: bool) -> Quantized:
    """Weights whose words have consecutive inputs of an output.

    Args:
      scheme_of: the scheme of a module with words, by its name.
      less_one: whether zeros are stored minus 1.

    Raises:
      UserError: tensors contradict each other or their scheme, or the codes have other bits than are supported.
    """
    inputs_first = hf_config.text_part(folder.config).get("model_type") in _INPUTS_FIRST
    shapes = folder.shapes()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for base in bases(shapes, ".qweight"):
        scheme = scheme_of(base)
        bits = _bits(scheme, base, _ROW_BITS)
        words_I, outputs = matrix(shapes, f"{base}.qweight")
        inputs, groups = words_I * _WORD // bits, matrix(shapes, f"{base}.scales")[0]
        if words_I * _WORD % bits or outputs * bits % _WORD:
            raise UserError(
                f"{base}.qweight has the shape {[words_I, outputs]}, which {bits}-bit codes do not fill: copy it again"
            )
        check(folder, shapes, f"{base}.qweight", shapes[f"{base}.qweight"], _WORDS)
        check(folder, shapes, f"{base}.scales", (groups, outputs), FLOATS)
        check(folder, shapes, f"{base}.qzeros", (groups, outputs * bits // _WORD), _WORDS)
        _check_groups(scheme, base, inputs, groups)
        indexed = f"{base}.g_idx" in shapes
        if indexed:
            check(folder, shapes, f"{base}.g_idx", (inputs,), ("I32", "I64"))
            group_I = folder.stored(f"{base}.g_idx")
            if inputs and not 0 <= group_I.min() <= group_I.max() < groups:
                raise UserError(f"{base}.g_idx must be from 0 to {groups - 1}: copy the folder again")
        elif not groups or inputs % groups:
            raise UserError(f"{base}.scales has {groups} groups, must divide {inputs} inputs: copy the folder again")
        parts |= {f"{base}.{part}" for part in ("qweight", "scales", "qzeros", *(["g_idx"] if indexed else []))}
        shape = (inputs, outputs) if inputs_first else (outputs, inputs)
        values = functools.partial(_row_values, folder, base, bits, (outputs, inputs), indexed, less_one, inputs_first)
        weights[f"{base}.weight"] = Weight(shape, folder.dtype(f"{base}.scales"), values)
    return Quantized(weights, parts)


def _row_values(
    folder: Folder, base: str, bits: int, shape: Shape, indexed: bool, less_one: bool, inputs_first: bool
) -> np.ndarray:
    scales_OG = folder.stored(f"{base}.scales").T
    zeros = folder.stored(f"{base}.qzeros").view(np.uint32)
    if less_one and _WORD % bits == 0:  # subtracted from whole words: a zero of 0 has borrowed from the next one
        zeros = zeros + np.uint32(sum(1 << position for position in range(0, _WORD, bits)))
    zeros_OG = unpacked(zeros, bits).T.astype(np.int16) + np.int16(less_one and _WORD % bits > 0)
    blocks = Blocks.of(shape, 1, shape[1] // scales_OG.shape[1])
    if indexed:
        blocks = blocks._replace(column_I=folder.stored(f"{base}.g_idx"))
    codes_OI = unpacked(np.ascontiguousarray(folder.stored(f"{base}.qweight").T).view(np.uint32), bits)
    weight_OI = scaled(codes_OI, scales_OG, blocks, scales_OG.dtype.name, zeros_OG)
    return np.ascontiguousarray(weight_OI.T) if inputs_first else weight_OI


def awq(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder in AWQ's format."""
    bits, version = about.get("bits", 4), str(about.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise UserError(
            f"quantization_config has bits = {limits.shortened(bits)} and version = {limits.shortened(version)}, awq needs "
            "4 bits and version gemm: convert the model to these"
        )
    check_keys(about, _AWQ)
    scheme = WordScheme(bits, whole(about, "group_size"))
    return in_columns(folder, lambda base: scheme)


def in_columns(folder: Folder, scheme_of: Callable[[str], WordScheme]) -> Quantized:
    """Weights whose words have eight consecutive outputs of an input, in AWQ_ORDER.

    Args:
      scheme_of: the scheme of a module with words, by its name.

    Raises:
      UserError: tensors contradict each other or their scheme, or the codes have other bits than 4.
    """
    shapes = folder.shapes()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for base in bases(shapes, ".qweight"):
        scheme = scheme_of(base)
        _bits(scheme, base, (4,))
        inputs, words_O = matrix(shapes, f"{base}.qweight")
        outputs, groups = words_O * 8, matrix(shapes, f"{base}.scales")[0]
        check(folder, shapes, f"{base}.qweight", shapes[f"{base}.qweight"], _WORDS)
        check(folder, shapes, f"{base}.scales", (groups, outputs), FLOATS)
        check(folder, shapes, f"{base}.qzeros", (groups, words_O), _WORDS)
        if not groups or inputs % groups:
            raise UserError(f"{base}.scales has {groups} groups, must divide {inputs} inputs: copy the folder again")
        _check_groups(scheme, base, inputs, groups)
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


def _bits(scheme: WordScheme, base: str, supported: tuple[int, ...]) -> int:
    bits = scheme.bits
    if type(bits) is not int or bits not in supported:
        listed = " or ".join(map(str, supported))
        raise UserError(f"quantization_config.bits is {limits.shortened(bits)} for {base}, must be {listed}")
    return bits


def _check_groups(scheme: WordScheme, base: str, inputs: int, groups: int) -> None:
    """Raises UserError if the groups of a weight are not of the stated size."""
    size = scheme.group_size
    if size is not None and groups != (1 if size == -1 else -(-inputs // size) if size > 0 else -1):
        raise UserError(
            f"{base}.scales has {groups} groups, and quantization_config.group_size is {size} with {inputs} inputs: the "
            "config.json is another's"
        )


def unpacked(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Codes in words along the last axis, the first one in the lowest bits; uint8.

    Args:
      words: [..., W], which codes must fill.
      bits: of a code; those that do not divide a word lie in two words.
      order: the place of each code of a word among its codes; None: as they come.
    """
    codes = streams.unpacked(words, bits)
    if order is None:
        return codes
    return codes.reshape(*words.shape, len(order))[..., np.argsort(order)].reshape(codes.shape)
