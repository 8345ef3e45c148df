"""Declared families of GGUF files: they come back as they were, and llama.cpp computes the same from them.

`make test` compares with recorded tokens of llama.cpp, gguf_families.json; with xllamacpp installed
    .venv/bin/python tests/interop/test_gguf_families.py [NAME ...]    records them.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import jax
import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "benchmarks")]
import gguf_cases  # noqa: E402
from gguf_families import CASES, tensors  # noqa: E402

from capibara.interop import open_model  # noqa: E402
from capibara.interop.gguf.read import open_gguf  # noqa: E402
from capibara.interop.gguf.write import write_gguf  # noqa: E402
from capibara.interop.hf import config as hf_config  # noqa: E402
from capibara.models import api  # noqa: E402

RECORDED = HERE / "gguf_families.json"
COUNT = 48
# Seeds of prompts after which llama.cpp does not generate its end token.
SEEDS = {"jamba": 1, "glm4_moe": 2, "qwen3_next": 1, "granitemoehybrid_dense": 1, "hunyuan_v1_moe": 1, "minimax_m2": 1}


def prompt(name: str) -> list[int]:
    return [int(i) for i in np.random.default_rng(SEEDS.get(name, 0)).integers(2, 300, 12)]


def write(path: pathlib.Path, name: str, dtype: str = "f32", **changes: Any) -> pathlib.Path:
    """The tiny model of a case, as a GGUF file."""
    config = CASES[name] | changes
    write_gguf(path, config, tensors(config), gguf_cases.byte_level(), dtype=dtype)
    return path


def logits(path: pathlib.Path, ids: list[int]) -> np.ndarray:
    """Our model's logits [T, V] in float32, with the weights of a file."""
    foreign = open_gguf(path)
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))
    tokens = np.array([ids], np.int32)
    positions = np.arange(len(ids), dtype=np.int32)[None]
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    return np.asarray(jax.jit(model.logits)(params, batch))[0]


def continued(path: pathlib.Path, name: str) -> dict[str, Any]:
    """What llama.cpp generates from the prompt, and the log probabilities after it."""
    from gguf_files import LlamaCpp

    with LlamaCpp(sys.executable, path) as peer:
        ids = peer.ask("continue", ids=prompt(name), count=COUNT)["ids"]
        best = peer.ask("continue", ids=prompt(name), count=1, best=gguf_cases.VOCAB)["best"]
    return {"ids": ids, "best": best[0] if best else []}


FOLDED = ("falcon_h1_factors",)  # whose factors are in the weights of a file


@pytest.mark.parametrize("name", [name for name in CASES if name not in FOLDED])
def test_a_declared_family_comes_back_as_it_was(name, tmp_path):
    config, read = CASES[name], open_gguf(write(tmp_path / "model.gguf", name))
    assert hf_config.differences(read.config, hf_config.from_hf(config)) == {}
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        assert read.config.get(key) == config.get(key)
    values = dict(tensors(config))
    assert read.shapes() == {key: value.shape for key, value in values.items()}
    for key, value in values.items():
        # A file holds the exponentials of these, and several logarithms have the same one.
        rounding = np.spacing(np.float32(1)) if key.endswith("A_log") else 0
        np.testing.assert_allclose(read.read(key), value, rtol=0, atol=rounding, err_msg=key)


def check(path: pathlib.Path, name: str, ids: list[int], best: list[Any]) -> None:
    """Compares ours with what llama.cpp generates."""
    # ggml reads GELU's tanh from a table in float16.
    tolerance = 2e-2 if "gelu" in hf_config.from_hf(open_gguf(path).config).activation else 1e-4
    ours = logits(path, prompt(name) + ids)[len(prompt(name)) - 1 : -1]
    assert len(ids) == COUNT and ours.argmax(-1).tolist() == ids
    log_probabilities = np.asarray(jax.nn.log_softmax(ours[0]))
    for token, log_probability in best:
        assert abs(log_probabilities[token] - log_probability) < tolerance


# Every third of them in `make test`.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy if at % 3 else ()) for at, name in enumerate(sorted(CASES))]
)
def test_our_tokens_are_those_recorded_of_llama_cpp(name, tmp_path):
    check(write(tmp_path / "model.gguf", name), name, json.loads(RECORDED.read_text())[name], [])


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_generates_what_we_do(name, tmp_path):
    pytest.importorskip("xllamacpp")
    path = write(tmp_path / "model.gguf", name)
    check(path, name, **continued(path, name))


def record(names: list[str]) -> None:
    """Writes the tokens that llama.cpp generates."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            recorded[name] = continued(write(pathlib.Path(folder) / "model.gguf", name), name)["ids"]
    lines = [f"{json.dumps(name)}: {json.dumps(ids)}" for name, ids in sorted(recorded.items())]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record(sys.argv[1:] or list(CASES))
