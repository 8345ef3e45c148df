#!/bin/sh
# mlx-lm 0.32.2: of Qwen 2 and Cohere the rotary base that transformers 5 has saved is not read, and no word is said.
#
# transformers 5 writes it to config.json as rope_parameters.rope_theta. mlx-lm's classes of these families look for rope_theta at the
# top, and have another default for it: 1,000,000 in Qwen 2, 8,000,000 in Cohere.
#   expected: logits as transformers', or an error, as mlx-lm raises for families whose rope_theta has no default (Granite, OLMo 3)
#   seen:     other logits; the same folder with rope_theta written at the top, too, has transformers' logits
#
# Exits with 1 if mlx-lm does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
if [ -z "${PEER_PYTHON:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - <<'PYTHON'
import importlib.metadata
import json
import pathlib
import sys
import tempfile

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
BASE = 10_000.0
TOKENS = [list(range(3, 35))]


def difference(folder, logits):
    """The largest difference of mlx-lm's logits, relative to the largest logit."""
    model, _ = load_model(folder)
    ours = np.array(model(mx.array(TOKENS)).astype(mx.float32))
    return float(np.abs(ours - logits).max() / np.abs(logits).max())


differences = {}
for family in ("qwen2", "cohere"):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": BASE}
    config = transformers.AutoConfig.for_model(family, **SIZES, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for value in model.parameters():
        if value.ndim > 1:
            value.data.normal_(std=0.3)
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits.numpy()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model.save_pretrained(folder)
        file = folder / "config.json"
        saved = json.loads(file.read_text())
        assert saved["rope_parameters"]["rope_theta"] == BASE and "rope_theta" not in saved
        as_saved = difference(folder, logits)
        file.write_text(json.dumps(saved | {"rope_theta": BASE}))
        differences[family] = (as_saved, difference(folder, logits))
    print(f"{family}: as saved {differences[family][0]:.1e}, with rope_theta at the top {differences[family][1]:.1e}")
sys.exit(0 if all(saved > 1e-2 and control < 1e-4 for saved, control in differences.values()) else 1)
PYTHON
