#!/bin/sh
# transformers 5.24.0: a Nemotron-H keeps its steps above time_step_min, and does not read time_step_limit.
#
# In Mamba 2, Bamba and NVIDIA's own code time_step_limit bounds a token's step, and time_step_min is for new weights alone.
#   expected: the logits of a Nemotron-H depend on time_step_limit as those of a Mamba 2 do, and not on time_step_min
#   seen:     the other way round: time_step_limit changes nothing, time_step_min does; a Mamba 2 does as expected
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
SIZES = dict(vocab_size=32, hidden_size=32, n_groups=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MODELS = {
    "mamba2": dict(num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8),
    "nemotron_h": dict(layers_block_type=["linear_attention"] * 2, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8),
}
IDS = torch.arange(1, 15)[None]
WHOLE = (0.0, float("inf"))


def logits(kind, **limits):
    """The logits of one set of weights with these keys."""
    config = transformers.AutoConfig.for_model(kind, **SIZES, **MODELS[kind], **limits)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.4 * torch.randn(value.shape))
        return model(IDS, use_cache=False).logits


moved = {}
for kind in MODELS:
    usual = logits(kind, time_step_limit=WHOLE, time_step_min=0.001)
    for key, value in (("time_step_limit", (0.5, float("inf"))), ("time_step_min", 0.5)):
        other = logits(kind, **{"time_step_limit": WHOLE, "time_step_min": 0.001, key: value})
        moved[kind, key] = ((usual - other).abs().max() / usual.abs().max()).item()
        print(f"{kind}, {key} {value}: logits differ by {moved[kind, key]:.2g} of the largest")
seen = {(kind, key) for (kind, key), apart in moved.items() if apart > 0.01}
sys.exit(0 if seen == {("mamba2", "time_step_limit"), ("nemotron_h", "time_step_min")} else 1)
PYTHON
