"""Process reward models as transformers' token classifications: what is written, and the numbers that transformers has for it.

token_classification.json has two models of the token_scores.json of test_transformers_trl.py (transformers 5.24 made the committed file).
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import pytest
import safetensors.numpy

import capibara as cb

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import reward_folders  # noqa: E402

FORM = "hf_token_classification"


def check_scores(folder, logits):
    """Asserts that a folder's scores are the logits of "right", and that those of "wrong" are 0."""
    for ours, theirs in zip(reward_folders.token_scores(folder), map(np.array, logits), strict=True):
        np.testing.assert_allclose(ours, theirs[:, 1], rtol=2e-4, atol=2e-5)
        assert (theirs[:, 0] == 0).all()


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_scores_are_those_of_transformers(model_type, tmp_path):
    reward_folders.write(tmp_path, model_type)
    check_scores(tmp_path, json.loads((HERE / "token_classification.json").read_text())[model_type])


def test_a_folder_has_two_labels_and_the_score_is_the_second(tmp_path):
    reward_folders.write(tmp_path / "ours", "qwen2")
    cb.convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), format=FORM)
    ours, theirs = (safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"]
    assert config["id2label"] == {"0": "wrong", "1": "right"} and config["label2id"] == {"wrong": 0, "right": 1}
    weight, bias = theirs.pop("score.weight"), theirs.pop("score.bias")
    np.testing.assert_array_equal(weight[1:], ours.pop("score.weight"))
    assert (weight[0] == 0).all() and bias.tolist() == [0, 0]
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
