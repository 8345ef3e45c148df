"""A part of a Gemma 3n made by `capibara convert` answers in transformers and here like one that torch makes.

Needs an environment with torch: make test-peer PEER=transformers PEER_PYTHON=PATH/bin/python.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import test_transformers as answers  # noqa: E402

from capibara.cli import convert  # noqa: E402
from capibara.multihost import exits

PYTHON = os.environ.get("TORCH_PYTHON")

pytestmark = pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch")


def peer(what, folder):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    argv = [PYTHON, str(HERE / "submodel_peer.py"), what, str(folder)]
    done = subprocess.run(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_part_answers_as_one_that_is_cut_in_torch(tmp_path):
    peer("write", tmp_path)
    flags = ["--skip_layers=1,4", "--mlp_dims=48,16,32,48,8,48"]
    assert exits.run_verb(convert.main, [f"--from={tmp_path}/whole", f"--to={tmp_path}/part", *flags]) == 0
    peer("read", tmp_path)
    read = np.load(tmp_path / "read.npz")
    model, params, _ = answers.loaded(tmp_path / "part")
    got = np.asarray(jax.jit(model.logits)(params, answers.batch_of(answers.golden_tokens())))
    answers.report("gemma3n part", "logits differ by", np.abs(got - read["cut"]).max())
    np.testing.assert_array_equal(read["ours"], read["cut"])
    np.testing.assert_allclose(got, read["cut"], rtol=0, atol=answers.ATOL)
    assert np.abs(read["cut"] - read["whole"]).max() > 0.1
