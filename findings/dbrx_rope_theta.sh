#!/bin/sh
# transformers 5.24.0: a DBRX rotates by 10,000 whatever rope_theta its attn_config has.
#
# DBRX's own files say the base in attn_config, 500,000 in those that Databricks published; transformers 4 rotated by it.
#   expected: the logits depend on attn_config's rope_theta, where nothing else in config.json names a base
#   seen:     they do not; rope_parameters is filled with 10,000, and only a base at the top level counts
#
# Exits with 1 if transformers does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - "$folder" <<'PYTHON'
import json
import pathlib
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
SIZES = dict(model_type="dbrx", vocab_size=64, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
EXPERTS = dict(ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2)
IDS = torch.arange(24)[None]


def logits(theta, **more):
    """The logits of one set of weights, with this rope_theta in attn_config."""
    config = dict(SIZES, ffn_config=EXPERTS, attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=theta), **more)
    (pathlib.Path(sys.argv[1]) / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(sys.argv[1]))
    model = model.float().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.3 * torch.randn(value.shape))
        return model(IDS).logits


usual, other, outside = logits(10_000.0), logits(500_000.0), logits(10_000.0, rope_theta=500_000.0)
inside = (usual - other).abs().max().item()
top = (usual - outside).abs().max().item()
print(f"attn_config.rope_theta 10,000 or 500,000: logits differ by {inside:.2g}; the same at the top level: by {top:.2g}")
sys.exit(0 if inside == 0 and top > 0.01 else 1)
PYTHON
