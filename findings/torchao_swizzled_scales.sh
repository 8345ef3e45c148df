#!/bin/sh
# torchao 0.18.0 with transformers 5.24.0: the scales of a stored MX weight are in another order, and config.json does not say so.
#
# A weight of 128 x 128 in MXFP8 has 128 x 4 scales, one for 32 inputs.
#   expected: a tensor [128, 4], or a key of quantization_config that says otherwise
#   seen:     a tensor [32, 16], in the order in which tensor cores read tiles of 128 rows and 4 columns. Its shape divides the
#             weight's, so that a reader takes it for blocks of 4 x 8. Only the safetensors metadata say it (is_swizzled_scales).
#             Read as they lie, the scales belong to other rows: row r and column c are at row r % 32, column 4 * (r // 32) + c.
#
# Exits with 1 if the libraries do otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 torchao==0.18.0 accelerate safetensors
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 FOLDER="$folder" "$PEER_PYTHON" - 2> /dev/null <<'PYTHON'
import json
import os
import sys

import torch
import torchao
import transformers
from safetensors import safe_open
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig

print("torch", torch.__version__, "torchao", torchao.__version__, "transformers", transformers.__version__)
folder, name = os.environ["FOLDER"], "model.layers.0.self_attn.q_proj"
sizes = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
torch.manual_seed(0)
transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(f"{folder}/plain")
config = transformers.TorchAoConfig(MXDynamicActivationMXWeightConfig())
model = transformers.AutoModelForCausalLM.from_pretrained(
    f"{folder}/plain", dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
)
model.save_pretrained(f"{folder}/mx")
values = model.get_submodule(name).weight.dequantize().float()
with safe_open(f"{folder}/mx/model.safetensors", "pt") as file:
    codes, scales = (file.get_tensor(f"{name}._weight_{part}") for part in ("qdata", "scale"))
    stated = json.loads(file.metadata()[f"{name}.weight"])["_data"]["is_swizzled_scales"]
about = json.dumps(json.load(open(f"{folder}/mx/config.json"))["quantization_config"])
print("weight", list(codes.shape), "scales", list(scales.shape), "metadata: swizzled", stated)
print("quantization_config says it:", "swizzle" in about)
powers, row, column = scales.float(), torch.arange(128)[:, None], torch.arange(128)[None]
as_blocks = codes.float() * powers[row // 4, column // 8]
as_tiles = codes.float() * powers[row % 32, 4 * (row // 32) + column // 32]
print("read as blocks:", torch.equal(as_blocks, values), "- read as a tile:", torch.equal(as_tiles, values))
good = list(scales.shape) == [32, 16] and stated and "swizzle" not in about
sys.exit(0 if good and torch.equal(as_tiles, values) and not torch.equal(as_blocks, values) else 1)
PYTHON
