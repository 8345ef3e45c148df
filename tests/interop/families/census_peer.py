"""Small models of every type that transformers' auto classes know: the peer program of test_census.py.

    python tests/interop/families/census_peer.py FOLDER [NAME ...]

A name is HEAD/MODEL_TYPE, with a head of HEADS. FOLDER/NAME has the model as save_pretrained writes it, with tensors drawn
by their names, and logits.npz: what transformers answers, in float32 and float64. FOLDER/NAME/failed.txt says why there is none.
Configurations are those of the classes without arguments, with smaller sizes. Needs torch, transformers and safetensors.
"""

from __future__ import annotations

import math
import pathlib
import re
import sys
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "models" / "golden")]

import answers  # noqa: E402
import encdec_families  # noqa: E402
import encoder_families  # noqa: E402
import peer  # noqa: E402
from family_cases import CONSTANTS  # noqa: E402

HEADS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
HEADS["masked"] = {key: value for key, value in HEADS["masked"].items() if key not in HEADS["seq2seq"]}
LARGEST = 20_000_000  # parameters of a model that was made small
# The first pattern that fits the whole name of a key with an integer gives its value; what is smaller already stays.
SIZES = (
    (r"(.*_)?vocab_size|vocab_size_per_layer_input", 96),
    (r"type_vocab_size|num_hash.*", 2),
    (r"(.*_)?(num_)?(hidden_|encoder_|decoder_|block_)?layers|n_layers?|depth|(num|n)_(encoder|decoder)_layers", 4),
    (r"(num_|n_)?(key_value|kv)_heads|num_query_groups", 2),
    (r"(.*_)?(attention_|decoder_attention_|encoder_attention_)?heads?|n_heads?|n_mamba_heads", 4),
    (r"(num|n)(_local|_routed)?_experts", 8),
    (r"num_experts_per_tok(en)?|moe_topk|top_?k|moe_k", 2),
    (r"n_group|topk_group|first_k_dense_replace|num_key_value_groups", 1),
    (r"(hidden|d|n)_(size|model|embd)|dim|embed_dim|embedding_size|emb_dim|d_embed|model_dim|word_embed_proj_dim", 64),
    (r".*intermediate_size|(.*_)?ffn_dim|d_ff|n_inner|hidden_dim|ffn_hidden_size|.*mlp_dim|d_inner|inner_dim", 96),
    (r"(.*_)?head_dim|d_kv|d_head|(.*_)?head_size|kv_channels|.*_head_dim", 16),
    (r".*lora_rank|.*_rank|bottleneck_size", 16),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len", 128),
    (r"rotary_dim", 8),
)
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16}  # 2 x 64 channels
# What does not follow from the names of keys, or is None in a class that computes with it.
CHANGES: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 32},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "bailing_hybrid": {"num_experts": 8, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 128},
    "falcon_mamba": {"intermediate_size": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _MAMBA2,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba": {"intermediate_size": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mimo_v2_flash": {"head_dim": 12, "v_head_dim": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "qwen2_moe": {"layer_types": ["full_attention"] * 4},
    "xlnet": {"d_head": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_headdim": 16}
    | {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
}


def smaller(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a configuration with smaller sizes, and without lists that have an entry for each layer."""
    values = {key: value for key, value in values.items() if key not in ("id2label", "label2id")}
    result: dict[str, Any] = {}
    tokens = {key for key in values if key.endswith("token_id")}
    depth = max(
        (value for key, value in values.items() if re.fullmatch(SIZES[2][0], key) and isinstance(value, int)), default=0
    )
    for key, value in values.items():
        if key == "per_layer_config":
            result[key] = {}
        elif isinstance(value, dict) and not key.startswith("rope"):
            result[key] = smaller(value)
        elif key in tokens and isinstance(value, int) and value >= 96:
            result[key] = 1
        elif isinstance(value, list) and len(value) >= depth > 0 and len(value) > 1:
            result[key] = None
        elif isinstance(value, int) and not isinstance(value, bool):
            least = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), value)
            result[key] = min(value, least)
        else:
            result[key] = value
    heads = ("num_key_value_heads", "num_attention_heads")
    if values.get(heads[0]) == values.get(heads[1]):  # latent attention, and whatever has keys for each head
        result |= {heads[0]: result[heads[1]]} if heads[0] in values else {}
    return result


def configuration(model_type: str) -> Any:
    """A small configuration of a class, beside that with its own values."""
    beside = ("model_type", "transformers_version", "_name_or_path", "architectures")
    usual = CONFIG_MAPPING[model_type]().to_dict()
    values = {key: value for key, value in smaller(usual).items() if key not in beside and value is not None}
    return CONFIG_MAPPING[model_type](**values | CHANGES.get(model_type, {}))


def answered(model: torch.nn.Module, head: str) -> np.ndarray:
    ids = torch.from_numpy(peer.tokens())
    with torch.no_grad():
        if head == "masked":
            ids = torch.from_numpy(encoder_families.batch(0)["tokens"]).long()
            return model(input_ids=ids).logits.numpy()
        if head == "seq2seq" and model.config.is_encoder_decoder:
            read = {name: torch.from_numpy(value) for name, value in encdec_families.arguments().items()}
            return model(**read, decoder_input_ids=ids, use_cache=False).logits.numpy()
        return model(ids, use_cache=False).logits.numpy()


def write(head: str, model_type: str, where: pathlib.Path) -> None:
    config = configuration(model_type)
    names = HEADS[head][model_type]
    kind = getattr(transformers, names if isinstance(names, str) else names[0])
    with torch.device("meta"):
        count = sum(math.prod(value.shape) for value in kind._from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters are more than {LARGEST:,}")
    model = kind._from_config(config).float().eval()
    model.save_pretrained(where)
    path = where / "model.safetensors"
    stored = safetensors.numpy.load_file(path)
    drawn = {
        name: answers.draw(name, value.shape) if value.dtype.kind == "f" else value
        for name, value in stored.items()
        if not name.endswith(CONSTANTS.get(model_type, ()))
    }
    safetensors.numpy.save_file(drawn, path, metadata={"format": "pt"})
    logits = answered(opened(kind, where, torch.float32), head)
    try:
        with peer.Double():
            exact = answered(opened(kind, where, torch.float64), head)
    except RuntimeError as error:  # of operations that a class insists on
        print(head, model_type, "has no float64:", repr(error)[:200], flush=True)
        exact = logits
    np.savez(where / "logits.npz", logits=logits, exact=exact)


def opened(kind: Any, where: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
    """The model with the plainest arithmetic that its class has."""
    for how in ({"experts_implementation": "eager"}, {}):
        try:
            return kind.from_pretrained(where, dtype=dtype, attn_implementation="eager", **how).eval()
        except (ValueError, TypeError):  # a class without experts
            continue
    return kind.from_pretrained(where, dtype=dtype).eval()


def main(folder: pathlib.Path, *names: str) -> None:
    torch.set_num_threads(1)
    for name in names or [f"{head}/{model_type}" for head, types in HEADS.items() for model_type in types]:
        where = folder / name
        if (where / "logits.npz").exists() or (where / "failed.txt").exists():
            continue
        where.mkdir(parents=True, exist_ok=True)
        head, model_type = name.split("/")
        try:
            write(head, model_type, where)
        except Exception as error:
            (where / "failed.txt").write_text(f"{type(error).__name__}: {error}\n")
            print(name, "failed:", type(error).__name__, str(error)[:200].replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
