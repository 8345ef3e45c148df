"""Distillation as in TRL.

Needs an environment with torch and trl: make test-peer PEER=transformers PEER_PYTHON=PATH/bin/python
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import test_trl_distillation as ours  # noqa: E402
import test_trl_rollouts  # noqa: E402
from test_transformers_trl import of_folder  # noqa: E402

PYTHON = os.environ.get("TORCH_PYTHON")
PARAMETERS = 2e-5  # of the learning rate 1e-3

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch"),
    pytest.mark.standard_promotion,
]


@pytest.fixture(scope="module")
def folder(toy_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    shutil.copytree(toy_tokenizer, folder / "tokenizer")
    ours.write_chats(folder)
    cases = {name: (*theirs, ours.SCALE) for name, (_, theirs) in ours.LOSSES.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    argv = [PYTHON, str(HERE / "distillation_peer.py"), str(folder)]
    done = subprocess.run(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    base, steps = jax.device_get(of_folder(folder / "base")), json.loads((folder / "steps.json").read_text())
    moved = {name: test_trl_rollouts.moved(jax.device_get(of_folder(folder / name)), base) for name in steps}
    lines = [f'"{name}": {json.dumps({"moved": moved[name], "steps": of_name})}' for name, of_name in steps.items()]
    (folder / "trl_distillation.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")  # as committed
    return folder


@pytest.mark.parametrize("name", ours.LOSSES)
def test_a_teacher_is_learned_from_as_by_trl(name, folder, toy_tokenizer, monkeypatch):
    base = jax.device_get(of_folder(folder / "base"))
    got, params = ours.trained(name, base, folder, toy_tokenizer, monkeypatch)
    differences = test_trl_rollouts.apart(got, json.loads((folder / "steps.json").read_text())[name])
    other = of_folder(folder / name)
    parameters = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, other)))
    told = ", ".join(f"{key} {value:.1e}" for key, value in (differences | {"parameters": parameters}).items())
    print(f"\n{name}: largest differences to TRL: {told}", file=sys.stderr)
    assert ours.too_large(differences) == {} and parameters <= PARAMETERS
