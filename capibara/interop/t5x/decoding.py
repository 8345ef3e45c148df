"""Translates the generation options of T5X's Gin files: `decode_fn`, its two functions' options, and predict_batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

OWNERS = ("beam_search", "temperature_sample", "predict_batch", "predict_batch_with_aux", "DecoderParams")
OF_MODELS = ("decode_fn", "default_decoder_params")
_PREDICTING = OWNERS[2:]
# Options that do not affect texts here: the cache's layout, and values that T5X sets itself.
_NOTHING: dict[str, Any] = {
    "cache_offset": 0,
    "decode_rng": None,
    "initial_index": None,
    "rng": None,
    "prompt_with_targets": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "beam_search": {"max_decode_step": -1},
    "temperature_sample": {
        "max_decode_steps_hard_limit": None, "rescale_log_probs": True, "state_callback_fn": None,
        "logit_callback_fn": None,
    },
}  # fmt: skip
_BEAMS = {"alpha": "BeamSearch.alpha", "min_log_prob": "BeamSearch.min_log_prob"}


class Decoding(NamedTuple):
    """`lines`: (our name, value, origin); `left`: bindings without a counterpart; `unused`: of the other function."""

    lines: list[tuple[str, Any, str]]
    left: list[str]
    unused: list[str]


def translated(decoder: bool, bound: Mapping[str, object], targets: int | None) -> Decoding:
    """The generation options of a run.

    Args:
      decoder: whether the model is a decoder, which samples by default; others use beam search.
      bound: "owner.parameter" -> value, for OWNERS, and for `decode_fn` alone.
      targets: tokens of a text, if known.
    """
    decode_fn = str(bound.get("decode_fn", "temperature_sample" if decoder else "beam_search"))
    function = decode_fn.lstrip("@").removesuffix("()").rpartition(".")[2]
    if function not in _DEFAULTS:
        return Decoding([], list(bound), [])
    options: dict[str, tuple[Any, str]] = {}
    for name, value in bound.items():
        owner, _, parameter = name.rpartition(".")
        if owner == function or owner in _PREDICTING:
            inner = value if parameter == "decoder_params" and isinstance(value, Mapping) else {parameter: value}
            options |= {key: (item, name) for key, item in inner.items()}
    left = [name for parameter, (value, name) in options.items() if _is_unknown(function, parameter, value)]
    make = _of_beams if function == "beam_search" else _of_draws
    lines = make({key: value for key, (value, _) in options.items()}, targets)
    other = [name for name in bound if name.startswith(tuple(f"{item}." for item in _DEFAULTS if item != function))]
    return Decoding(lines, list(dict.fromkeys(left)), [f"{name} is not written: {function} decodes" for name in other])


def _is_unknown(function: str, parameter: str, value: object) -> bool:
    """Whether an option has no counterpart here."""
    if parameter in _NOTHING:
        return value != _NOTHING[parameter] and value is not None
    if parameter in _DEFAULTS[function]:
        return value != _DEFAULTS[function][parameter] and value is not None
    known = {"beam_search": (*_BEAMS, "num_decodes", "return_all_decodes", "max_decode_len"),
             "temperature_sample": ("temperature", "topk", "topp", "num_decodes", "return_all_decodes", "max_decode_steps")}  # fmt: skip
    return parameter not in known[function]


def _of_beams(options: Mapping[str, Any], targets: int | None) -> list[tuple[str, Any, str]]:
    count = options.get("num_decodes") or 1
    lines: list[tuple[str, Any, str]] = [("Sampling.beams", "@BeamSearch()", "decoding.beam_search")]
    lines.append(("BeamSearch.num_decodes", count, "predict_batch_with_aux.num_decodes"))
    lines += [(ours, options[name], f"beam_search.{name}") for name, ours in _BEAMS.items() if name in options]
    if options.get("return_all_decodes"):
        lines.append(("BeamSearch.num_return", count, "predict_batch_with_aux.return_all_decodes"))
    return lines + _most(options.get("max_decode_len"), targets)


def _of_draws(options: Mapping[str, Any], targets: int | None) -> list[tuple[str, Any, str]]:
    top_k, top_p = options.get("topk", 1), options.get("topp", 0.0)
    lines: list[tuple[str, Any, str]] = [
        ("Sampling.temperature", options.get("temperature", 1.0), "temperature_sample.temperature")
    ]
    lines.append(("Sampling.top_k", top_k or None, "temperature_sample.topk (1 by default; 0: all)"))
    if top_p:
        lines.append(("Sampling.top_p", top_p, "temperature_sample.topp"))
    if (count := options.get("num_decodes") or 1) != 1:
        lines.append(("Sampling.num_decodes", count, "predict_batch_with_aux.num_decodes"))
    if options.get("return_all_decodes"):
        lines.append(("Sampling.num_return", count, "predict_batch_with_aux.return_all_decodes"))
    return lines + _most(options.get("max_decode_steps"), targets)


def _most(limit: int | None, targets: int | None) -> list[tuple[str, Any, str]]:
    most = limit or targets
    return [] if most is None else [("Sampling.max_new_tokens", most, "max_decode_len, else the length of targets")]
