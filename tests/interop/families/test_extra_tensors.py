"""Tensors that a family's table leaves out, and that transformers computes with: other values of them are refused by name.

`make test` refuses those that were recorded of transformers: extra_tensors.json. Of all families, with transformers itself:
    TORCH_PYTHON=PATH/bin/python python -m pytest tests/interop/families/test_extra_tensors.py
    TORCH_PYTHON=PATH/bin/python python tests/interop/families/test_extra_tensors.py    records them
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import safetensors.numpy

from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import wrappers

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "models" / "golden")]

import answers  # noqa: E402

PYTHON = os.environ.get("TORCH_PYTHON")
RECORDED = HERE / "extra_tensors.json"
TABLE = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def recorded(name):
    return json.loads((HERE / "recorded" / f"{name}.json").read_text())


def left_out(name, shapes):
    """Those tensors that the table of a family drops, and that are of no part that is reported."""
    family = recorded(name)
    names = wrappers.names(family["config"])
    return {key: shape for key, shape in shapes.items() if names.canonical(key) is None and not names.of_part(key)}


def used(folder):
    """The tensors that our tables drop, and that transformers computes with, by family."""

    def run(what):
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        argv = [PYTHON, HERE / "extra_tensors_peer.py", what, folder]
        done = subprocess.run(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout[-3000:]

    run("list")
    some = {name: left_out(name, shapes) for name, shapes in json.loads((folder / "names.json").read_text()).items()}
    (folder / "some.json").write_text(json.dumps({name: shapes for name, shapes in some.items() if shapes}))
    run("draw")
    return json.loads((folder / "used.json").read_text())


@pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch")
def test_what_transformers_computes_with_is_recorded(tmp_path):
    assert used(tmp_path) == TABLE


@pytest.mark.parametrize("name", TABLE)
def test_a_drawn_tensor_that_transformers_computes_with_is_refused(name, tmp_path):
    family = recorded(name)
    (tmp_path / "config.json").write_text(json.dumps(family["config"]))
    tensors = {key: answers.draw(key, tuple(shape)) for key, shape in family["tensors"].items()}
    assert left_out(name, TABLE[name]) == TABLE[name]
    for key, shape in TABLE[name].items():
        drawn = {key: np.array(answers.draw(f"{key}, drawn", tuple(shape)))}
        safetensors.numpy.save_file(tensors | drawn, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=rf"^{key} (differs from|has other values than)"):
            open_model.open_model(str(tmp_path))


def record():
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"{json.dumps(name)}: {json.dumps(of)}" for name, of in sorted(used(pathlib.Path(folder)).items())]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record()
