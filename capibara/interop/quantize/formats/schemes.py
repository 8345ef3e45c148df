"""The schemes of compressed-tensors: which modules a quantization_config quantizes, and how."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.quantize.values import patterns
from capibara.interop.quantize.values.weights import check_keys, names

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
_MIXED = "mixed-precision"
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
# Of scales stored as exponents, or as FP8 beside a scale of the whole weight: (type, bits, strategy, group size).
_FIXED = {
    "nvfp4-pack-quantized": ("float", 4, "tensor_group", 16),
    "mxfp4-pack-quantized": ("float", 4, "group", 32),
    "mxfp6-pack-quantized": ("float", 6, "group", 32),
    "mxfp8-quantized": ("float", 8, "group", 32),
}
_KEYS = frozenset(
    """
quant_method config_groups format quantization_status ignore kv_cache_scheme global_compression_ratio version run_compressed
dequantize use_optimized_inference total_num_heads total_num_kv_heads sparsity_config transform_config
""".split()
)
_GROUP_KEYS = frozenset(("targets", "weights", "input_activations", "output_activations", "format"))
_ARGUMENTS = frozenset(
    """
num_bits type symmetric strategy group_size block_structure dynamic actorder scale_dtype zp_dtype observer observer_kwargs
""".split()
)
_REGEX = "re:"
_Patterns = Mapping[str, re.Pattern[str]]  # by their text
_CLASS = "Linear"  # the class of every module that has a quantized weight


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weight of a module is quantized.

    Attributes:
      form: one of FORMATS.
      bits, type: of a code: type is "int" or "float".
      symmetric: whether there are no zero points.
      strategy: what shares a scale: one of "tensor", "channel", "group", "block" and "tensor_group".
      group: inputs of a group; 0: there are none.
      block: outputs and inputs of a block; (0, 0): there are none.
    """

    form: str
    bits: int
    type: str
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Schemes:
    """The schemes of a quantization_config.

    Attributes:
      of_target: target -> scheme; None: the weights are as they are.
      ignored: targets of modules that are not quantized, as keys.
      patterns: those of the targets and of the ignored, in compressed-tensors' order.
      unused: what it says of activations and caches.
    """

    of_target: Mapping[str, Scheme | None]
    ignored: Mapping[str, None]
    patterns: tuple[_Patterns, _Patterns]
    unused: tuple[str, ...]

    def of(self, module: str) -> Scheme:
        """The scheme of a module that has quantized tensors.

        Raises:
          UserError: no target matches it, or it is ignored.
        """
        if next(_matching(module, self.ignored, self.patterns[1]), None) is not None:
            raise UserError(f"{module} has scales, and quantization_config.ignore names it: copy the folder again")
        for target in _matching(module, self.of_target, self.patterns[0]):
            if (scheme := self.of_target[target]) is not None:
                return scheme
        raise UserError(f"{module} has scales, and no target of quantization_config.config_groups names it")


def read(about: Mapping[str, object]) -> Schemes:
    """The schemes of a quantization_config.

    Raises:
      UserError: it says something that is not known or not supported.
    """
    check_keys(about, _KEYS)
    _check_whole(about)
    groups = about.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        shown = limits.shortened(groups)
        raise UserError(
            f"quantization_config.config_groups is {shown}, must be the groups of modules and their schemes"
        )
    schemes: dict[str, Scheme | None] = {}
    unused = ["a key/value cache in quantized numbers"] if about.get("kv_cache_scheme") else []
    for name, group in groups.items():
        where = f"quantization_config.config_groups.{str(name)[:80]}"
        if not isinstance(group, dict):
            raise UserError(f"{where} is {limits.shortened(group)}, must be targets and their scheme")
        check_keys(group, _GROUP_KEYS, where)
        scheme = _scheme(group, about.get("format"), where)
        schemes |= dict.fromkeys(names(group, "targets"), scheme)
        unused += [f"{where}.{key}" for key in ("input_activations", "output_activations") if group.get(key)]
    ignored = dict.fromkeys(names(about, "ignore"))
    return Schemes(schemes, ignored, (_compiled(schemes), _compiled(ignored)), tuple(unused))


def _compiled(targets: Iterable[str]) -> _Patterns:
    return patterns.compiled(sorted(target.removeprefix(_REGEX) for target in targets if target.startswith(_REGEX)))


def _check_whole(about: Mapping[str, object]) -> None:
    """Raises UserError for what changes weights in ways that are not computed here."""
    sparsity, transforms = about.get("sparsity_config"), about.get("transform_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise UserError(
            f"quantization_config.sparsity_config is {limits.shortened(sparsity)}: sparse weights are not supported, use "
            "the folder before"
        )
    if transforms and not (isinstance(transforms, dict) and transforms.get("config_groups") == {}):
        raise UserError(
            f"quantization_config.transform_config is {limits.shortened(transforms)}: transformed weights and activations "
            "are not supported, use the folder before"
        )
    status = about.get("quantization_status", "compressed")
    if status != "compressed":
        raise UserError(f"quantization_config.quantization_status is {limits.shortened(status)}, must be compressed")


