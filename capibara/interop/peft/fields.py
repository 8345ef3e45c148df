"""The fields of PEFT's LoraConfig (0.21): what each of them does to an adapter that is loaded, and their types.

A field is computed as PEFT computes it when it loads the folder on the base model; or ignored, as PEFT ignores it then;
or refused unless it has a value without effect. So is every field that is not listed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError

CONFIG = "adapter_config.json"
_LARGEST, _PATTERNS, _CONFIG_VALUES = 2**31, 4096, 200_000
_FIX = "merge it with PEFT first"


class Use(enum.StrEnum):
    """What is done with a field."""

    COMPUTED = "computed"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a field can have.

    Attributes:
      must: "must be ..." in words.
      fits: whether a value is one of them.
    """

    must: str
    fits: Callable[[Any], bool]

    def or_null(self) -> Kind:
        return Kind(f"{self.must} or null", lambda value: value is None or self.fits(value))


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST and math.isfinite(value)


def _is_list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) < 100_000 and all(map(of, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_regex(value: object) -> bool:
    with contextlib.suppress(re.error, limits.Refused, RecursionError, OverflowError):
        if isinstance(value, str):
            limits.check_pattern(value, most=4096)
            re.compile(value)
            return True
    return False


def _is_pattern(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def fits(values: object) -> bool:
        if not isinstance(values, dict) or len(values) > _PATTERNS or not all(map(of, values.values())):
            return False
        return all(len(key) <= 512 and _is_regex(key) for key in values)

    return fits


def _is_names(value: object) -> bool:
    return _is_regex(value) if isinstance(value, str) else _is_list(_is_text)(value)


def _is_tokens(value: object) -> bool:
    ids = _is_list(lambda item: type(item) is int and 0 <= item < _LARGEST)
    return ids(value) or (isinstance(value, dict) and all(map(ids, value.values())))


def _is_ranges(value: Any) -> bool:
    def is_range(value: object) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(_is_int, value)) and 0 <= value[0] < value[1]

    return _is_list(is_range)(value) and len(value) <= _PATTERNS


_INITS = ("gaussian", "eva", "olora", "pissa", "orthogonal", "mica")
FLAG = Kind("true or false", lambda value: value is None or isinstance(value, bool))
COUNT = Kind("an integer of at least 1", lambda value: _is_int(value) and value > 0)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
SHARE = Kind("a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1)
TEXT = Kind("a text", _is_text).or_null()
NAMES = Kind("a list of names or a regular expression", _is_names)
PATTERNS = Kind(
    "a regular expression or a list of them",
    lambda value: _is_regex(value) if isinstance(value, str) else _is_list(_is_regex)(value),
).or_null()
LIST = Kind("a list of names", _is_list(_is_text)).or_null()
OBJECT = Kind("an object", lambda value: isinstance(value, dict)).or_null()
RANKS = Kind(
    "an object of regular expressions with ranks", _is_pattern(lambda x: type(x) is int and 0 < x < _LARGEST)
).or_null()
ALPHAS = Kind("an object of regular expressions with numbers", _is_pattern(lambda x: _is_number(x) and x > 0)).or_null()
TOKENS = Kind("a list of token ids, or an object of modules with such lists", _is_tokens).or_null()
LAYERS = Kind("a layer or a list of layers", lambda value: _is_int(value) or _is_list(_is_int)(value)).or_null()
RANGES = Kind("a list of ranges of layers [first, end]", _is_ranges).or_null()
INIT = Kind(
    f"true, false or one of {', '.join(_INITS)}: the others leave weights of the base changed by what the folder does "
    "not hold",
    lambda value: value is None or isinstance(value, bool) or value in _INITS,
)


@dataclasses.dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
      use: what is done with it.
      kind: its values; of a refused field those without effect.
      default: PEFT's, where the file does not have the field.
      about: a line for the documentation.
    """

    use: Use
    kind: Kind
    default: Any
    about: str


def _one_of(*values: str) -> Kind:
    return Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def _computed(kind: Kind, default: object, about: str) -> Field:
    return Field(Use.COMPUTED, kind, default, about)


def _ignored(kind: Kind, default: object, about: str) -> Field:
    return Field(Use.IGNORED, kind, default, about)


def _refused(neutral: tuple[object, ...], about: str) -> Field:
    kind = Kind("without effect", lambda value: any(type(value) is type(item) and value == item for item in neutral))
    return Field(Use.REFUSED, kind, neutral[0], about)


_TASKS = Kind(
    "CAUSAL_LM, SEQ_2_SEQ_LM or FEATURE_EXTRACTION (others have a head of their own)",
    lambda value: (
        value in ("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION") if isinstance(value, str) else value is None
    ),
)
_TRAINING = "of training"

FIELDS: dict[str, Field] = {
    "peft_type": _computed(_one_of("LORA"), None, "LORA"),
    "task_type": _computed(_TASKS, None, "of a language model or an encoder; heads of classifiers are refused"),
    "r": _computed(COUNT, 8, "must be the rank of the matrices"),
    "lora_alpha": _computed(POSITIVE, 8, "any number above 0"),
    "rank_pattern": _computed(RANKS, {}, "regular expressions of module names; must be the ranks of the matrices"),
    "alpha_pattern": _computed(ALPHAS, {}, "regular expressions of module names"),
    "use_rslora": _computed(FLAG, False, "scale alpha / sqrt(r)"),
    "use_dora": _computed(
        FLAG,
        False,
        "magnitudes, of the embedding and the head too; must be true where the file has them, and then it has all",
    ),
    "lora_bias": _computed(
        FLAG,
        False,
        "added to the module's bias; refused where it has none, or where the file has one and this is false",
    ),
    "bias": _computed(_one_of("none", "all", "lora_only"), "none", "trained biases"),
    "target_modules": _computed(
        NAMES.or_null(), None, "must name the modules of the file; the embedding and the head too"
    ),
    "exclude_modules": _computed(NAMES.or_null(), None, "must not name a module of the file"),
    "layers_to_transform": _computed(LAYERS, None, "must be the layers of the file"),
    "layers_pattern": _computed(PATTERNS, None, "where the layer's number is in a name"),
    "target_parameters": _computed(LIST, None, "weights, and experts of transformers 5"),
    "modules_to_save": _computed(LIST, None, "trained in full, the embedding and a tied head too"),
    "trainable_token_indices": _computed(TOKENS, None, "rows of the embedding and of the head"),
    "ensure_weight_tying": _computed(FLAG, False, "whether what is trained of the embedding also changes a tied head"),
    "init_lora_weights": _computed(
        INIT,
        True,
        "true, false, gaussian, eva, orthogonal, mica: no effect; pissa, olora: what PEFT takes from the base is taken; "
        "pissa_niter_N, corda, loftq, lora_ga: refused",
    ),
    "layer_replication": _computed(RANGES, None, "by `convert`, of decoders whose layers are alike"),
    "use_bdlora": _computed(OBJECT, None, "block-diagonal matrices are filled up with zeros"),
    "kasa_config": _computed(OBJECT, None, "KaSA: the smallest singular values are taken from the base"),
    "monteclora_config": _ignored(OBJECT, None, f"noise {_TRAINING}"),
    "velora_config": _ignored(OBJECT, None, f"compressed activations {_TRAINING}"),
    "fan_in_fan_out": _ignored(FLAG, False, "PEFT corrects it by the module's kind"),
    "lora_dropout": _ignored(SHARE, 0.0, f"{_TRAINING}; a run that continues the adapter has it"),
    "inference_mode": _ignored(FLAG, False, _TRAINING),
    "runtime_config": _ignored(OBJECT, {"ephemeral_gpu_offload": False}, "where PEFT computes"),
    "eva_config": _ignored(OBJECT, None, "how the matrices began"),
    "corda_config": _ignored(OBJECT, None, "how the matrices began (with corda, which is refused)"),
    "loftq_config": _ignored(OBJECT, {}, "how the matrices began (with loftq, which is refused)"),
    "lora_ga_config": _ignored(OBJECT, None, "how the matrices began (with lora_ga, which is refused)"),
    "qalora_group_size": _ignored(COUNT, 16, "of use_qalora, which is refused"),
    "megatron_core": _ignored(TEXT, "megatron.core", "of megatron_config, which is refused"),
    "base_model_name_or_path": _ignored(TEXT, None, "the base; `--base` is another"),
    "revision": _ignored(TEXT, None, "of the base on a hub"),
    "auto_mapping": _ignored(OBJECT, None, "the base's class in Python"),
    "peft_version": _ignored(TEXT, None, "what wrote the folder"),
    "alora_invocation_tokens": _refused((None, []), "aLoRA acts only after these tokens"),
    "arrow_config": _refused((None,), "Arrow chooses among several adapters for each token"),
    "use_qalora": _refused((False, None), "QALoRA averages the inputs of a GPTQ base"),
    "megatron_config": _refused((None, {}), "modules of Megatron"),
}
# The fields of those that are objects. Values of ignored ones are not looked at.
PARTS: dict[str, tuple[str, ...]] = {
    "use_bdlora": ("target_modules_bd_a", "target_modules_bd_b", "nblocks", "match_strict"),
    "kasa_config": ("beta", "gamma"),
    "monteclora_config": (
        "num_samples", "use_entropy", "dirichlet_prior", "sample_scaler", "kl_loss_weight", "buffer_size"
    ),
    "velora_config": ("num_groups", "scale", "init_type"),
    "runtime_config": ("ephemeral_gpu_offload",),
    "eva_config": ("rho", "tau", "use_label_mask", "label_mask_value", "whiten", "adjust_scaling_factors"),
    "corda_config": (
        "cache_file", "covariance_file", "corda_method", "verbose", "use_float16_for_covariance", "prune_temporary_fields"
    ),
    "loftq_config": ("loftq_bits", "loftq_iter"),
    "lora_ga_config": ("direction", "scale", "stable_gamma"),
}  # fmt: skip
_BLOCKS = {"target_modules_bd_a": LIST, "target_modules_bd_b": LIST, "nblocks": COUNT, "match_strict": FLAG}
_VARIANTS = ("use_dora", "use_bdlora", "kasa_config", "monteclora_config", "velora_config")


def read(folder: str) -> dict[str, Any]:
    """The fields of adapter_config.json, each with PEFT's default where the file does not have it.

    Raises:
      UserError: it cannot be read, or has a field whose effect is not known here.
    """
    path = os.path.join(folder, CONFIG)
    try:
        stored = limits.read_json(path, limits.SMALL_BYTES, values=_CONFIG_VALUES)
    except FileNotFoundError as error:
        raise UserError(f"{path} cannot be read (it does not exist): name a folder that PEFT has written") from error
    for name, value in stored.items():
        if name not in FIELDS:
            _check_neutral(path, name, value)
            continue
        _check(path, name, value, FIELDS[name])
    config = {name: stored.get(name, field.default) for name, field in FIELDS.items()}
    if config["peft_type"] is None:
        raise UserError(f"{path} has no peft_type, must be LORA: name a folder that PEFT has written")
    _check_together(path, config)
    return config


def _check(path: str, name: str, value: object, field: Field) -> None:
    if not field.kind.fits(value):
        fix = _FIX if field.use is Use.REFUSED else "name a folder that PEFT wrote"
        fault = f"which is not supported ({field.about})" if field.use is Use.REFUSED else f"must be {field.kind.must}"
        raise UserError(f"{path} has {_shown(name, value)}, {fault}: {fix}")
    for part, inner in (value.items() if isinstance(value, dict) else ()) if name in PARTS else ():
        if part not in PARTS[name]:
            _check_neutral(path, f"{name}.{part}", inner)
        elif name == "use_bdlora" and not _BLOCKS[part].fits(inner):
            raise UserError(
                f"{path} has {_shown(f'{name}.{part}', inner)}, must be {_BLOCKS[part].must}: name a folder that PEFT wrote"
            )


def _check_neutral(path: str, name: str, value: object) -> None:
    """Raises UserError if a field that PEFT 0.21 does not have has a value that may have an effect."""
    if value not in (None, False, 0, "", [], {}):
        raise UserError(
            f"{path} has {_shown(name, value)}, which PEFT 0.21's LoraConfig does not have, so its effect is not known here: "
            f"{_FIX}, or remove it if it has none"
        )


def _check_together(path: str, config: Mapping[str, object]) -> None:
    """Raises UserError for fields that PEFT refuses together, or whose order in PEFT is not followed here."""
    names = [name for name in _VARIANTS if config[name] or isinstance(config[name], dict)]
    names += ["init_lora_weights"] if config["init_lora_weights"] == "mica" else []
    changing = change_of_base(config)
    if len(names) > 1 or (config["kasa_config"] is not None and changing == "init_lora_weights"):
        names = names if len(names) > 1 else ["kasa_config", changing]
        raise UserError(
            f"{path} has {' and '.join(names)}, which PEFT does not have together: name a folder that PEFT wrote"
        )
    for other in ("target_parameters", "layer_replication") if changing else ():
        if config[other]:
            raise UserError(
                f"{path} has {_shown(changing, config[changing])} and {other}, which is not supported: {_FIX}"
            )
    if config["lora_bias"] and (config["use_dora"] or config["use_bdlora"] is not None):
        raise UserError(f"{path} has lora_bias and {names[0]}, which is not supported: {_FIX}")
    if config["target_modules"] is None and not config["target_parameters"]:
        raise UserError(
            f"{path} has target_modules = None, must name the adapter's modules (PEFT has other defaults for each "
            "architecture): add them"
        )


def _shown(name: str, value: object) -> str:
    return f"{limits.shortened(name)[1:-1]} = {limits.shortened(value)}"


def change_of_base(config: Mapping[str, object]) -> str:
    """The field by which PEFT takes a part of the base away when it loads the adapter; "": none."""
    if config["init_lora_weights"] in ("pissa", "olora"):
        return "init_lora_weights"
    return "kasa_config" if config["kasa_config"] is not None else ""


def rank_of(name: str, config: Mapping[str, Any]) -> int:
    """The rank of a module, by its name in PEFT's model."""
    return int(_matched(_key(name, config), config["rank_pattern"], config["r"]))


def alpha_of(name: str, config: Mapping[str, Any]) -> float:
    """The alpha of a module, by its name in PEFT's model."""
    return float(_matched(_key(name, config), config["alpha_pattern"], config["lora_alpha"]))


def scale_of(name: str, config: Mapping[str, object]) -> float:
    """The factor of a module's product, by its name in PEFT's model."""
    rank = rank_of(name, config)
    return alpha_of(name, config) / (rank**0.5 if config["use_rslora"] else rank)


def _key(name: str, config: Mapping[str, Any]) -> str:
    """The name that patterns see: a parameter's for one of target_parameters."""
    parameter = f"{name}.weight"
    return parameter if _names(config["target_parameters"] or [], parameter) else name


def _matched(name: str, patterns: Mapping[str, float] | None, otherwise: float) -> float:
    result = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(result, otherwise)


def saves(module: str, config: Mapping[str, Any]) -> bool:
    """Whether `modules_to_save` has a module, by its name in PEFT's model."""
    return any(module.endswith(name) for name in config["modules_to_save"] or ())


def targets(module: str, config: Mapping[str, Any]) -> str:
    """The field by which PEFT gives a module no adapter; "": it has one.

    Args:
      module: its name in PEFT's model.
      config: the result of `read`.
    """
    if _names(config["exclude_modules"], module):
        return "exclude_modules"
    if any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", module) for name in config["modules_to_save"] or ()):
        return "modules_to_save"
    wanted = config["target_modules"]
    if wanted == "all-linear":
        return ""
    if not _names(wanted, module):
        return "target_modules"
    layers = config["layers_to_transform"]
    if isinstance(wanted, str) or module in wanted or layers is None or layers == []:
        return ""
    number = _layer(module, config["layers_pattern"])
    return "" if number in (layers if isinstance(layers, list) else [layers]) else "layers_to_transform"


def _names(wanted: str | list[str] | None, module: str) -> bool:
    if isinstance(wanted, str):
        return bool(wanted) and re.fullmatch(wanted, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in wanted or ())


def _layer(module: str, patterns: str | list[str] | None) -> int | None:
    """The layer of a module: the first number in its name, or the one after a pattern."""
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return None if match is None else int(match[1])
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        match = re.match(rf"(?:^|.*?\.)(?:{pattern})\.(?P<layer>\d+)\.", module)
        if match is not None:
            return int(match["layer"])
    return None
