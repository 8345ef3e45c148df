"""The one rule that shrinks a run for `--emulate`."""

from __future__ import annotations

import dataclasses

import pytest

from capibara import config
from capibara.models import api
from capibara.training import emulation
from capibara.training.trainer import Trainer

BASE = ["base_v5e64.gin"]


def base(bindings=()):
    config.parse(BASE, bindings)
    return config.build(Trainer)


@pytest.mark.parametrize("devices", [8, 64])
def test_the_base_model_shrinks_by_the_rule(devices):
    trainer = base()
    shrunk = emulation.shrunk(trainer, devices)
    model = shrunk.model
    assert (model.embed_dim, model.num_layers, model.num_heads) == (128, 4, trainer.model.num_heads)
    # 768 wide becomes 128: 2048 / 6 is nearest to 5 x 64, heads of 64 become 10 or 11, nearest to 8.
    assert (model.mlp_dim, model.head_dim) == (320, 8)
    assert (shrunk.dataset.length, shrunk.plan.batch_size) == (128, devices)
    same = dict(embed_dim=0, num_layers=0, mlp_dim=0, head_dim=0)
    assert dataclasses.replace(model, **{k: 2 for k in same}) == dataclasses.replace(
        trainer.model, **{k: 2 for k in same}
    )
    assert dataclasses.replace(shrunk.plan, batch_size=1) == dataclasses.replace(trainer.plan, batch_size=1)
    assert emulation.shrunk(shrunk, devices) is shrunk


def test_each_accumulation_step_keeps_a_row_per_shard():
    assert emulation.shrunk(base(["Plan.accumulation = 4", "Plan.tensor = 2"]), 8).plan.batch_size == 16


def test_each_node_keeps_a_row_per_shard():
    nodes = ["Plan.node = 4", "Trainer.strategy = @ConsensusConfig()"]
    assert emulation.shrunk(base(nodes), 8).plan.batch_size == 8


def test_the_streams_of_a_task_divide_the_rows_that_are_left():
    shrunk = emulation.shrunk(base(["Dataset.task_shards = 32"]), 8)
    assert shrunk.dataset.task_shards == 8 and shrunk.plan.batch_size == 8


def test_a_small_model_is_left_alone():
    small = base(["DecoderConfig.embed_dim = 240"])
    assert emulation.shrunk(small, 8) is small


def test_short_rows_and_few_layers_stay():
    shrunk = emulation.shrunk(base(["LENGTH = 64", "DecoderConfig.num_layers = 2"]), 8)
    assert (shrunk.dataset.length, shrunk.model.num_layers) == (64, 2)


@pytest.mark.parametrize(("length", "fate"), [(2048, "cut"), (128, "drop")])
def test_conversations_are_cut_with_their_rows(length, fate):
    """Else hardly any would be left."""
    files = ["runs/pretrain.gin", "models/smollm2_135m.gin", "tasks/chat.gin"]
    bindings = ["MODEL_DIR = 'run'", "TRAIN_STEPS = 2", "FILES = ('chats.jsonl',)", "TOKENIZER = 'model'"]
    bindings += [f"LENGTH = {length}", "Dataset.vocabulary = @ByteVocabulary()"]
    config.parse(files, bindings)
    dataset = emulation.shrunk(config.build(Trainer), 8).dataset
    assert (dataset.length, dataset.too_long) == (128, fate)


def family(name, *bindings):
    files = ["runs/pretrain.gin", f"models/{name}.gin", "tasks/stdlib.gin"]
    config.parse(files, ['MODEL_DIR = "run"', "TRAIN_STEPS = 2", *bindings])
    trainer = config.build(Trainer)
    return trainer, emulation.shrunk(trainer, 8)


def test_a_layer_pattern_is_kept_whole_and_windows_shrink_with_rows():
    trainer, shrunk = family("gemma3_4b", "LENGTH = 8192")
    assert (shrunk.model.num_layers, shrunk.model.window) == (6, 16)  # 1024 of 8192 is 16 of 128
    assert (shrunk.model.head_dim, shrunk.model.mlp_dim) == (16, 512)
    assert shrunk.model.vocab_size == trainer.dataset.get_vocabulary().size
    kept = ("layer_pattern", "rope", "num_heads", "num_kv_heads", "norm_placement", "qk_norm")
    assert [getattr(shrunk.model, name) for name in kept] == [getattr(trainer.model, name) for name in kept]


