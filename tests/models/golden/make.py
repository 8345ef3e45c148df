"""Writes decoders.json: what the reference implementations answer with the weights that answers.draw gives.

Run by a person who adds a family, in an environment with torch and transformers (5.23 made the committed file), from
the root of the checkout; commit the file that it writes:
    python tests/models/golden/make.py

The models are tiny, with every variant active: rows are longer than the windows and the scaled positions' original
length, scores and logits are beyond the soft caps.
"""

from __future__ import annotations

import numpy as np
import torch
from answers import LENGTH, ROWS, VOCAB, draw, some, write
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
GEMMA = dict(SIZES, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-6, num_key_value_heads=1)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


def rope(kind: str = "default", theta: float = 10_000.0, **rest) -> dict:
    return {"rope_type": kind, "rope_theta": theta, **rest}


PHI3_LONG = dict(
    SIZES,
    model_type="phi3",
    pad_token_id=0,
    rope_parameters=rope("longrope", 500.0, short_factor=[1.0, 1.1, 1.3, 1.5], long_factor=[1.0, 2.0, 5.0, 9.0]),
)
GEMMA3N = dict(
    GEMMA,
    model_type="gemma3n_text",
    num_hidden_layers=8,
    num_key_value_heads=2,
    sliding_window=8,
    layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
    vocab_size_per_layer_input=VOCAB - 6,
    hidden_size_per_layer_input=8,
    laurel_rank=6,
    altup_num_inputs=3,
    num_kv_shared_layers=4,
    activation_sparsity_pattern=[0.8] * 3 + [0.0] * 5,
    final_logit_softcapping=3.0,
    rope_parameters={"sliding_attention": rope(), "full_attention": rope(theta=1e6)},
)
CASES = {
    "gpt2": dict(
        model_type="gpt2",
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": dict(
        SIZES, model_type="gpt_neox", hidden_size=64, hidden_act="gelu", layer_norm_eps=1e-5, rotary_pct=0.25
    ),
    "gpt_neox_unbiased": dict(
        SIZES, model_type="gpt_neox", hidden_size=64, hidden_act="gelu", layer_norm_eps=1e-5, attention_bias=False
    ),
    "gpt_neox_tanh": dict(
        SIZES, model_type="gpt_neox", hidden_size=64, hidden_act="gelu_fast", layer_norm_eps=1e-5, rotary_pct=0.25
    ),
    "llama": dict(SIZES, model_type="llama", rope_parameters=rope()),
    "llama_linear": dict(SIZES, model_type="llama", rope_parameters=rope("linear", factor=4.0)),
    "llama_llama3": dict(SIZES, model_type="llama", head_dim=16, rope_parameters=rope("llama3", 500.0, **LLAMA3)),
    "llama_yarn": dict(
        SIZES,
        model_type="llama",
        head_dim=16,
        rope_parameters=rope(
            "yarn", 500.0, factor=4.0, original_max_position_embeddings=64, beta_fast=2.0, beta_slow=0.25
        ),
    ),
    "llama_dynamic": dict(
        SIZES, model_type="llama", max_position_embeddings=16, rope_parameters=rope("dynamic", 500.0, factor=2.0)
    ),
    "llama_biased": dict(SIZES, model_type="llama", attention_bias=True, rope_parameters=rope()),
    "llama_mlp_biased": dict(SIZES, model_type="llama", mlp_bias=True, rope_parameters=rope()),
    "llama_all_biased": dict(SIZES, model_type="llama", attention_bias=True, mlp_bias=True, rope_parameters=rope()),
    "smollm2": dict(SIZES, model_type="llama", tie_word_embeddings=True, rope_parameters=rope(theta=100_000.0)),
    "mistral": dict(SIZES, model_type="mistral", sliding_window=8, rope_parameters=rope()),
    "gemma": dict(GEMMA, model_type="gemma", hidden_activation="gelu_pytorch_tanh", rope_parameters=rope()),
    "gemma_biased": dict(
        GEMMA, model_type="gemma", hidden_activation="gelu_pytorch_tanh", attention_bias=True, rope_parameters=rope()
    ),
    "gemma2": dict(
        GEMMA,
        model_type="gemma2",
        num_hidden_layers=3,
        num_key_value_heads=2,
        sliding_window=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        rope_parameters=rope(),
    ),
    "gemma3": dict(
        GEMMA,
        model_type="gemma3_text",
        num_hidden_layers=8,
        sliding_window=8,
        query_pre_attn_scalar=8,
        rope_parameters={"sliding_attention": rope(), "full_attention": rope("linear", 1e6, factor=8.0)},
    ),
    "gemma3n": GEMMA3N,
    "gemma3n_mix": GEMMA3N | dict(intermediate_size=[48] * 4 + [32, 48, 16, 32]),
    "qwen2": dict(SIZES, model_type="qwen2", tie_word_embeddings=True, rope_parameters=rope(theta=1e6)),
    "qwen3": dict(SIZES, model_type="qwen3", head_dim=16, rope_parameters=rope(theta=1e6)),
    "qwen3_biased": dict(SIZES, model_type="qwen3", head_dim=16, attention_bias=True, rope_parameters=rope(theta=1e6)),
    "phi3": dict(SIZES, model_type="phi3", pad_token_id=0, sliding_window=7, rope_parameters=rope()),
    "phi3_partial": dict(
        SIZES, model_type="phi3", pad_token_id=0, rope_parameters=rope(theta=500.0, partial_rotary_factor=0.5)
    ),
    "phi3_long": dict(PHI3_LONG, original_max_position_embeddings=16),
    "phi3_short": dict(PHI3_LONG, original_max_position_embeddings=32),
}


def model_of(case: dict) -> torch.nn.Module:
    """The reference, in float32."""
    config = AutoConfig.for_model(**case)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if case["model_type"] == "gpt_neox":
                name = name.replace("lm_head", "embed_out")  # what checkpoints call it
            parameter.copy_(torch.from_numpy(draw(name, tuple(parameter.shape))))
    return model


def logits(case: dict) -> np.ndarray:
    """[ROWS, LENGTH, VOCAB] of the reference."""
    with torch.no_grad():
        return model_of(case)(torch.from_numpy(tokens()), use_cache=False).logits.numpy()


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))


def main() -> None:
    answers = {}
    for name, case in CASES.items():
        got = logits(case)
        answers[name] = {
            "mean": round(float(got.mean()), 6),
            "std": round(float(got.std()), 6),
            "logits": some(got[-1]),
        }
        print(f"{name}: mean {answers[name]['mean']}, std {answers[name]['std']}")
    write("decoders.json", {"tokens": tokens().tolist()}, answers)


if __name__ == "__main__":
    main()
