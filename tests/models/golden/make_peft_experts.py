"""Writes peft_experts.json: what PEFT answers with adapters of experts that answers.draw gives, in both layouts.

Run as golden/make_peft.py is, in the same environment (transformers 5.23 and PEFT 0.21.2 made the committed file):
  PYTHONPATH=. python tests/models/golden/make_peft_experts.py
"""

from __future__ import annotations

import pathlib
import tempfile

import peft
import safetensors.torch
import torch
from answers import write
from make import model_of, tokens
from make_moe import CASES
from make_peft import FIELDS, WEIGHTS, answer_of

RANK = 4
# What PEFT's LoraConfig is given beside r and lora_alpha; the experts of a layer are one parameter.
FUSED = {
    "mixtral": dict(
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        rank_pattern={r".*\.down_proj": 2},
        alpha_pattern={r".*\.down_proj": 3},
    ),
    "qwen3_moe": dict(target_modules=[], target_parameters=["gate_up_proj"], use_rslora=True),
    "gpt_oss": dict(
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj", "router.weight"],
        rank_pattern={r".*\.down_proj": 2},
        alpha_pattern={r".*\.down_proj": 3},
    ),
}
# Of transformers 4, where each expert is modules: those that have an adapter, and where they are.
MODULES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), ("gate",)),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), ()),
}


def fused(name: str) -> dict:
    """As PEFT saves it."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=8, **FUSED[name])
    with tempfile.TemporaryDirectory() as folder:
        peft.get_peft_model(model_of(CASES[name]), config).save_pretrained(folder)
        return answer_of(CASES[name], folder, (*FIELDS, "target_parameters"))


def single(name: str) -> dict:
    """As PEFT saved it with transformers 4, whose modules are no more: under their names, which PEFT still reads."""
    block, experts, others = MODULES[name]
    width, hidden = CASES[name]["hidden_size"], CASES[name].get("moe_intermediate_size", 48)
    shapes = {part: (width, hidden) if part in ("w2", "down_proj") else (hidden, width) for part in experts}
    modules = {f"experts.{e}.{part}": shape for e in range(8) for part, shape in shapes.items()}
    modules |= dict.fromkeys(others, (8, width))
    stored = {}
    for layer in range(2):
        for module, (outputs, inputs) in modules.items():
            start = f"base_model.model.model.layers.{layer}.{block}.{module}.lora_"
            stored |= {f"{start}A.weight": torch.zeros(RANK, inputs), f"{start}B.weight": torch.zeros(outputs, RANK)}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=8, target_modules=[*experts, *others])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        safetensors.torch.save_file(stored, pathlib.Path(folder) / WEIGHTS, metadata={"format": "pt"})
        return answer_of(CASES[name], folder, (*FIELDS, "target_parameters"))


if __name__ == "__main__":
    found = {f"{name}_fused": fused(name) for name in FUSED} | {name: single(name) for name in MODULES}
    write("peft_experts.json", {"tokens": tokens().tolist()}, found)
