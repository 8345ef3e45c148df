"""The planner's predictions for generation agree with an engine of these sizes."""

import dataclasses

import jax
import pytest

from capibara import sharding
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.placement import lowering
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.models.parts.moe import Moe
from capibara.planner.hardware import slices
from capibara.planner.search import serving
from capibara.planner.search.serving import Engine

SIZES = dict(vocab_size=512, embed_dim=64, num_layers=3, num_heads=8, num_kv_heads=4, mlp_dim=128, dtype="bfloat16")
MODELS = {
    "decoder": DecoderConfig(**SIZES, head="separate"),
    "windows": DecoderConfig(**SIZES, layer_pattern=("local", "global"), window=16),
    "experts": DecoderConfig(**SIZES, moe=Moe(num_experts=4, top_k=2, expert_dim=32)),
}
_8B = DecoderConfig(
    vocab_size=128256, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_dim=14336, head="separate",
    dtype="bfloat16",
)  # fmt: skip
ASKED = Engine(length=2048, cache_dtype="bfloat16", prefix_bytes=2**28)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.heavy), "int8"])
def test_bytes_are_those_of_the_engine(name, dtype):
    model, slots, length = api.build(MODELS[name]), 8, 64
    asked = Engine(length=length, cache_dtype=dtype, slots=slots)
    (found,) = (one for one in serving.ranked(model, slices.parse("cpu-4"), asked, 0.1) if one.tensor == 2)
    mesh = sharding.make_mesh(sharding.Plan(batch_size=2, data=2, fsdp=1, tensor=2), jax.devices()[:4])
    config = EngineConfig(slots=slots, cache_dtype=dtype, prefix_cache_mib=0)
    step = lowering.Step(model, config, length, mesh)
    assert found.weights == lowering.device_bytes(step.params)
    own = slots // 2
    rest = 2 * own * 4  # the last token and the length of each row, which the planner leaves out
    assert found.keys_values == lowering.device_bytes(step.state) - rest
    assert step.lower().compile().memory_analysis().argument_size_in_bytes > found.weights + found.keys_values


def test_a_mesh_is_chosen_that_fits_and_its_slots_fill_the_chip():
    model, v5e = api.build(_8B), slices.parse("v5e-4")
    found = serving.ranked(model, v5e, ASKED, 0.06)
    best = found[0]
    assert (best.tensor, best.data) == (4, 1) and best.fits and not found[-1].fits
    assert 0.97 * best.limit_bytes < best.bytes <= best.limit_bytes
    assert not serving.predict(model, v5e, 4, dataclasses.replace(ASKED, slots=best.slots + 1), 0.06).fits
    # 16 GB of weights over four chips of 819 GB/s: a step cannot be quicker.
    assert best.step_s > (best.weights + best.keys_values - 0.3e9) / 819e9
    quarter = serving.ranked(model, v5e, dataclasses.replace(ASKED, length=8192), 0.06)[0]
    assert best.slots / 5 < quarter.slots < best.slots / 3.9
    eighth = serving.ranked(model, v5e, dataclasses.replace(ASKED, cache_dtype="int8"), 0.06)[0]
    assert 1.7 * best.slots < eighth.slots < 2 * best.slots and best.step_s < eighth.step_s < 1.7 * best.step_s


def test_what_does_not_fit_says_what_would():
    model, v5e = api.build(_8B), slices.parse("v5e-4")
    many = dataclasses.replace(ASKED, slots=300)
    said = str(serving.does_not_fit(model, v5e, serving.ranked(model, v5e, many, 0.06), 0.06))
    most = serving.ranked(model, v5e, ASKED, 0.06)[0].slots
    assert f"try EngineConfig.slots = {most}, or EngineConfig.cache_dtype = 'int8', or --slice=v5e-8" in said
    one = slices.parse("v5e-1")
    said = str(serving.does_not_fit(model, one, serving.ranked(model, one, ASKED, 0.06), 0.06))
    assert "weights 14.9" in said and said.endswith("try --slice=v5e-4")
