"""MaxText's models of maxtext_cases.py and their logits: the peer program of test_maxtext.py.

    python tests/interop/maxtext/maxtext_peer.py FOLDER [NAME ...]

Runs in an environment of its own (Python 3.12: pip install 'maxtext[tpu]==0.2.5'). FOLDER/NAME/0/items is the model as
MaxText writes it, with parameters that depend on their names alone (maxtext_values.py); FOLDER/NAME/config.yml its settings,
as save_config_to_gcs writes them; FOLDER/NAME/logits.npy what it answers to maxtext_values.TOKENS. FOLDER/recorded.json, which tests/interop/maxtext/recorded.json
is a copy of, has the names and shapes of the arrays, the settings that capibara reads, and every eighth of the logits.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import yaml
from flax import nnx

# Settings that capibara/interop/maxtext reads and the cases change, or model_name does.
READ = (
    "model_name decoder_block param_scan_axis rope_type rope_use_scale rope_max_timescale rope_linear_scaling_factor "
    "local_rope_max_timescale normalization_layer_epsilon normalize_embedding_logits head_dim num_experts_per_tok "
    "mlp_activations sliding_window_size attn_logits_soft_cap final_logits_soft_cap max_target_length attention_type"
).split()
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from maxtext_cases import CASES, SIZES  # noqa: E402
from maxtext_values import TOKENS, value  # noqa: E402


def write(folder: pathlib.Path, settings: dict[str, object]) -> dict[str, object]:
    from maxtext.common import checkpointing
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils_nnx, model_creation_utils

    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    fixed = {
        "run_name": "run", "base_output_directory": str(folder), "hardware": "cpu", "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
    }  # fmt: skip
    texts = {key: json.dumps(x) if isinstance(x, list) else x for key, x in (SIZES | settings | fixed).items()}
    config = pyconfig.initialize(["peer", base, *(f"{key}={x}" for key, x in texts.items())])
    mesh = None
    rngs = maxtext_utils_nnx.create_nnx_rngs(config, rng_key=jax.random.key(0))
    model = model_creation_utils.from_config(config, mesh=mesh, rngs=rngs)
    params = nnx.state(model, nnx.Param)
    tree = nnx.to_pure_dict(params)
    shapes = {}

    def made(path, x):
        name = "/".join(str(key.key) for key in path)
        shapes[name] = list(x.shape)
        return jnp.asarray(value(name, x.shape))

    tree = jax.tree_util.tree_map_with_path(made, tree)
    nnx.replace_by_pure_dict(params, tree)
    nnx.update(model, params)
    positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    logits = model(
        decoder_input_tokens=jnp.asarray(TOKENS), decoder_positions=jnp.asarray(positions),
        decoder_segment_ids=jnp.ones_like(TOKENS), enable_dropout=False,
    )  # fmt: skip
    logits = logits[0] if isinstance(logits, tuple) else logits
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "logits.npy", np.asarray(logits, np.float32))
    checkpointing.save_params_to_path(str(folder / "0"), {"params": tree})
    with open(folder / "config.yml", "w", encoding="utf-8") as file:
        yaml.dump(dict(config.get_keys()), file)
    texts = {key: getattr(x, "value", x) for key, x in config.get_keys().items() if key in READ}
    sample = np.asarray(logits, np.float64)[0, ::6, ::8]
    return {"settings": texts, "shapes": shapes, "logits": np.round(sample, 6).tolist()}


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    path = folder / "recorded.json"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    for name in sys.argv[2:] or CASES:
        recorded[name] = write(folder / name, CASES[name])
        print(name, flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in CASES if name in recorded]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
