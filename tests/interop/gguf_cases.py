"""A tiny model of every family that GGUF has: config.json, our configuration of it, tensors and a tokenizer."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from capibara.interop import gguf_names, gguf_vocabulary
from capibara.models.rope import Rope
from capibara.models.router import Moe

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "models" / "golden"))

import hf_names  # noqa: E402

VOCAB = 320
TEXT = pathlib.Path(json.__file__).read_text() + " Größe, Привет! 日本語 😀 1234567890\n\n\tit's we'll\r\n"

_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
_OURS = dict(
    vocab_size=VOCAB,
    embed_dim=32,
    mlp_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    norm_eps=1e-5,
    dtype="float32",
)
_SEPARATE = dict(_OURS, head="separate")


def _rope(kind: str = "default", theta: float = 10_000.0, **rest: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **rest}


def _hf(model_type: str, **values: Any) -> dict[str, Any]:
    return _SIZES | {"model_type": model_type, "rope_parameters": _rope()} | values


_LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_YARN = dict(factor=4.0, original_max_position_embeddings=64, attention_factor=1.25)
_GEMMA = dict(head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh")
_OUR_GEMMA = dict(
    _OURS, head_dim=16, norm_eps=1e-6, norm_scale="offset", activation="geglu", embedding_scale="sqrt_dim"
)
_SANDWICH = dict(_OUR_GEMMA, norm_placement="sandwich", window=8)
_GPT = dict(norm="layer", bias="all", num_kv_heads=None)

# Name -> table of tests/models/golden (None: a mixture, see params), config.json, our configuration.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "llama": (hf_names.LLAMA, _hf("llama", attention_bias=False, mlp_bias=False), _SEPARATE),
    "llama_linear": (
        hf_names.LLAMA,
        _hf("llama", rope_parameters=_rope("linear", factor=4.0)),
        _SEPARATE | dict(rope=Rope(scaling="linear", factor=4.0)),
    ),
    "llama_llama3": (
        hf_names.LLAMA,
        _hf("llama", head_dim=16, rope_parameters=_rope("llama3", 500.0, **_LLAMA3)),
        _SEPARATE | dict(head_dim=16, rope=Rope(theta=500.0, scaling="llama3", factor=8.0, original_length=16)),
    ),
    "llama_yarn": (
        hf_names.LLAMA,
        _hf("llama", head_dim=16, rope_parameters=_rope("yarn", 500.0, **_YARN)),
        _SEPARATE
        | dict(head_dim=16)
        | dict(rope=Rope(theta=500.0, scaling="yarn", factor=4.0, original_length=64, attention_factor=1.25)),
    ),
    "smollm2": (
        hf_names.LLAMA,
        _hf("llama", tie_word_embeddings=True, rope_parameters=_rope(theta=100_000.0)),
        _OURS | dict(rope=Rope(theta=100_000.0)),
    ),
    "mistral": (
        hf_names.LLAMA,
        _hf("mistral", sliding_window=64),
        _SEPARATE | dict(layer_pattern=("local",), window=64),
    ),
    "mixtral": (
        None,
        _hf("mixtral", num_local_experts=4, num_experts_per_tok=2),
        _SEPARATE | dict(moe=Moe(num_experts=4, top_k=2)),
    ),
    "qwen2": (
        hf_names.QWEN2,
        _hf("qwen2", tie_word_embeddings=True, rope_parameters=_rope(theta=1e6)),
        _OURS | dict(bias="qkv", rope=Rope(theta=1e6)),
    ),
    "qwen3": (
        hf_names.QWEN3,
        _hf("qwen3", head_dim=16, rope_parameters=_rope(theta=1e6)),
        _SEPARATE | dict(head_dim=16, qk_norm="head", rope=Rope(theta=1e6)),
    ),
    "qwen3_moe": (
        None,
        _hf(
            "qwen3_moe",
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            rope_parameters=_rope(theta=1e6),
        ),
        _SEPARATE
        | dict(head_dim=16, qk_norm="head", rope=Rope(theta=1e6))
        | dict(moe=Moe(num_experts=4, top_k=2, expert_dim=32)),
    ),
    "gemma": (hf_names.LLAMA, _hf("gemma", **_GEMMA), _OUR_GEMMA),
    "gemma2": (
        hf_names.GEMMA2,
        _hf(
            "gemma2",
            **_GEMMA,
            sliding_window=8,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        _SANDWICH | dict(layer_pattern=("local", "global"), attention_soft_cap=2.0, logit_soft_cap=3.0),
    ),
    "gemma3": (
        hf_names.GEMMA3,
        _hf(
            "gemma3_text",
            **_GEMMA | dict(num_hidden_layers=7),
            sliding_window=8,
            query_pre_attn_scalar=16,
            rope_parameters={"sliding_attention": _rope(), "full_attention": _rope("linear", 1e6, factor=8.0)},
        ),
        _SANDWICH
        | dict(qk_norm="head", layer_pattern=(*("local",) * 5, "global"), num_layers=7)
        | dict(rope=Rope(theta=1e6, local_theta=10_000.0, scaling="linear", factor=8.0)),
    ),
    "phi3": (hf_names.PHI3, _hf("phi3", original_max_position_embeddings=64), _SEPARATE),
    "gpt2": (
        hf_names.GPT2,
        dict(
            model_type="gpt2", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, layer_norm_epsilon=1e-5
        ),
        _OURS | _GPT | dict(mlp_dim=128, activation="gelu", positions="learned", max_length=64),
    ),
    "gpt_neox": (
        hf_names.GPT_NEOX,
        {key: value for key, value in _SIZES.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
        | dict(model_type="gpt_neox", hidden_act="gelu", layer_norm_eps=1e-5, use_parallel_residual=True)
        | dict(rotary_pct=0.5, rope_parameters=_rope(partial_rotary_factor=0.5)),
        _SEPARATE | _GPT | dict(activation="gelu_exact", residual="parallel", rope=Rope(fraction=0.5)),
    ),
}


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Random values of all tensors, which adding 1 does not round."""
    for tensor in gguf_names.of_model_type(config["model_type"]).tensors(config):
        value = hf_names.draw(tensor.name, tensor.shape)
        yield tensor.name, np.round(value * 2.0**18).astype(np.float32) / np.float32(2**18)


