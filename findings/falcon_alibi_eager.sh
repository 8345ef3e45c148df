#!/bin/sh
# transformers 5.24.0: a Falcon with ALiBi (falcon-rw-1b's layout) has two answers, by the implementation of attention.
#
# The model adds ALiBi's biases to its mask. With sdpa (the default) attention adds that mask once; eager attention adds the
# mask and then the biases again, so that each head's slope counts twice.
#   expected: the same logits with attn_implementation="sdpa" and "eager", as for a Falcon with rotary positions
#   seen:     they differ by more than a hundredth with ALiBi, by rounding alone with rotary positions
#
# Exits with 1 if transformers does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
if [ -z "${PEER_PYTHON:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - <<'PYTHON'
import sys
import warnings

import torch
import transformers

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
IDS = torch.arange(1, 25)[None]


def logits(alibi, how):
    config = transformers.FalconConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=alibi, parallel_attn=False,
        multi_query=False, bias=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM._from_config(config, attn_implementation=how, dtype=torch.float32).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.3 * torch.randn(value.shape))
        return model(IDS, use_cache=False).logits


def apart(alibi):
    """The largest difference of the logits, relative to the largest of them."""
    eager, sdpa = logits(alibi, "eager"), logits(alibi, "sdpa")
    return ((eager - sdpa).abs().max() / sdpa.abs().max()).item()


found = {alibi: apart(alibi) for alibi in (True, False)}
for alibi, value in found.items():
    print(f"alibi={alibi}: logits of eager and sdpa differ by {value:.1e} of the largest")
sys.exit(0 if found[True] > 0.01 and found[False] < 1e-5 else 1)
PYTHON
