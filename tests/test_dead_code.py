"""Code that nothing uses is removed: vulture finds it."""

from __future__ import annotations

import pathlib

import vulture

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Used by what vulture does not see.
USED = {
    # by libraries, which call or read them: file objects, Starlette, pydantic, uvicorn, rich, Jinja, llguidance, reprlib, Grain, torch
    "readable", "special_token_ids", "bos_token_id", "eos_token_id", "seekable", "text_factory", "python_tracer_level", "set_slice", "send_400_response", "redirect_request", "disconnected", "model_config", "include_obfuscation",
    "sig", "should_exit", "main_loop", "on_broken_pipe", "globals", "maxstring", "__signature__", "__qualname__",
    "pre_tokenizer", "normalizer", "post_processor", "niter", "min_points_per_centroid", "is_trained", "tree_flatten", "q_sequence", "ignore_aliases",
    # by name: getattr, fields of tuples in their order, logical axes of Rules
    "_saving", "attention_streams", "mlp_streams", "critic", "their_log_probabilities", "cross_attention_norm", "cross_attention_post_norm", "attention_norm", "mlp_norm",
    "attention_post_norm", "mlp_post_norm", "Vertex", "shared_down", "input_gate", "projection", "query_down", "query_up", "kv_down", "key_rotary", "head_gate", "act_embed", "act_mlp", "act_vocab",
    "queue_depth", "slots_busy", "pages_busy", "encoder_segment_ids",
    # parameters of methods that a protocol declares
    "allow_overwrite", "timeout_ms",
    # by users of Python
    "push_to_hub", "read_run", "prepare_index", "prepare_rope",
    # by Python
    "__getattr__", "__dir__", "__class__",
    # by Gin: members of an enum that a run file names
    "NEWLINE", "UNROLL", "FLOAT16", "SCORES", "CHEAPEST", "MERGED", "BYZANTINE", "BEST", "INLINE",
}  # fmt: skip


def test_nothing_is_dead():
    finder = vulture.Vulture(ignore_decorators=["@model_of"])
    finder.scavenge([str(ROOT / name) for name in ("capibara", "tests", "benchmarks", "examples")])
    found = [item for item in finder.get_unused_code() if "capibara" == item.filename.relative_to(ROOT).parts[0]]
    assert len(found) > 10, "vulture has read nothing"
    dead = [
        f"{item.filename.relative_to(ROOT)}:{item.first_lineno}: {item.name}" for item in found if item.name not in USED
    ]
    assert not dead, f"nothing uses it: remove it, or say in USED who does: {', '.join(dead)}"


def test_the_list_has_no_leftovers():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "capibara").rglob("*.py"))
    assert not [name for name in USED if name not in text]