def params(name: str, values: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Our parameters of a checkpoint's tensors."""
    table = CASES[name][0]
    if table is not None:
        return hf_names.read(table, shapes, lambda key, shape: values[key].reshape(shape))
    dense = hf_names.QWEN3 if name == "qwen3_moe" else hf_names.LLAMA
    rest = {path: shape for path, shape in shapes.items() if "/mlp/" not in path}
    found = hf_names.read(dense, rest, lambda key, shape: values[key].reshape(shape))
    layers, experts = CASES[name][1]["num_hidden_layers"], 4
    block = "mlp" if name == "qwen3_moe" else "block_sparse_moe"
    parts = ("gate_proj", "down_proj", "up_proj") if name == "qwen3_moe" else ("w1", "w2", "w3")
    prefix = f"model.layers.{{}}.{block}."
    found["layers/mlp/router"] = np.stack([values[f"{prefix}gate.weight".format(i)].T for i in range(layers)])
    for ours, part in zip(("gate", "down", "up"), parts):
        names = [[f"{prefix}experts.{{}}.{part}.weight".format(i, e) for e in range(experts)] for i in range(layers)]
        found[f"layers/mlp/{ours}"] = np.array([[values[key].T for key in row] for row in names])
    return found


@functools.cache
def byte_level(pre: str = "smollm") -> dict[str, bytes]:
    """The files of a small byte-level tokenizer."""
    pre_ = gguf_vocabulary.PRES[pre]
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=pre_.ignore_merges))
    parts = {
        "digits": pre_tokenizers.Digits(individual_digits=True),
        "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    }
    steps = [parts.get(split) or pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in pre_.splits]
    if "gpt2" not in pre_.splits:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=310, initial_alphabet=alphabet, special_tokens=["<|bos|>", "<|eos|>"], show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    return _files(made, "<|bos|>", "<|eos|>", None)


@functools.cache
def sentencepiece() -> dict[str, bytes]:
    """The files of a small tokenizer as SentencePiece models are made into one: byte fallback, merges of all pairs."""
    space = gguf_vocabulary.SPACE
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [space, *"etaoinshrdlu"]
    pairs = [(space, "t"), ("h", "e"), (space + "t", "he"), ("i", "n"), (space, "a"), (space + "a", "n")]
    vocab = {token: i for i, token in enumerate([*special, *(left + right for left, right in pairs), *letters])}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _files(made, "<s>", "</s>", "<unk>")


def _files(made: tokenizers.Tokenizer, bos: str, eos: str, unknown: str | None) -> dict[str, bytes]:
    said = {"bos_token": bos, "eos_token": {"content": eos}} | ({"unk_token": unknown} if unknown else {})
    return {
        "tokenizer.json": made.to_str().encode(),
        "tokenizer_config.json": json.dumps(said).encode(),
        "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}",
    }
