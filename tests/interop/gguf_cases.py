"""A tiny model of every family that GGUF supports: config.json, tensors and tokenizers."""

from __future__ import annotations

import functools
import io
import json
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import sentencepiece as sentencepiece_library
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from capibara.data import train_vocabulary
from capibara.interop.gguf import names as gguf_names
from capibara.interop.gguf import vocabulary as gguf_vocabulary

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


def _rope(kind: str = "default", theta: float = 10_000.0, **rest: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **rest}


def _hf(model_type: str, **values: Any) -> dict[str, Any]:
    return _SIZES | {"model_type": model_type, "rope_parameters": _rope()} | values


_LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_YARN = dict(factor=4.0, original_max_position_embeddings=64, attention_factor=1.25)
_GEMMA = dict(head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh")

_GPT_OSS = dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, attention_bias=True)
_GPT_OSS_YARN = dict(factor=32.0, original_max_position_embeddings=4096, truncate=False)

# Name -> config.json.
CASES: dict[str, dict[str, Any]] = {
    "llama": _hf("llama", attention_bias=False, mlp_bias=False),
    "llama_linear": _hf("llama", rope_parameters=_rope("linear", factor=4.0)),
    "llama_llama3": _hf("llama", head_dim=16, rope_parameters=_rope("llama3", 500.0, **_LLAMA3)),
    "llama_yarn": _hf("llama", head_dim=16, rope_parameters=_rope("yarn", 500.0, **_YARN)),
    "smollm2": _hf("llama", tie_word_embeddings=True, rope_parameters=_rope(theta=100_000.0)),
    "mistral": _hf("mistral", sliding_window=64),
    "mixtral": _hf("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _hf("qwen2", tie_word_embeddings=True, rope_parameters=_rope(theta=1e6)),
    "qwen3": _hf("qwen3", head_dim=16, rope_parameters=_rope(theta=1e6)),
    "qwen3_moe": _hf(
        "qwen3_moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        rope_parameters=_rope(theta=1e6),
    ),
    "gpt_oss": _hf("gpt_oss", **_GPT_OSS),
    "gpt_oss_yarn": _hf("gpt_oss", **_GPT_OSS, rope_parameters=_rope("yarn", 150_000.0, **_GPT_OSS_YARN)),
    "gemma": _hf("gemma", **_GEMMA),
    "gemma2": _hf(
        "gemma2",
        **_GEMMA,
        sliding_window=8,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _hf(
        "gemma3_text",
        **_GEMMA | dict(num_hidden_layers=7),
        sliding_window=8,
        query_pre_attn_scalar=16,
        rope_parameters={"sliding_attention": _rope(), "full_attention": _rope("linear", 1e6, factor=8.0)},
    ),
    "gemma3n": _hf(
        "gemma3n_text",
        **_GEMMA | dict(num_hidden_layers=22, intermediate_size=512),
        sliding_window=8,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=2,
        laurel_rank=64,
        altup_num_inputs=4,
        altup_active_idx=0,
        final_logit_softcapping=30.0,
        activation_sparsity_pattern=[0.95] * 10 + [0.0] * 12,
        rope_parameters={"sliding_attention": _rope(), "full_attention": _rope(theta=1e6)},
    ),
    "phi3": _hf("phi3", original_max_position_embeddings=64, sliding_window=None),
    "gpt2": dict(
        model_type="gpt2",
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        n_inner=None,
        layer_norm_epsilon=1e-5,
    ),
    "gpt_neox": {key: value for key, value in _SIZES.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
    | dict(model_type="gpt_neox", hidden_act="gelu", layer_norm_eps=1e-5, use_parallel_residual=True)
    | dict(rotary_pct=0.5, rope_parameters=_rope(partial_rotary_factor=0.5)),
}


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Random values of all tensors, chosen so that adding 1 does not round them."""
    shapes = {tensor.name: tensor.shape for tensor in gguf_names.of_config(config).tensors(config)}
    for name, shape in shapes.items():
        value = 0.25 * np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        is_scale = name.endswith("weight") and ("norm" in name or ".ln_" in name)
        yield name, (np.round((value + is_scale) * 2.0**18) / 2.0**18).astype(np.float32)


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
    """The files of a small tokenizer that was converted from SentencePiece: byte fallback, merges of all pairs."""
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


@functools.cache
def sentencepiece_model(model_type: str = "bpe", rule: str = "identity") -> bytes:
    """A small SentencePiece model file, as `capibara prepare vocabulary` trains it."""
    settings = train_vocabulary.TRAINER | dict(model_type=model_type, normalization_rule_name=rule)
    written = io.BytesIO()
    lines = iter(TEXT.splitlines())
    sentencepiece_library.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=written, vocab_size=420, hard_vocab_limit=False, **settings
    )
    return written.getvalue()


def _files(made: tokenizers.Tokenizer, bos: str, eos: str, unknown: str | None) -> dict[str, bytes]:
    said = {"bos_token": bos, "eos_token": {"content": eos}} | ({"unk_token": unknown} if unknown else {})
    return {
        "tokenizer.json": made.to_str().encode(),
        "tokenizer_config.json": json.dumps(said).encode(),
        "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}",
    }