def _scheme(group: Mapping[str, object], form: object, where: str) -> Scheme | None:
    """The scheme of a group; None: its weights are not quantized."""
    arguments = group.get("weights")
    if arguments is None:
        return None
    where = f"{where}.weights"
    if not isinstance(arguments, dict):
        raise UserError(f"{where} is {limits.shortened(arguments)}, must be how weights are quantized")
    check_keys(arguments, _ARGUMENTS, where)
    if arguments.get("dynamic"):
        raise UserError(f"{where}.dynamic is {limits.shortened(arguments['dynamic'])}, must be false of weights")
    type_, bits = str(arguments.get("type", "int")).lower(), arguments.get("num_bits", 8)
    if type_ not in ("int", "float") or type(bits) is not int or not 1 <= bits <= 8:
        raise UserError(
            f"{where} has type = {limits.shortened(type_)} and num_bits = {limits.shortened(bits)}, must be int or float "
            "with 1 to 8 bits"
        )
    symmetric = arguments.get("symmetric", True)
    if type(symmetric) is not bool or type_ == "float" and not symmetric:
        shown = limits.shortened(symmetric)
        raise UserError(f"{where}.symmetric is {shown}, must be true or, with the type int, false")
    strategy, size, block = _shared(arguments, where)
    form = group.get("format") or form
    form = _inferred(type_, bits, size, group) if form in (None, _MIXED) else form
    if form not in FORMATS:
        raise UserError(f"{where} is stored as {limits.shortened(form)}, must be one of {', '.join(FORMATS)}")
    scheme = Scheme(str(form), bits, type_, symmetric, strategy, size, block)
    _check_form(scheme, where)
    return scheme


def _shared(arguments: Mapping[str, object], where: str) -> tuple[str, int, tuple[int, int]]:
    """What shares a scale: the strategy, the size of a group, and that of a block."""
    strategy, size, block = (arguments.get(key) for key in ("strategy", "group_size", "block_structure"))
    if size is not None and (type(size) is not int or size < -1 or size == 0):
        raise UserError(f"{where}.group_size is {limits.shortened(size)}, must be the inputs that share a scale, or -1")
    assert size is None or isinstance(size, int)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = str(strategy).lower()
    if strategy not in _STRATEGIES:
        raise UserError(f"{where}.strategy is {limits.shortened(strategy)}, must be one of {', '.join(_STRATEGIES)}")
    grouped = strategy in ("group", "tensor_group")
    if grouped != (size is not None and size > 0):
        raise UserError(
            f"{where} has strategy = {strategy} and group_size = {size}: groups need a size, others have none"
        )
    if isinstance(block, str):  # of older folders: "128x128"
        block = [int(part) for part in block.split("x") if part.isdecimal()]
    if (strategy == "block") != (block is not None):
        raise UserError(
            f"{where} has strategy = {strategy} and block_structure = {limits.shortened(block)}: one needs both"
        )
    if block is None:
        return strategy, size if grouped and size else 0, (0, 0)
    if not isinstance(block, list) or len(block) != 2 or not all(type(part) is int and part > 0 for part in block):
        raise UserError(f"{where}.block_structure is {limits.shortened(block)}, must be outputs and inputs: [128, 128]")
    return strategy, 0, (block[0], block[1])


def _inferred(type_: str, bits: int, size: int, group: Mapping[str, object]) -> str:
    """The format of a group that states none, as compressed-tensors 0.20 infers it."""
    exponents = isinstance(weights := group.get("weights"), dict) and str(weights.get("scale_dtype")).endswith("uint8")
    for form, (of_type, of_bits, _, of_size) in _FIXED.items():
        if (type_, bits, size) == (of_type, of_bits, of_size) and (form != "mxfp8-quantized" or exponents):
            return form
    activations = group.get("input_activations")
    if type_ == "float":
        return "naive-quantized" if activations is None else "float-quantized"
    return "pack-quantized" if activations is None else "int-quantized"


def _check_form(scheme: Scheme, where: str) -> None:
    """Raises UserError if a format cannot hold the numbers of a scheme."""
    fixed = _FIXED.get(scheme.form)
    if fixed is not None:
        valid = (scheme.type, scheme.bits, scheme.strategy, scheme.group) == fixed
    elif scheme.form == "pack-quantized":
        valid = scheme.type == "int" and scheme.strategy in ("tensor", "channel", "group")
    else:
        wanted = {"int-quantized": "int", "float-quantized": "float"}.get(scheme.form, scheme.type)
        valid = (
            scheme.type == wanted and (scheme.type == "int" or scheme.bits == 8) and scheme.strategy != "tensor_group"
        )
    if not valid:
        raise UserError(
            f"{where} is {scheme.type} with {scheme.bits} bits, strategy {scheme.strategy} and group_size {scheme.group}, "
            f"which {scheme.form} cannot store"
        )


def _matching(module: str, targets: Mapping[str, object], compiled: _Patterns) -> Iterator[str]:
    """The targets that match a module, in compressed-tensors' order: its name, patterns that match from its start, its class."""
    if module in targets:
        yield module
    for text, pattern in compiled.items():
        if pattern.match(module):
            yield f"{_REGEX}{text}"
    if _CLASS in targets:
        yield _CLASS
