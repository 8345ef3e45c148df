"""We read what transformers writes for every family (folders.json: config.json and the tensors' shapes). With weights
drawn by the tensors' names, our answers are transformers' (tests/models/golden).

`python tests/interop/peer.py record tests/interop/folders.json` writes folders.json, with transformers 5.24.
"""

import json
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import families
from capibara.models import api

HERE = pathlib.Path(__file__).resolve().parent
GOLDEN = HERE.parent / "models" / "golden"
sys.path.insert(0, str(GOLDEN))

import answers  # noqa: E402

FOLDERS = json.loads((HERE / "folders.json").read_text())
DECODERS, MOE, ENCODERS = (
    json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("decoders", "moe", "encoders")
)


# tests/models/test_parity.py compares the other families' logits, with tensors of the same names.
QUICK = ("phi3", "gpt_neox", "gemma3", "mixtral", "qwen3_moe", "gpt_oss", "t5_1_1", "bert")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.heavy) for name in FOLDERS]


def config_of(name):
    return families.with_head_of(FOLDERS[name]["config"], FOLDERS[name]["shapes"])


class Drawn:
    """A folder whose tensors are drawn by their names."""

    def __init__(self, name):
        self.config, self.tokenizer, self.about = config_of(name), {}, {}
        self._shapes = {key: tuple(shape) for key, shape in FOLDERS[name]["shapes"].items()}

    def shapes(self):
        return self._shapes

    def read(self, name):
        shape = self._shapes[name]
        if expert := re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name):
            # transformers' answers have weights that were drawn for all experts of a layer together.
            layer, number, kind = expert.groups()
            if kind in ("w2", "down_proj"):
                return answers.draw(f"{layer}.mlp.experts.down_proj", (self._experts, *shape))[int(number)]
            both = answers.draw(f"{layer}.mlp.experts.gate_up_proj", (self._experts, 2 * shape[0], shape[1]))
            return np.split(both[int(number)], 2)[kind in ("w3", "up_proj")]
        return answers.draw(name.replace("block_sparse_moe", "mlp"), shape)

    @property
    def _experts(self):
        return self.config["num_local_experts"]


def loaded(name):
    foreign = Drawn(name)
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return model, open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))


def batch_of(tokens, padding=0):
    tokens = np.array(tokens, np.int32)
    segments = np.ones_like(tokens)
    segments[-1, tokens.shape[1] - padding :] = 0
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions}


def answered(name):
    """Our logits of a row without padding, and transformers', at the recorded positions."""
    model, params = loaded(name)
    if name in ENCODERS and name != "bert":
        encoder = batch_of(ENCODERS["encoder_tokens"], ENCODERS["padding"])
        batch = batch_of(ENCODERS["tokens"]) | {f"encoder_{key}": value for key, value in encoder.items()}
    elif name == "bert":
        batch = batch_of(ENCODERS["tokens"], ENCODERS["padding"])
        batch["token_types"] = np.array(ENCODERS["token_types"], np.int32)
    else:
        batch = batch_of(DECODERS["tokens"])
    got = np.asarray(jax.jit(model.logits)(params, batch))[0 if name in ENCODERS else -1]
    got = got[np.ix_(DECODERS["positions"], DECODERS["entries"])]
    if name in ENCODERS:
        return got, ENCODERS[name]["logits"][0]
    return got, MOE[name] if name in MOE else DECODERS[name]["logits"]


@pytest.mark.parametrize("name", ALL)
def test_a_folder_answers_as_transformers_did(name):
    got, want = answered(name)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_we_write_of_it_has_the_same_tensors(name):
    config = hf_config.from_hf(config_of(name))
    values = hf_config.to_hf(config, FOLDERS[name]["config"])
    assert values["model_type"] == FOLDERS[name]["config"]["model_type"]
    got = open_model.hf_shapes(api.build(config), values["model_type"])
    assert got == {key: tuple(shape) for key, shape in FOLDERS[name]["shapes"].items()}
