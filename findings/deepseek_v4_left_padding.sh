#!/bin/sh
# transformers 5.24.0: DeepSeek-V4 answers otherwise where a prompt has padding on its left, as in a batch with a longer one.
#
# Layers with entries sum tokens by their columns, whatever attention_mask and position_ids say: padding is a part of entries, the
# windows begin elsewhere, and masked columns have entries that queries see.
#   expected: the logits of the prompt alone, as in layers of the kind sliding_attention
#   seen:     with 3 tokens of padding before 13, logits that differ by 30% and 69% of the largest
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
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - <<'PYTHON'
import sys

import torch
import transformers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, logging

logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
SIZES = dict(vocab_size=96, hidden_size=32, moe_intermediate_size=24, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(head_dim=16, q_lora_rank=12, o_groups=2, o_lora_rank=6, n_routed_experts=4, num_experts_per_tok=2)
SIZES |= dict(index_n_heads=16, index_head_dim=16, partial_rotary_factor=0.5, sliding_window=8, initializer_range=0.3)
SIZES |= dict(compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4})
torch.manual_seed(0)
apart = {}
for kind in ("sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"):
    model = DeepseekV4ForCausalLM(DeepseekV4Config(layer_types=[kind] * 3, **SIZES)).eval()
    prompt, padding = torch.randint(3, 96, (1, 13)), torch.full((1, 3), 2)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(prompt)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # as `generate` counts them
    with torch.no_grad():
        alone = model(prompt, use_cache=False).logits[:, -1]
        ids = torch.cat([padding, prompt], dim=1)
        padded = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
    apart[kind] = ((padded - alone).abs().max() / alone.abs().max()).item()
    print(f"{kind}: logits behind padding differ by {apart[kind]:.1e} of the largest")
plain, *compressed = apart.values()
sys.exit(0 if plain < 1e-4 and min(compressed) > 0.05 else 1)
PYTHON
