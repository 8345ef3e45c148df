"""MaxText's settings of a run: the file config.yml that save_config_to_gcs writes beside its checkpoints.

The arrays do not determine the model: with the same names and shapes, model_name and rope_type decide how heads are rotated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TypeAlias

import yaml

from capibara.core import limits
from capibara.core.types import UserError

Setting: TypeAlias = "None | bool | int | float | str | list[Setting]"

FILE = "config.yml"
_UP = 4  # folders above the arrays: items, the step, checkpoints, the run
_NEEDED = ("model_name", "decoder_block")
_LARGEST = 1e12  # no size, frequency or factor of a model is as large
_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float"))
# A number to MaxText's OmegaConf, a string to PyYAML: 1e-6.
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")
_OBJECT = "tag:yaml.org,2002:python/object/apply:"  # an enumeration, with its value as the only argument

# What changes the model's results and is not read here: these values alone are supported.
_DEFAULTS: dict[str, Setting] = {
    "base_config": "base.yml", "attention_type": "global", "rope_min_timescale": 1, "partial_rotary_factor": 1,
    "use_mrope": False, "use_untrainable_positional_embedding": False, "trainable_position_size": -1, "moba": False,
    "share_kv_projections": False, "attention_sink": False, "qk_norm_with_scale": True, "mtp_num_layers": 0, "shared_experts": 0,
    "routed_bias": False, "routed_score_func": "", "first_num_dense_layers": 0, "mhc_expansion_rate": 1,
    "local_rope_proportion": 1, "use_random_routing": False, "weight_sparsity_n": None,
}  # fmt: skip


def read(folder: str, path: str) -> dict[str, Setting]:
    """The settings of the run whose arrays lie in a folder, for the user's path of it.

    Nothing in the file is executed: tags of Python's objects are taken for the values inside them.

    Raises:
      UserError: no config.yml lies there or in the folders above, or it does not describe a model.
    """
    paths, parent = [], os.path.abspath(folder)
    for _ in range(_UP):
        paths.append(os.path.join(parent, FILE))
        parent = os.path.dirname(parent)
    existing = [path for path in paths if os.path.isfile(path)]
    if not existing:
        raise UserError(
            f"{path} is a checkpoint of MaxText, which does not say how its arrays are meant: write the settings of its run to "
            f"{os.path.join(path, FILE)}, as save_config_to_gcs=true does: {', '.join(_NEEDED)} and what differs from base.yml"
        )
    text = limits.read_text(existing[0])
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = _mapping(root)
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        cause = limits.cause(error)
        raise UserError(f"{existing[0]} is no file of settings that MaxText reads ({cause}): copy it again") from None
    for name in _NEEDED:
        if not isinstance(settings.get(name), str):
            raise UserError(f"{existing[0]} has no {name}: it decides how MaxText computes, add it")
    _check(settings, existing[0])
    return settings


def _mapping(root: yaml.Node | None) -> dict[str, Setting]:
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it is no mapping")
    result: dict[str, Setting] = {}
    for key, node in root.value:
        name = str(key.value)
        if name == "<<" or name in result:
            raise ValueError(f"line {key.start_mark.line + 1} merges mappings or sets {limits.shortened(name)} again")
        result[name] = _value(node)
    return result


def number(settings: Mapping[str, Setting], name: str, default: float) -> float:
    """A setting that is a positive number."""
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        raise UserError(f"config.yml has {name} = {limits.shortened(value)}, must be a positive number")
    return value


def whole(settings: Mapping[str, Setting], name: str, default: int) -> int:
    """A setting that is a whole number of at least 1."""
    if (value := number(settings, name, default)) != int(value):
        raise UserError(f"config.yml has {name} = {value}, must be a whole number")
    return int(value)


def flag(settings: Mapping[str, Setting], name: str, default: bool) -> bool:
    """A setting that is true or false."""
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise UserError(f"config.yml has {name} = {limits.shortened(value)}, must be true or false")
    return value


def _value(node: yaml.Node) -> Setting:
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and _FLOAT.fullmatch(node.value):
            return float(node.value)
        return yaml.constructor.SafeConstructor().construct_object(node) if node.tag in _PLAIN else str(node.value)
    if isinstance(node, yaml.SequenceNode):
        values = [_value(item) for item in node.value if isinstance(item, yaml.ScalarNode)]
        return values[0] if node.tag.startswith(_OBJECT) and len(values) == 1 else values
    return None  # no setting of the model is a mapping


def _check(settings: Mapping[str, Setting], path: str) -> None:
    for name, default in _DEFAULTS.items():
        if (value := settings.get(name)) not in (None, default):
            raise UserError(f"{path} has {name} = {limits.shortened(value)}, only {default!r} can be read")
