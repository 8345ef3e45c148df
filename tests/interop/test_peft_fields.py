"""Every field of PEFT's LoraConfig: our logits are those of PEFT, or an error names the field.

peft_fields.json is written by peft_fields_peer.py (peft 0.21.2, transformers 5.24): PEFT saved each adapter, and loaded it
on a fresh base. The lists of fields are PEFT's own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import tables, tensors
from capibara.interop.peft import fields
from capibara.interop.peft import folder as peft
from capibara.interop.peft import runs as adapters
from capibara.models import api

safetensors = pytest.importorskip("safetensors.numpy")
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "models" / "golden"))
from answers import draw  # noqa: E402

RECORDED = json.loads((HERE / "peft_fields.json").read_text())
CASES = RECORDED["cases"]
TOLERANCE = dict(rtol=0, atol=5e-5)


@functools.cache
def base_of(name):
    """config.json, model and parameters of a base with drawn weights."""
    like = RECORDED["bases"][name] | {"transformers_version": "5.24.0"}
    model = api.build(dataclasses.replace(hf_config.from_hf(like), dtype="float32"))
    shapes = dict(
        zip(tree.path_names(model.abstract_params), (x.shape for x in jax.tree.leaves(model.abstract_params)), strict=True)
    )
    table = tables.of(hf_config.to_hf(model.config, like)["model_type"], shapes, fused_experts=name == "experts")
    values = tensors.read(table, shapes, draw)
    return like, model, tree.map_with_names(lambda path, _: values[path], model.abstract_params)


def folder_of(case, path, changes=()):
    """The folder that PEFT wrote."""
    shared = case.get("shared", {})
    values = {}
    for name, shape in case["tensors"].items():
        other, turned = shared.get(name, (name, False))
        value = draw(other, tuple(reversed(shape) if turned else shape))
        values[name] = np.ascontiguousarray(value.T if turned else value)
    path.mkdir(exist_ok=True)
    safetensors.save_file(values, path / peft.WEIGHTS)
    (path / peft.CONFIG).write_text(json.dumps(case["config"] | dict(changes)))
    return str(path)


@functools.cache
def compiled(config):
    return jax.jit(api.build(config).logits)


def logits(model, params):
    """Those of the last row, at the recorded positions and entries."""
    tokens = np.array(RECORDED["tokens"], np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    batch |= {f"encoder_{key}": value for key, value in batch.items()}
    got = np.asarray(compiled(model.config)(params, batch))[-1]
    return got[np.ix_(RECORDED["positions"], RECORDED["entries"])]


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_answers_as_in_peft_or_its_field_is_named(name, tmp_path):
    case = CASES[name]
    like, model, params = base_of(case["base"])
    folder = folder_of(case, tmp_path / "adapter")
    if "refused" in case:
        with pytest.raises(UserError, match=case["refused"]) as raised:
            adapters.merged(folder, model, params, like)
        assert "\n" not in str(raised.value)
        return
    found, merged = adapters.merged(folder, model, params, like)
    np.testing.assert_allclose(logits(found, merged), case["logits"], **TOLERANCE)
