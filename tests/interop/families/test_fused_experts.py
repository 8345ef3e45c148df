"""A layer's experts in tensors of their own, of a family whose files have them in one."""

import json
import pathlib
import sys

import numpy as np

from capibara.interop import open_model

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import test_families  # noqa: E402


def test_tensors_are_joined_as_the_family_writes_them(tmp_path):
    recorded = json.loads((test_families.RECORDED / "minimax_m3_vl.json").read_text())
    test_families.write_drawn(tmp_path, recorded)
    model, params, foreign = test_families.loaded(tmp_path)
    named = open_model.NamedTensors(foreign, model, "minimax_m3_vl_text")
    written = dict(open_model.hf_tensors(params, model, "minimax_m3_vl_text"))
    assert {*named.names} == {*written} and not {*written} & {*foreign.shapes()} - {"lm_head.weight"}
    for name, value in written.items():
        np.testing.assert_array_equal(named.read(name), value)
        assert named.dtype(name) == "float32"
