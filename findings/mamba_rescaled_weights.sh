#!/bin/sh
# transformers 5.24.0: a Mamba or Mamba 2 whose config.json has rescale_prenorm_residual is another model after each load.
#
# The key is for new models: the output projections are drawn smaller. The same division runs after a checkpoint was read.
#   expected: from_pretrained gives the weights that save_pretrained wrote, whatever the key says
#   seen:     so without the key; with it out_proj of every layer is the file's divided by the root of the number of layers, and
#             again at the next saving and loading
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
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
LAYERS = 3
SIZES = dict(vocab_size=32, hidden_size=32, num_hidden_layers=LAYERS, state_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MODELS = {
    "mamba": (transformers.MambaConfig, {}),
    "mamba2": (transformers.Mamba2Config, dict(num_heads=4, head_dim=16, n_groups=2)),
}
seen = {}
for name, (config, more) in MODELS.items():
    for rescales in (False, True):
        model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, **more, rescale_prenorm_residual=rescales))
        path = f"{sys.argv[1]}/{name}-{rescales}"
        model.save_pretrained(path)
        load = dict(transformers.AutoModelForCausalLM.from_pretrained(path).named_parameters())
        changed = {key: value / load[key] for key, value in model.named_parameters() if not torch.equal(value, load[key])}
        factors = [float(f) for ratio in changed.values() for f in (ratio.min(), ratio.max())]
        even = all(abs(factor - LAYERS**0.5) < 1e-5 for factor in factors)
        seen[name, rescales] = {key.rpartition("mixer.")[2] for key in changed}, even
        print(f"{name}, rescale_prenorm_residual {rescales}: changed by loading {sorted(changed)}, file / loaded {set(factors)}")
sys.exit(0 if all(seen[name, True] == ({"out_proj.weight"}, True) and seen[name, False] == (set(), True) for name in MODELS) else 1)
PYTHON
