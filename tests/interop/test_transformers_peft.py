"""Adapters of PEFT with fields at random answer as there, and what we write of the embedding and the head answers there.

Needs an environment with torch, transformers and peft: make test-peer PEER=transformers PEER_PYTHON=PATH/bin/python.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.interop import peft_runs as adapters
from capibara.interop.peft import fields

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import test_peft_fields as recorded  # noqa: E402

PYTHON = os.environ.get("TORCH_PYTHON")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch"),
    pytest.mark.heavy,
]


def peer(what, folder):
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([PYTHON, HERE / "peft_fields_peer.py", what, folder], check=True, env=environment)


def test_the_recorded_fields_are_those_of_peft(tmp_path):
    peer("record", tmp_path / "fields.json")
    found = json.loads((tmp_path / "fields.json").read_text())
    assert found["fields"].keys() == fields.FIELDS.keys()
    for name, case in found["cases"].items():
        want = recorded.CASES[name]
        assert case["tensors"] == want["tensors"] and case.get("refused") == want.get("refused")
        np.testing.assert_allclose(case.get("logits", []), want.get("logits", []), rtol=0, atol=2e-5)


def test_fields_at_random_answer_as_in_peft_or_are_refused(tmp_path):
    """250 adapters that PEFT saves and loads; most are computed, and no error is another than one of ours."""
    peer("sweep", tmp_path)
    refused, wrong = [], {}
    for path in sorted(tmp_path.glob("*/answer.json")):
        answer = json.loads(path.read_text())
        like, model, params = recorded.base_of(answer["base"])
        try:
            got = recorded.logits(*adapters.merged(str(path.parent / "adapter"), model, params, like))
        except UserError as error:
            refused.append(str(error))
            continue
        want = np.array(answer["logits"])
        if np.abs(got - want).max() > 5e-5 * max(1.0, np.abs(want).max()):
            wrong[str(path)] = (path.parent / "adapter" / "adapter_config.json").read_text()
    assert not wrong
    assert len(refused) < 50, refused
    assert all("\n" not in one for one in refused)


# What we train beside adapters of query and value, by base.
WRITTEN = {
    "tied": dict(modules_to_save=("embedding", "final_norm/scale")),
    "untied": dict(modules_to_save=("embedding", "output", "layers/mlp_norm/scale")),
    "gpt2": dict(modules_to_save=("embedding",)),
    "neox": dict(modules_to_save=("embedding", "*final_norm/*")),
    "gemma": dict(trainable_tokens=(5, 2)),
    "biased": dict(modules_to_save=("query_bias", "key_bias", "value_bias", "output")),
    "t5": dict(modules_to_save=("embedding", "*coder/norm/scale")),
}


def test_what_we_write_of_embedding_and_head_answers_in_peft(tmp_path):
    ours = {}
    for name, options in WRITTEN.items():
        recorded.saved_base(name, tmp_path / name / "base")
        whole, adapted, _ = recorded.written(name, tmp_path / name / "adapter", targets=("query", "value"), **options)
        ours[name] = recorded.logits(adapted, whole)
    peer("read", tmp_path)
    for name, want in ours.items():
        found = np.array(json.loads((tmp_path / name / "logits.json").read_text()))[-1]
        got = found[np.ix_(recorded.RECORDED["positions"], recorded.RECORDED["entries"])]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5, err_msg=name)
