"""Weighted sums of adapters equal PEFT's add_weighted_adapter (peft_sums.json, by peft_sums_peer.py)."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from capibara import config
from capibara.cli import convert
from capibara.interop import open_model
from capibara.interop.peft import fields
from capibara.interop.peft import folder as peft
from capibara.interop.peft import sums as peft_sums
from capibara.interop.peft.sum_options import Combination, Sum
from capibara.multihost import exits

GOLDEN = json.loads((pathlib.Path(__file__).with_name("peft_sums.json")).read_text())


@pytest.fixture
def folders(tmp_path):
    """The two adapters, and their base."""
    for name, (config_, tensors) in GOLDEN["adapters"].items():
        (tmp_path / name).mkdir()
        values = config_ | {"base_model_name_or_path": str(tmp_path / "base")}
        (tmp_path / name / peft.CONFIG).write_text(json.dumps(values))
        save_file({key: np.float32(value) for key, value in tensors.items()}, tmp_path / name / peft.WEIGHTS)
    return tmp_path


def deltas(folder):
    """scale * b a of each module, as PEFT reads the folder."""
    about, tensors = fields.read(str(folder)), load_file(folder / peft.WEIGHTS)
    names = [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]
    found = {}
    for name in names:
        a, b = tensors[name + ".lora_A.weight"], tensors[name + ".lora_B.weight"]
        module = name.removeprefix(peft.PREFIX)
        assert len(a) == about["rank_pattern"].get(module, about["r"])
        found[module] = fields.scale_of(module, about) * (b @ a)
    return found


@pytest.mark.parametrize("kind, weights", [("cat", [0.7, 0.3]), ("linear", [0.7, 0.3]), ("linear", [1.0, -0.5])])
def test_sums_are_those_of_peft(kind, weights, folders, capsys):
    config.reset()
    argv = [f"--from={folders}/one", f"--plus={folders}/two", f"--weights={','.join(map(str, weights))}"]
    argv += [f"--combination={kind}", f"--to={folders}/sum", "--format=peft"]
    assert exits.run_verb(convert.main, argv) == 0
    assert "the sum of 2 adapters" in capsys.readouterr().out
    found, want = deltas(folders / "sum"), GOLDEN["sums"][f"{kind} {weights[1]}"]
    assert found.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(found[name], np.float32(value), rtol=0, atol=2e-5)


def mistake(capfd, *argv):
    config.reset()
    capfd.readouterr()
    code = exits.run_verb(convert.main, list(argv))
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "), (code, out, err)
    return err


def test_mistakes_are_one_line(folders, capfd):
    one, two, to = f"--from={folders}/one", f"--plus={folders}/two", [f"--to={folders}/sum", "--format=peft"]
    assert "--weights=1 is for several adapters" in mistake(capfd, one, "--weights=1", *to)
    assert "--weights has 3 numbers, there are 2 adapters" in mistake(capfd, one, two, "--weights=1,2,3", *to)
    assert "--weights=a,b must be numbers" in mistake(capfd, one, two, "--weights=a,b", *to)
    assert "--weights has nan, must be finite" in mistake(capfd, one, two, "--weights=nan,1", *to)
    assert "neither an adapter of PEFT nor a run" in mistake(capfd, one, "--plus=/none", *to)
    about = json.loads((folders / "two" / peft.CONFIG).read_text())
    tensors = load_file(folders / "two" / peft.WEIGHTS)
    wide = {key: value[:2] if "lora_A" in key else value[:, :2] for key, value in tensors.items()}
    save_file({key: np.ascontiguousarray(value) for key, value in wide.items()}, folders / "two" / peft.WEIGHTS)
    (folders / "two" / peft.CONFIG).write_text(json.dumps(about | {"r": 2}))
    assert "--combination=linear needs one rank: set cat" in mistake(capfd, one, two, "--combination=linear", *to)
    experts = about | {"target_parameters": ["mlp.experts.down_proj"]}
    (folders / "two" / peft.CONFIG).write_text(json.dumps(experts))
    assert "two has target_parameters (adapters of experts)" in mistake(capfd, one, two, *to)
    (folders / "two" / peft.CONFIG).write_text(json.dumps(about | {"r": 2}))
    tensors["base_model.model.lm_head.weight"] = np.zeros((4, 4), np.float32)
    save_file(tensors, folders / "two" / peft.WEIGHTS)
    assert "has base_model.model.lm_head.weight, and only pairs of matrices" in mistake(capfd, one, two, *to)


def test_adapters_of_two_bases_or_tokenizers_are_not_added_up(folders, capfd):
    one, two, to = f"--from={folders}/one", f"--plus={folders}/two", [f"--to={folders}/sum", "--format=peft"]
    for name, text in (("one", "{}"), ("two", "{ }")):
        (folders / name / "tokenizer_config.json").write_text(text)
    assert "tokenizer_config.json of" in (said := mistake(capfd, one, two, *to)) and said.count(str(folders)) == 2
    for name, content in (("tokenizer_config.json", "{}"), ("chat_template.jinja", "x")):
        (folders / "two" / name).write_text(content)
    assert "chat_template.jinja of" in mistake(capfd, one, two, *to)  # one has none: a tokenizer is taken whole
    (folders / "two" / "chat_template.jinja").unlink()
    about = json.loads((folders / "two" / peft.CONFIG).read_text())
    (folders / "two" / peft.CONFIG).write_text(json.dumps(about | {"base_model_name_or_path": "other/model"}))
    assert f"two is of 'other/model', {folders}/one of '{folders}/base': add up" in mistake(capfd, one, two, *to)
    (folders / "two" / "tokenizer_config.json").unlink()
    config.reset()
    assert exits.run_verb(convert.main, [one, two, *to, "--base=my/model"]) == 0
    assert (folders / "sum" / "tokenizer_config.json").read_text() == "{}"
    assert fields.read(f"{folders}/sum")["base_model_name_or_path"] == "my/model"


def test_a_sum_is_merged_into_its_base(folders):
    """The result is the base plus the deltas of PEFT's sum."""
    from capibara.interop.hf import config as hf_config
    from capibara.interop.hf import folder as hf_folder
    from capibara.models import api

    values = GOLDEN["config"]
    model = api.build(hf_config.from_hf(values))
    rng = np.random.default_rng(0)
    shapes = open_model.hf_shapes(model, "llama")
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    hf_folder.save_hf(str(folders / "base"), values, shapes, iter(base.items()), {}, dtype="float32")
    config.reset()
    argv = [f"--from={folders}/one", f"--plus={folders}/two", "--weights=0.7,0.3", f"--to={folders}/merged"]
    assert exits.run_verb(convert.main, argv) == 0
    found = open_model.open_model(str(folders / "merged"))
    for name, value in base.items():
        delta = np.float32(GOLDEN["sums"]["cat 0.3"].get(name.removesuffix(".weight"), 0))
        np.testing.assert_allclose(found.read(name), value + delta, rtol=0, atol=2e-5)


def test_the_sum_of_one_adapter_is_that_adapter(folders):
    peft_sums.write(
        str(folders / "sum"), Sum(folders=(str(folders / "one"),), weights=(1.0,), combination=Combination.CAT)
    )
    found, want = deltas(folders / "sum"), deltas(folders / "one")
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5)
