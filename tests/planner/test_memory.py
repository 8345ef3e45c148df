"""What the memory model adds for stages, experts and want of HBM; its parts by count are in test_search.py."""

import dataclasses

import pytest

from capibara.models import api
from capibara.models.moe import Moe
from capibara.optim import Optimizer
from capibara.planner import memory, workload
from capibara.planner.choice import Choice
from capibara.sharding import MESH_AXES, Remat, RematPolicy

DENSE = api.DecoderConfig(vocab_size=4096, embed_dim=1024, num_layers=8, num_heads=8, mlp_dim=4096)
EXPERTS = dataclasses.replace(DENSE, moe=Moe(num_experts=8, top_k=2, dispatch="capacity", capacity_factor=1.25))


def memory_of(config=DENSE, rows=16, most_bytes=float("inf"), **mesh):
    work = workload.describe(api.build(config), Optimizer(), length=2048)
    sizes = tuple(mesh.get(axis, 1) for axis in MESH_AXES)
    parts = 2 * mesh["stage"] if "stage" in mesh else 1
    choice = Choice(sizes=sizes, rows=rows, remat=RematPolicy(Remat.FULL), pipeline_microbatches=parts)
    return memory.memory(work, choice, most_bytes=most_bytes)


def test_a_pipeline_holds_all_rows_twice_and_a_second_sum_of_gradients():
    one, staged = memory_of(fsdp=8), memory_of(fsdp=4, stage=2)
    assert one.pipeline == 0
    layers = 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096)  # weights; norms are a rounding
    assert staged.pipeline == pytest.approx(2 * 16 * 2048 * 1024 * 2 + layers * 4 / 8, rel=0.01)
    assert staged.moments["backward"] > staged.state + staged.saved + staged.pipeline


@pytest.mark.parametrize("config, mesh", [(DENSE, dict(fsdp=2, tensor=4)), (EXPERTS, dict(fsdp=8))], ids=["tensor", "experts"])
def test_for_want_of_hbm_less_is_held_at_once(config, mesh):
    usual = memory_of(config, **mesh)
    assert usual == memory_of(config, most_bytes=usual.peak * 1.1, **mesh) and not usual.lean
    lean = memory_of(config, most_bytes=usual.peak * 0.99, **mesh)
    assert lean.lean and lean.peak < usual.peak and lean.saved == usual.saved and lean.state == usual.state


def test_rows_that_experts_exchange_are_padded():
    layers = {rows: memory_of(EXPERTS, rows, fsdp=4, expert=2).layer for rows in (8, 9, 15, 16)}
    assert layers[9] > 1.5 * layers[8] and layers[15] > 0.97 * layers[16]
    assert memory_of(DENSE, 9, fsdp=8).layer == pytest.approx(memory_of(DENSE, 8, fsdp=8).layer * 9 / 8)


def test_an_expert_axis_keeps_what_it_exchanges():
    inside, across = memory_of(EXPERTS, 8, fsdp=8), memory_of(EXPERTS, 8, fsdp=4, expert=2, most_bytes=1)
    tokens = 8 * 2048 * 2 * 1.25 * 1024 * 2
    assert across.layer > 3 * tokens and inside.layer > 2 * tokens