def test_partly_rotated_heads_keep_dimensions_that_turn():
    _, shrunk = family("gpt_neox_20b")
    assert shrunk.model.head_dim == 8
    assert shrunk.model.rope.rotated_dims(8) == 2


def test_a_pipeline_keeps_a_layer_of_each_part_and_a_row_of_each_microbatch():
    _, shrunk = family("llama3_8b", "Plan.stage = 2", "Plan.pipeline_repeats = 4", "Plan.fsdp = -1")
    assert shrunk.model.num_layers == 8
    assert shrunk.plan.batch_size == 4 * 4  # fsdp x two microbatches a stage


def test_experts_shrink_with_the_model():
    moe = ["DecoderConfig.moe = @Moe()", "Moe.num_experts = 8", "Moe.expert_dim = 1536", "Moe.shared_experts = 1"]
    _, shrunk = family("qwen3_8b", *moe)
    assert (shrunk.model.moe.expert_dim, shrunk.model.moe.shared_dim, shrunk.model.moe.num_experts) == (64, None, 8)


def test_experts_in_some_layers_stay_in_some():
    moe = ["DecoderConfig.moe = @Moe()", "Moe.num_experts = 8", "Moe.expert_dim = 1536", "Moe.first_dense = 6"]
    _, shrunk = family("qwen3_8b", *moe, 'Moe.pattern = ("experts", "dense", "dense")')
    assert shrunk.model.num_layers % 3 == 0 and 0 < len(shrunk.model.dense_layers) < shrunk.model.num_layers


def test_both_rows_and_both_stacks_of_an_encoder_decoder_shrink():
    files = ["runs/pretrain_t5.gin", "models/t5_1_1_xl.gin", "tasks/stdlib.gin"]
    bindings = ['MODEL_DIR = "run"', "TRAIN_STEPS = 2", "EncoderDecoderConfig.num_encoder_layers = 12"]
    config.parse(files, bindings)
    trainer = config.build(Trainer)
    shrunk = emulation.shrunk(trainer, 8)
    assert trainer.dataset.encoder_length > shrunk.dataset.encoder_length == 128
    assert (shrunk.model.num_layers, shrunk.model.encoder_layers, shrunk.model.mlp_dim) == (4, 4, 320)


def test_layers_without_an_mlp_stay_without():
    mixer = api.Mamba(inner_dim=1024, step_rank=32)
    alone = dict(mixer=mixer, layer_pattern=("recurrent",), mlp_dim=0, positions="none", num_heads=1)
    model = api.DecoderConfig(vocab_size=512, embed_dim=512, num_layers=8, **alone)
    shrunk = emulation.shrunk(dataclasses.replace(base(), model=model), 8).model
    assert shrunk.embed_dim == 128 and shrunk.mlp_dim == 0 and shrunk.one_branch and shrunk.mixer.inner_dim == 256


@pytest.mark.parametrize("name", ["gemma3n_e2b", "gemma3n_e4b"])
def test_sparse_and_dense_mlps_both_stay(name):
    """A shrunk model has fewer layers than the first, sparse ones of the whole model."""
    files = ["runs/pretrain.gin", f"models/{name}.gin", "tasks/stdlib.gin"]
    config.parse(files, ['MODEL_DIR = "run"', "TRAIN_STEPS = 2", "Trainer.model = @Gemma3nConfig()"])
    model = emulation.shrunk(config.build(Trainer), 8).model
    assert (model.num_layers, model.activation_sparsity) == (5, (0.95,) * 4)


def test_latent_ranks_divide_among_the_devices():
    trainer, shrunk = family("deepseek_v3")
    sizes = shrunk.model.latent
    assert (sizes.kv_rank, sizes.query_rank, sizes.rotary_dim, sizes.value_dim) == (64, 64, 2, 2)
    assert trainer.model.latent.kv_rank == 512
