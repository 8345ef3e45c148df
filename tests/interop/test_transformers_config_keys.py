"""Every key of a config.json means what transformers says: one key at a time, of every family, by logits.

make test-peer PEER=transformers PEER_PYTHON=PATH/bin/python runs the sweep (about 6,000 configurations, an hour on two cores);
CONFIG_FAMILIES="llama t5" takes some families. `make test` compares what was recorded of it: config_keys.json.
    python tests/interop/test_transformers_config_keys.py FOLDER [FAMILY ...]    records it from a sweep, of some families beside the others
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors
from jax.sharding import SingleDeviceSharding

from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.models import api

HERE = pathlib.Path(__file__).resolve().parent
_SPEC = importlib.util.spec_from_file_location("config_keys", HERE / "config_keys.py")
config_keys = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(config_keys)
PYTHON = os.environ.get("TORCH_PYTHON")
RECORDED = HERE / "config_keys.json"
sys.path.insert(0, str(HERE / "families"))

import encdec_families  # noqa: E402
import encoder_families  # noqa: E402
from family_cases import CASES  # noqa: E402

FAMILIES = (
    "gpt2", "gpt_neox", "mistral", "gemma", "gemma2", "gemma3n", "phi3", "llama", "llama_llama3", "llama_yarn", "llama_dynamic",
    "gemma3_text", "gemma3", "qwen2", "qwen3", "phi3_long", "mixtral", "qwen3_moe", "gpt_oss", "t5", "umt5", "bert", *CASES,
)  # fmt: skip
ROWS, LENGTH, ENCODER_LENGTH, PADDING, VOCAB = 2, 24, 32, 7, 96
# Differences beyond it are not of rounding: the reference's own answers in float32 and float64 differ by `rounding`.
ATOL, ROUNDINGS = 2e-4, 16
ENCODERS = {"bert", *encoder_families.TYPES}
UNREAD = 1e-5  # logits that one key changes by less are as without it
# The tensors' dtype, and rounding: with other weights, or bits, and the same model.
OF_NUMBERS = ("dtype", "torch_dtype", "attn_implementation", "_attn_implementation", "chunk_size")
# What acts on longer rows, or larger coefficients, than those of the batch: it changes the model, and not these logits.
BEYOND = ("dynamic", "altup_coef_clip")
# The most tokens of a row, where positions of longer ones are computed, too: by transformers (M2M-100), or by us (RoFormer).
LONGEST = dict.fromkeys(("m2m_100", "roformer"), ("max_position_embeddings",))
# Refused although transformers 5.24 ignores them, and why.
STRICTER = {
    "add_cross_attention": "its tensors would be left out",
    "is_decoder": "a BERT with it predicts the next token in other versions",
    "position_embedding_type": "transformers 4 computes it",
    "per_layer_config": "families that know it compute layers that differ",
    "rope_type": "a kind of scaling that is not known, where its parameters scale nothing",
    "use_bidirectional_attention": "whether it is ignored depends on the implementation of attention",
}
# Keys with which transformers 5.24 changes weights as it loads them, it sets this row of the embedding to 0; and those that
# make a token of the batch the place of an image, which it embeds as another one; findings/mamba_rescaled_weights.sh.
MISLOADED = {"youtu": ("pad_token_id",), "kimi_k25": ("image_token_id", "video_token_id")}
MISLOADED |= dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), ("rescale_prenorm_residual",))
# It divides weights as it evaluates, and not the epsilon of what normalises their results; findings/rwkv_evaluated_weights.sh.
# Without a number of layers a file has 32, of which it divides those after rescale_every (6 where the case does not say).
MISLOADED |= {"rwkv": ("rescale_every",), "rwkv_tied": ("rescale_every", "num_hidden_layers")}
# Its tables of decays, which are no parameters, are stored and loaded in the dtype of the weights, and rounded to it.
MISLOADED |= dict.fromkeys(("minimax", "minimax_window", "minimax_lightning"), ("dtype", "torch_dtype"))
MISLOADED |= dict.fromkeys(("gemma4_vl", "gemma4_vl_moe"), ("image_token_id", "video_token_id", "audio_token_id"))
# It makes a token of the batch that of padding, which has no place in a text: the next one has the same position.
MISLOADED |= {"m2m_100": ("pad_token_id",)}
_INDICES = ("image_token_index", "video_token_index")
MISLOADED |= {"minimax_m3_vl": (*_INDICES, "image_token_id", "video_token_id")}


def inputs(config: api.TransformerConfig, model_type: str) -> dict[str, np.ndarray]:
    """The batch of tests/models/golden, or of encoder_families, which the peer program has, too."""

    def draw(length: int, seed: int, entries: int = VOCAB) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, entries, (ROWS, length)).astype(np.int32)

    def packed(tokens: np.ndarray, padding: int) -> dict[str, np.ndarray]:
        segments = np.ones(tokens.shape, np.int32)
        segments[-1, tokens.shape[1] - padding :] = 0
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        return {"tokens": tokens, "segment_ids": segments, "positions": positions}

    if model_type in encoder_families.TYPES:
        batch = encoder_families.batch(config.token_types)
        return packed(batch["tokens"], PADDING) | batch
    batch = packed(draw(LENGTH, 0), PADDING if model_type == "bert" else 0)
    if model_type == "bert":
        batch["token_types"] = draw(LENGTH, 1, 2)
    if model_type in ("t5", "umt5"):
        batch |= {f"encoder_{key}": value for key, value in packed(draw(ENCODER_LENGTH, 2), PADDING).items()}
    return batch | (encdec_families.encoder_entries() if model_type in encdec_families.TYPES else {})


class Ours:
    """Our logits of folders; equal configurations with equal tensors are computed once."""

    def __init__(self):
        self._logits: dict[tuple[str, str], np.ndarray] = {}

    def logits(self, folder: pathlib.Path) -> np.ndarray:
        foreign = open_model.open_model(str(folder))
        config = hf_config.from_hf(foreign.config, dtype="float32")
        model = api.build(config)
        open_model.check(foreign, model)
        key = (repr(config), hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
        if key not in self._logits:
            here = SingleDeviceSharding(jax.devices()[0])
            params = open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))
            self._logits[key] = np.asarray(jax.jit(model.logits)(params, inputs(config, foreign.config["model_type"])))
        return self._logits[key]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    given = os.environ.get("CONFIG_SWEEP")  # a folder that the peer program has written
    return pathlib.Path(given) if given else tmp_path_factory.mktemp("config_keys")


def is_read(row: dict, root: pathlib.Path, base: np.ndarray) -> bool:
    """Whether the key changes what transformers computes, or the shapes of the model's tensors."""
    theirs = np.load(root / row["case"] / "logits.npy")
    if theirs.shape != base.shape or np.abs(theirs - base).max() >= UNREAD:
        return True
    return shapes(root / row["case"]) != shapes(root / "0000")


