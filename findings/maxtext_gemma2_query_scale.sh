#!/bin/sh
# maxtext 0.2.5: Gemma 2 27B divides scores by the square root of 128, not of 144, as its own table of configurations says.
#
# MaxText folds the factor of queries into their weights when it reads Gemma 2 from Hugging Face, and its attention has none. The hook
# takes the square root of head_dim, whatever query_pre_attn_scalar says.
#   expected: the weights times 1/12, since query_pre_attn_scalar is 144
#   seen:     times 1/sqrt(128), and no factor in the attention: scores are 6% larger than transformers'
#
# Exits with 1 if maxtext does otherwise. PEER_PYTHON: a Python 3.12 with maxtext; else it is installed in a new folder.
set -eu
if [ -z "${PEER_PYTHON:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3.12 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet "maxtext[tpu]==0.2.5"
    PEER_PYTHON="$folder/venv/bin/python"
fi
JAX_PLATFORMS=cpu DECOUPLE_GCLOUD=TRUE "$PEER_PYTHON" - 2> /dev/null <<'PYTHON'
import importlib.metadata
import os
import sys

import jax
import maxtext
import numpy as np
from maxtext.checkpoint_conversion.utils import hf_model_configs, param_mapping
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils_nnx, model_creation_utils

values = hf_model_configs.HF_MODEL_CONFIGS["gemma2-27b"].to_dict()
name = "params-decoder-layers-self_attention_local-query-kernel"
hooks = param_mapping.HOOK_FNS["gemma2-27b"](values, None, scan_layers=True, saving_to_hf=False)[name]
weight = np.ones((values["num_attention_heads"] * values["head_dim"], 8), np.float32)
for hook in hooks:
    weight = hook(weight, (8, values["num_attention_heads"], values["head_dim"]))
settings = dict(
    model_name="gemma2-27b", override_model_config=True, base_emb_dim=64, base_num_query_heads=4, base_num_kv_heads=2,
    base_mlp_dim=96, base_num_decoder_layers=1, vocab_size=128, max_target_length=32, per_device_batch_size=1, run_name="run",
    base_output_directory="/nowhere", hardware="cpu", enable_checkpointing=False, skip_jax_distributed_system=True,
    scan_layers=False,
)  # fmt: skip
base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
config = pyconfig.initialize(["run", base, *(f"{key}={value}" for key, value in settings.items())])
model = model_creation_utils.from_config(config, rngs=maxtext_utils_nnx.create_nnx_rngs(config, rng_key=jax.random.key(0)))
factor = model.decoder.layers_0.self_attention_local.query_pre_attn_scalar
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("maxtext", "transformers")))
print(f"query_pre_attn_scalar {values['query_pre_attn_scalar']}, head_dim {values['head_dim']}")
print(f"factor of the queries' weights: {weight.max():.5f}; 1/sqrt(144) is {144**-0.5:.5f}; of the attention: {factor}")
folded = np.allclose(weight, 128**-0.5)
sys.exit(not (values["query_pre_attn_scalar"] == 144 and folded and factor in (None, 1.0)))
PYTHON
