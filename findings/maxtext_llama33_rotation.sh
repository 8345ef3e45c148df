#!/bin/sh
# maxtext 0.2.5: Llama 3.3 70B is rotated as Llama 3, not as Llama 3.1, and no word is said.
#
# Llama 3.3 has the architecture of Llama 3.1: config.json of both has rope_type llama3, which scales low frequencies. MaxText takes
# that rotation, which also pairs alternating features of a head, if model_name begins with "llama3.1" or rope_type is "llama3.1". Its
# settings of llama3.3-70b set neither.
#   expected: the same parameters and tokens give the logits of llama3.1-70b
#   seen:     they give those of llama3-70b, which differ; with rope_type=llama3.1 they give those of llama3.1-70b
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
import jax.numpy as jnp
import maxtext
import numpy as np
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils_nnx, model_creation_utils

BASE = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
SMALL = dict(
    base_emb_dim=64, base_num_query_heads=4, base_num_kv_heads=2, head_dim=16, base_mlp_dim=96, base_num_decoder_layers=2,
    vocab_size=128, max_target_length=32, per_device_batch_size=1, dtype="float32", weight_dtype="float32", run_name="run",
    attention="dot_product", matmul_precision="highest", override_model_config=True, hardware="cpu",
    enable_checkpointing=False, skip_jax_distributed_system=True,
)  # fmt: skip
TOKENS = jnp.arange(1, 25)[None]


def logits(model_name, **settings):
    """Of random parameters, which depend on their names and sizes alone."""
    settings = SMALL | {"model_name": model_name, "base_output_directory": "/nowhere"} | settings
    config = pyconfig.initialize(["run", BASE, *(f"{key}={value}" for key, value in settings.items())])
    rngs = maxtext_utils_nnx.create_nnx_rngs(config, rng_key=jax.random.key(0))
    model = model_creation_utils.from_config(config, rngs=rngs)
    result = model(
        decoder_input_tokens=TOKENS, decoder_positions=jnp.arange(24)[None],
        decoder_segment_ids=jnp.ones_like(TOKENS), enable_dropout=False,
    )  # fmt: skip
    return np.asarray(result[0] if isinstance(result, tuple) else result)


sys.stdout.flush()
llama33, llama31, llama3 = map(logits, ("llama3.3-70b", "llama3.1-70b", "llama3-70b"))
named = logits("llama3.3-70b", rope_type="llama3.1")
apart = lambda a, b: float(np.abs(a - b).max() / np.abs(b).max())
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("maxtext", "jax")))
print(f"llama3.3-70b and llama3-70b: {apart(llama33, llama3):.1e} of the largest logit")
print(f"llama3.3-70b and llama3.1-70b: {apart(llama33, llama31):.1e}")
print(f"llama3.3-70b with rope_type=llama3.1 and llama3.1-70b: {apart(named, llama31):.1e}")
sys.exit(not (apart(llama33, llama3) == 0 and apart(llama33, llama31) > 1e-3 and apart(named, llama31) == 0))
PYTHON
