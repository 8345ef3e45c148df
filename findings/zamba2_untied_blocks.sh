#!/bin/sh
# transformers 5.24.0: the blocks that layers of Zamba2 share are shared only where the head is tied to the embedding.
#
# tie_word_embeddings is of the head. The blocks are tied by the same list of tied weights, which is not read where it is false.
#   expected: num_mem_blocks blocks, whatever tie_word_embeddings says
#   seen:     with false each layer has a block of its own, and files have its tensors: a file of a model with one block lacks them,
#             and they are drawn at random when it is loaded
# Beside it, use_shared_attention_adapter with num_key_value_heads below num_attention_heads cannot be run: adapters of keys and
# values have the width of queries.
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
from transformers import Zamba2Config, Zamba2ForCausalLM, logging

logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
SIZES = dict(vocab_size=96, hidden_size=32, num_hidden_layers=3, layers_block_type=["hybrid", "linear_attention", "hybrid"])
SIZES |= dict(n_mamba_heads=8, mamba_d_state=8, num_attention_heads=4, intermediate_size=48, adapter_rank=4)
shared = {}
for tied in (True, False):
    model = Zamba2ForCausalLM(Zamba2Config(**SIZES, tie_word_embeddings=tied))
    first, last = (model.model.layers[n].shared_transformer.self_attn.q_proj.weight for n in (0, 2))
    shared[tied] = first is last
    print(f"tie_word_embeddings {tied}: layers 0 and 2 share their block: {shared[tied]}")
grouped = Zamba2ForCausalLM(Zamba2Config(**SIZES, num_key_value_heads=2, use_shared_attention_adapter=True))
try:
    grouped(torch.arange(8)[None])
    error = "none"
except RuntimeError as problem:
    error = str(problem)[:60]
print("two key/value heads with adapters of attention:", error)
sys.exit(0 if shared == {True: True, False: False} and error.startswith("The size of tensor") else 1)
PYTHON