def shapes(folder: pathlib.Path) -> dict[str, list[int]]:
    with safetensors.safe_open(folder / "model.safetensors", framework="numpy") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}


@pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch")
@pytest.mark.strict_promotion
@pytest.mark.parametrize("family", os.environ.get("CONFIG_FAMILIES", " ".join(FAMILIES)).split())
def test_every_key_means_what_transformers_says(family, sweep):
    root = sweep / family
    if not (root / "cases.json").exists():
        subprocess.run([PYTHON, HERE / "config_keys_peer.py", sweep, family], check=True)
    rows = [row for row in json.loads((root / "cases.json").read_text())["cases"] if "case" in row]
    rows = [row for row in rows if config_keys.name_of(row["key"]) not in MISLOADED.get(family, ())]
    base, ours, faults = np.load(root / "0000" / "logits.npy"), Ours(), []
    read = {config_keys.name_of(row["key"]) for row in rows if is_read(row, root, base)}
    kept = np.ones((ROWS, LENGTH), bool)
    kept[-1, LENGTH - PADDING :] = CASES.get(family, {"model_type": family})["model_type"] not in ENCODERS  # padding
    for row in rows:
        name = config_keys.name_of(row["key"])
        try:
            logits = ours.logits(root / row["case"])
        except UserError as error:
            if not (
                row["key"].startswith("-") or name in STRICTER or (name in read and is_named(name, row, str(error)))
            ):
                faults.append((row["key"], row["value"], str(error)))
            continue
        theirs = np.load(root / row["case"] / "logits.npy")
        entries = min(theirs.shape[-1], logits.shape[-1])
        apart = np.abs(theirs[..., :entries] - logits[..., :entries])[kept].max()
        if apart > max(ATOL, ROUNDINGS * row["rounding"]):
            faults.append((row["key"], row["value"], f"logits differ by {apart:.2e}"))
    names = {config_keys.name_of(row["key"]) for row in rows}
    print(f"\n{family}: {len(rows)} configurations, {len(names)} keys, {len(read)} of them read, {len(faults)} faults")
    assert not faults
    assert len(names) >= 20


def is_named(name: str, row: dict, message: str) -> bool:
    """Whether a message names the key, or a key inside of its object."""
    inside = row["value"] if isinstance(row["value"], dict) else {}
    return any(key in message for key in (name, *inside))


def record(sweep: pathlib.Path, *families: str) -> None:
    """Writes which keys transformers reads, from a sweep."""
    table = json.loads(RECORDED.read_text()) if families else {}
    for family in families or FAMILIES:
        root = sweep / family
        found = json.loads((root / "cases.json").read_text())
        base, cases = np.load(root / "0000" / "logits.npy"), {}
        for row in found["cases"]:
            name = config_keys.name_of(row["key"])
            acts = name not in (*BEYOND, *LONGEST.get(family, ()), *MISLOADED.get(family, ())) and not (
                isinstance(row["value"], dict) and row["value"].get("type") in BEYOND
            )
            if "case" in row and row["key"] and acts and name not in OF_NUMBERS:
                read = is_read(row, root, base)
                values = cases.setdefault(row["key"], {}).setdefault("read" if read else "unread", [])
                if len(values) < (2 if read else 1):
                    values.append(row["value"])
        table[family] = {"transformers": found["transformers"], "base": found["base"], "cases": cases}
    lines = [f"{json.dumps(family)}: {json.dumps(value, separators=(',', ':'))}" for family, value in table.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if RECORDED.exists():
    TABLE = json.loads(RECORDED.read_text())
    READ = {config_keys.name_of(key) for table in TABLE.values() for key, of in table["cases"].items() if "read" in of}

    @pytest.mark.parametrize("family", TABLE)
    def test_a_key_is_read_if_transformers_reads_it(family):
        base, faults = TABLE[family]["base"], []
        usual = hf_config.resolved(hf_config.from_hf(base))
        for key, cases in TABLE[family]["cases"].items():
            name = config_keys.name_of(key)
            for kind, values in cases.items():
                for value in values:
                    try:
                        config = hf_config.from_hf(config_keys.changed(base, key, value))
                    except UserError as error:
                        named = name in STRICTER or name in READ and is_named(name, {"value": value}, str(error))
                        fine = key.startswith("-") or named
                    else:
                        changed = hf_config.resolved(config) != usual
                        fine = changed == (kind == "read")
                    if not fine:
                        faults.append((key, value, kind))
        assert not faults


if __name__ == "__main__":
    record(pathlib.Path(sys.argv[1]), *sys.argv[2:])
