"""The one rule that shrinks a run for `--emulate`."""

from __future__ import annotations

import dataclasses

import pytest

from capibara import config
from capibara.training import emulation
from capibara.training.trainer import Trainer

BASE = ["base_v5e64.gin"]


def base(bindings=()):
    config.parse(BASE, bindings)
    return config.build(Trainer)


@pytest.mark.parametrize("devices", [8, 64])
def test_the_base_model_shrinks_by_the_rule(devices):
    trainer = base()
    bindings = emulation.shrunk_bindings(trainer, devices)
    shrunk = base(bindings)
    model = shrunk.model
    assert (model.embed_dim, model.num_layers, model.num_heads) == (128, 4, trainer.model.num_heads)
    # 768 wide becomes 128: 2048 / 6 is nearest to 5 x 64, heads of 64 become 10 or 11, rounded to a multiple of 2.
    assert (model.mlp_dim, model.head_dim) == (320, 10)
    assert (shrunk.dataset.length, shrunk.plan.batch_size) == (128, devices)
    same = dict(embed_dim=0, num_layers=0, mlp_dim=0, head_dim=0)
    assert dataclasses.replace(model, **{k: 2 for k in same}) == dataclasses.replace(
        trainer.model, **{k: 2 for k in same}
    )
    assert dataclasses.replace(shrunk.plan, batch_size=1) == dataclasses.replace(trainer.plan, batch_size=1)
    assert emulation.shrunk_bindings(shrunk, devices) == []


def test_each_accumulation_step_keeps_a_row_per_shard():
    bindings = emulation.shrunk_bindings(base(["Plan.accumulation = 4", "Plan.tensor = 2"]), 8)
    assert "Plan.batch_size = 16" in bindings


def test_a_small_model_is_left_alone():
    assert emulation.shrunk_bindings(base(["DecoderConfig.embed_dim = 240"]), 8) == []


def test_short_rows_and_few_layers_stay():
    bindings = emulation.shrunk_bindings(base(["LENGTH = 64", "DecoderConfig.num_layers = 2"]), 8)
    assert not [b for b in bindings if b.startswith(("Dataset.length", "DecoderConfig.num_layers"))]
