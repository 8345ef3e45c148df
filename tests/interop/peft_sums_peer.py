"""Writes peft_sums.json with PEFT: two adapters of a tiny Llama and their weighted sums.

PYTHON_WITH_PEFT tests/interop/peft_sums_peer.py
"""

from __future__ import annotations

import json
import pathlib
import tempfile

import peft
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=2)
SUMS = (("cat", [0.7, 0.3]), ("linear", [0.7, 0.3]), ("linear", [1.0, -0.5]))


def main():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1))
    how = dict(r=3, task_type="CAUSAL_LM")
    one = peft.LoraConfig(lora_alpha=6, target_modules=["q_proj", "down_proj"], alpha_pattern={"down_proj": 2}, **how)
    two = peft.LoraConfig(lora_alpha=3, target_modules=["q_proj", "v_proj"], **how)
    both = peft.get_peft_model(model, one, adapter_name="one")
    both.add_adapter("two", two)
    for name, parameter in both.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn_like(parameter) * 100).round() / 100
    found = {"config": model.config.to_dict(), "adapters": {}, "sums": {}}
    with tempfile.TemporaryDirectory() as folder:
        both.save_pretrained(folder)
        for name in ("one", "two"):
            path = pathlib.Path(folder) / name
            tensors = {key: value.tolist() for key, value in load_file(path / "adapter_model.safetensors").items()}
            found["adapters"][name] = json.loads((path / "adapter_config.json").read_text()), tensors
    for kind, weights in SUMS:
        name = f"{kind} {weights[1]}"
        both.add_weighted_adapter(["one", "two"], weights, name.replace(".", ""), combination_type=kind)
        found["sums"][name] = {
            path.removeprefix("base_model.model."): module.get_delta_weight(name.replace(".", "")).detach().tolist()
            for path, module in both.named_modules()
            if name.replace(".", "") in getattr(module, "lora_A", {})
        }
    rounded = json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 6))
    pathlib.Path(__file__).with_name("peft_sums.json").write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
