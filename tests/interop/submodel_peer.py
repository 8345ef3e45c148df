"""transformers' results with a part of a Gemma 3n: the peer program of test_transformers_submodel.py.

Run by that test in an environment with torch and transformers:
    python tests/interop/submodel_peer.py write FOLDER    a whole model, in FOLDER/whole
        python tests/interop/submodel_peer.py read FOLDER     logits of FOLDER/part, and of the same part made here, in
        read.npz
"""

from __future__ import annotations

import pathlib
import re
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "models" / "golden"))

import make  # noqa: E402

SKIPPED, WIDTHS = (1, 4), (48, 16, 32, 48, 8, 48)
# The values of config.json that differ in the part.
PART = dict(num_hidden_layers=6, num_kv_shared_layers=3, intermediate_size=list(WIDTHS))


def write(folder: pathlib.Path) -> None:
    make.model_of(make.GEMMA3N).save_pretrained(folder / "whole")


def part_of(whole: torch.nn.Module) -> torch.nn.Module:
    """A model of the remaining layers."""
    config = whole.config
    layers = config.num_hidden_layers
    kept = [layer for layer in range(layers) if layer not in SKIPPED]
    own = dict(
        layer_types=[config.layer_types[layer] for layer in kept],
        activation_sparsity_pattern=[config.activation_sparsity_pattern[layer] for layer in kept],
    )
    part = make.model_of(make.GEMMA3N | PART | own)
    found = {}
    for name, value in whole.state_dict().items():
        layer = re.search(r"(?<=model\.layers\.)\d+", name)
        if layer is not None:
            if int(layer[0]) in SKIPPED:
                continue
            at = kept.index(int(layer[0]))
            name = name.replace(f"layers.{layer[0]}.", f"layers.{at}.", 1)
            if ".mlp." in name:
                value = value[:, : WIDTHS[at]] if "down_proj" in name else value[: WIDTHS[at]]
        elif "per_layer_model_projection" in name:
            value = value.unflatten(0, (layers, -1))[kept].flatten(0, 1)
        elif "embed_tokens_per_layer" in name:
            value = value.unflatten(1, (layers, -1))[:, kept].flatten(1)
        found[name] = value
    part.load_state_dict(found)
    return part


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(make.tokens()), use_cache=False).logits.numpy()


def read(folder: pathlib.Path) -> None:
    load = AutoModelForCausalLM.from_pretrained
    ours, whole = (load(folder / name, attn_implementation="eager", dtype=torch.float32) for name in ("part", "whole"))
    np.savez(folder / "read.npz", ours=logits(ours), cut=logits(part_of(whole)), whole=logits(whole))


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](pathlib.Path(sys.argv[2]))
