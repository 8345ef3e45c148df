#!/bin/sh
# transformers 5.24.0: a Mamba 2 layer forgets its time_step_limit when it generates with a cache.
#
# The pass over several tokens clamps each token's step to time_step_limit; the pass over one token with a state does not.
#   expected: the last token's logits are the same for the whole row at once and for its last token after a cache of the others
#   seen:     so without a limit (to rounding); with one that acts they differ by more than a hundredth of the largest logit
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

import torch
import transformers

transformers.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
IDS = torch.arange(1, 15)[None]


def apart(limit):
    """The largest difference of the last token's logits, with and without a cache, relative to the largest of them."""
    config = transformers.Mamba2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2, expand=2,
        chunk_size=16, time_step_limit=limit, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.4 * torch.randn(value.shape))
        whole = model(IDS, use_cache=False).logits[:, -1]
        read = model(IDS[:, :-1], use_cache=True)
        step = model(IDS[:, -1:], cache=read["cache"], use_cache=True).logits[:, -1]
    return ((whole - step).abs().max() / whole.abs().max()).item()


found = {name: apart(limit) for name, limit in (("none", (0.0, float("inf"))), ("0.0 to 0.1", (0.0, 0.1)))}
for name, value in found.items():
    print(f"time_step_limit {name}: with and without a cache, logits differ by {value:.1e} of the largest")
sys.exit(0 if found["none"] < 1e-4 and found["0.0 to 0.1"] > 0.01 else 1)
PYTHON
