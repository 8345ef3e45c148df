"""AutoRound's own format, and what its GPTQ and AWQ folders say besides: codes of other formats, and schemes of modules.

How zeros are stored depends on packing_format alone: minus 1 in "auto_round:auto_gptq", as they are in "auto_round" and
"auto_round:gptqmodel"; without one they are minus 1. Checked against auto-round 0.16.1 and transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.quantize.formats import compressed_tensors, fp8, words
from capibara.interop.quantize.formats.words import WordScheme
from capibara.interop.quantize.values import patterns
from capibara.interop.quantize.values.weights import Folder, Quantized, bases, check_keys

_LESS_ONE = ("auto_round:auto_gptq", "auto_round:gptq")
_AS_THEY_ARE = ("auto_round", "auto_round:gptqmodel")
_COLUMNS = ("auto_round:auto_awq", "auto_round:awq")
_FP8 = ("auto_round:fp8", "auto_round:fp8_static")
_SMALL_FLOATS = "auto_round:llm_compressor"
_PACKINGS = (*_LESS_ONE, *_AS_THEY_ARE, *_COLUMNS, *_FP8, _SMALL_FLOATS)
# Formats of compressed-tensors by data_type and bits.
_FORMS = {
    ("mx_fp", 4): "mxfp4-pack-quantized",
    ("mx_fp", 8): "mxfp8-quantized",
    ("nv_fp", 4): "nvfp4-pack-quantized",
}
_SCHEME_KEYS = """
bits group_size sym data_type act_bits act_data_type act_group_size act_sym act_dynamic super_bits super_group_size
"""
_KEYS = frozenset(
    f"""
{_SCHEME_KEYS}
quant_method packing_format autoround_version block_name_to_quantize to_quant_block_names quant_block_list extra_config
modules_to_not_convert amp batch_size enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input iters lr minmax_lr
gradient_accumulate_steps low_gpu_mem_usage nsamples scale_dtype seqlen supported_types provider backend dataset
activation_scheme fmt weight_block_size static_attention_granularity static_kv_granularity
""".split()
)


def auto_round(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder of AutoRound."""
    check_keys(about, _KEYS)
    packing = about.get("packing_format", _LESS_ONE[0])
    schemes = _Schemes(about, {name.rpartition(".")[0] for name in folder.shapes()})
    if packing in _COLUMNS:
        return words.in_columns(folder, schemes.of_words)
    if packing in (*_LESS_ONE, *_AS_THEY_ARE):
        return words.in_rows(folder, schemes.of_words, less_one=packing in _LESS_ONE)
    if packing in _FP8:
        stated = {key: about.get(key) for key in ("activation_scheme", "fmt", "weight_block_size")}
        return fp8.fp8(folder, {"quant_method": "fp8", **stated})
    if packing == _SMALL_FLOATS:
        return _small_floats(folder, schemes)
    raise UserError(
        f"quantization_config.packing_format is {limits.shortened(packing)}, must be one of {', '.join(_PACKINGS)}: use "
        "another folder"
    )


class _Schemes:
    """The schemes of modules: those of extra_config, and else that of all.

    A name in extra_config that no module has is a pattern, which is searched in names.

    Args:
      about: the quantization_config.
      modules: the names of the folder's modules.

    Raises:
      UserError: extra_config is malformed.
    """

    def __init__(self, about: Mapping[str, object], modules: Collection[str]):
        extra = about.get("extra_config") or {}
        if not isinstance(extra, dict) or not all(isinstance(scheme, dict) for scheme in extra.values()):
            raise UserError(
                f"quantization_config.extra_config is {limits.shortened(extra)}, must be modules and their schemes"
            )
        for module, scheme in extra.items():
            check_keys(scheme, frozenset(_SCHEME_KEYS.split()), f"extra_config[{limits.shortened(module)}]")
        self._about, self._extra = about, extra
        texts = [text for text, scheme in extra.items() if scheme and text not in modules]
        self._patterns = patterns.compiled(texts, "quantization_config.extra_config")

    def of(self, module: str) -> dict[str, object]:
        """The scheme of a module."""
        matching = (text for text, pattern in self._patterns.items() if pattern.search(module))
        text = module if module in self._extra else next(matching, None)
        return {**self._about, **({} if text is None else self._extra[text])}

    def of_words(self, module: str) -> WordScheme:
        scheme = self.of(module)
        size = scheme.get("group_size")
        if (kind := scheme.get("data_type", "int")) not in (None, "int"):
            raise UserError(f"quantization_config.data_type is {limits.shortened(kind)} for {module}, must be int")
        if size is not None and type(size) is not int:
            raise UserError(
                f"quantization_config.group_size is {limits.shortened(size)} for {module}, must be a number"
            )
        return WordScheme(scheme.get("bits"), size)


def _small_floats(folder: Folder, schemes: _Schemes) -> Quantized:
    """Floats of 4 and 8 bits, in the tensors of compressed-tensors."""
    groups: dict[str, dict[str, object]] = {}
    modules: dict[str, list[str]] = {}
    for module in bases(folder.shapes(), ".weight_scale"):
        scheme = schemes.of(module)
        kind, bits = scheme.get("data_type"), scheme.get("bits")
        form = _FORMS.get((kind, bits)) if isinstance(kind, str) and isinstance(bits, int) else None
        if form is None:
            raise UserError(
                f"quantization_config has data_type = {limits.shortened(kind)} and bits = {limits.shortened(bits)} for "
                f"{module}, must be {' or '.join(f'{name} and {width}' for name, width in _FORMS)}"
            )
        strategy = "tensor_group" if form.startswith("nvfp4") else "group"
        weights = {"type": "float", "num_bits": bits, "strategy": strategy, "group_size": scheme.get("group_size")}
        key = repr((form, weights))
        groups.setdefault(key, {"weights": weights, "format": form})
        modules.setdefault(key, []).append(module)
    stated = {key: {**group, "targets": modules[key]} for key, group in groups.items()}
    about = {"quant_method": "compressed-tensors", "config_groups": stated or {"none": {"weights": None}}}
    return compressed_tensors.compressed_tensors(folder, about)
