#!/bin/sh
# auto-round 0.16.1: the same packed words stand for other weights, by the name of the packing alone.
#
# Folders with packing_format "auto_round" and "auto_round:auto_gptq" have the same tensors, of the same shapes and dtypes.
#   expected: the tensors say how they are read, or a key of quantization_config for it
#   seen:     "auto_round:auto_gptq" stores zero points minus 1, "auto_round" as they are: each weight differs by its group's scale
# The layer for "auto_round" cannot pack zero points itself: its pack reads an attribute `device` that nothing sets.
#
# Exits with 1 if auto-round does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 auto-round==0.16.1
    PEER_PYTHON="$folder/venv/bin/python"
fi
"$PEER_PYTHON" - 2> /dev/null <<'PYTHON'
import importlib.metadata
import sys

import torch
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

print("torch", torch.__version__, "auto-round", importlib.metadata.version("auto-round"))
INPUTS, OUTPUTS, GROUP = 64, 32, 32
torch.manual_seed(0)
linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
scales, zeros = torch.full((OUTPUTS, INPUTS // GROUP), 0.125), torch.full((OUTPUTS, INPUTS // GROUP), 7.0)
minus_one = qlinear_torch_zp.QuantLinear(4, GROUP, INPUTS, OUTPUTS, False)
minus_one.pack(linear, scales, zeros)
as_it_is = qlinear_torch.QuantLinear(4, GROUP, INPUTS, OUTPUTS, False)
try:
    as_it_is.pack(linear, scales, zeros)
    error = "none"
except AttributeError as problem:
    error = str(problem)
stored = minus_one.state_dict()
print("tensors:", sorted(stored), "in both:", stored.keys() == as_it_is.state_dict().keys())
as_it_is.load_state_dict(stored)
one = torch.eye(INPUTS, dtype=torch.float16)
difference = (as_it_is(one) - minus_one(one)).unique().tolist()
print("weights of the same words, as auto_round less as auto_gptq:", difference, "- scale 0.125")
print("pack of the layer for auto_round:", error)
sys.exit(0 if difference == [0.125] and "device" in error else 1)
PYTHON
