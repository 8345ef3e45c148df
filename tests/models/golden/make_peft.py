"""Writes peft.json: what PEFT answers with the weights and adapters that answers.draw gives.

Run by a person who adds a case, in an environment with torch, transformers and peft (0.21.2 made the committed file), from
the root of the checkout; commit the file that it writes:
  PYTHONPATH=. python tests/models/golden/make_peft.py
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Sequence

import peft
import safetensors.torch
import torch
from answers import draw, some, write
from make import CASES, model_of, tokens

WEIGHTS = "adapter_model.safetensors"
# Of the case of this name in make.py, or of the one before a colon: what LoraConfig is given beside r and lora_alpha.
ADAPTERS = {
    "llama:layers": dict(target_modules=["q_proj", "down_proj"], layers_to_transform=[1], layers_pattern="layers"),
    "llama:patterns": dict(
        target_modules=r"model\.layers\.(0\.self_attn\.[qk]_proj|\d\.mlp\.up_proj)",
        rank_pattern={"layers.1.mlp.up_proj": 2, r".*\.k_\w+": 3},
        alpha_pattern={r"layers\.[0-4]\.mlp\.\w+": 5, "q_proj": 1},
    ),
    "llama:parameters": dict(target_modules=["o_proj"], target_parameters=["mlp.up_proj.weight"]),
    "qwen2:biases": dict(target_modules=["q_proj", "o_proj"], bias="lora_only"),
    "gpt2:biases": dict(target_modules=["c_attn"], bias="all", fan_in_fan_out=True),
    "llama": dict(
        target_modules=["q_proj", "v_proj", "up_proj"], rank_pattern={"up_proj": 2}, alpha_pattern={"up_proj": 3}
    ),
    "qwen3": dict(target_modules=["q_proj", "o_proj", "down_proj"], use_dora=True, modules_to_save=["input_layernorm"]),
    "gpt2": dict(target_modules=["c_attn", "mlp.c_proj"], use_dora=True, fan_in_fan_out=True),
    "gpt_neox": dict(target_modules=["query_key_value", "dense_4h_to_h"], use_rslora=True),
    "phi3": dict(target_modules=["qkv_proj", "gate_up_proj"]),
    "gemma3n": dict(
        target_modules=[
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            *("linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection"),
        ],
        rank_pattern={"linear_left": 3},
    ),
}
FIELDS = (
    "peft_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_dora", "use_rslora",
    "modules_to_save", "fan_in_fan_out", "bias", "layers_to_transform", "layers_pattern", "target_parameters",
)  # fmt: skip


def answer(name: str, options: dict) -> dict:
    """The files' contents, but for the tensors' values, and logits."""
    config, case = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options), CASES[name.partition(":")[0]]
    with tempfile.TemporaryDirectory() as folder:
        peft.get_peft_model(model_of(case), config).save_pretrained(folder)
        return answer_of(case, folder, FIELDS)


def answer_of(case: dict, folder: str, fields: Sequence[str]) -> dict:
    """The files' contents of an adapter of the case, but for the tensors' values, and logits with drawn ones."""
    path = pathlib.Path(folder)
    stored = {key: tuple(value.shape) for key, value in safetensors.torch.load_file(path / WEIGHTS).items()}
    drawn = {key: torch.from_numpy(draw(key, shape)) for key, shape in stored.items()}
    safetensors.torch.save_file(drawn, path / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((path / "adapter_config.json").read_text())
    model = peft.PeftModel.from_pretrained(model_of(case), folder).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens()), use_cache=False).logits.numpy()
    return {"config": {key: config.get(key) for key in fields}, "tensors": stored, "logits": some(logits[-1])}


if __name__ == "__main__":
    write("peft.json", {"tokens": tokens().tolist()}, {name: answer(name, more) for name, more in ADAPTERS.items()})
