"""T5X's Gin files as ours: each binding is translated, noted or refused by name, and nothing in the file is run."""

import sys

import pytest

from capibara import config
from capibara.cli import convert_config
from capibara.cli.composition import options
from capibara.cli.composition.training_run import parts_of
from capibara.core.types import UserError
from capibara.evaluation.seqio_tasks import SeqioEvaluation
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from capibara.interop.t5x import gin as t5x_gin
from capibara.multihost import exits
from capibara.run.run import Run
from capibara.training.trainer import Trainer

BASE = """
from __gin__ import dynamic_registration
from t5x import adafactor
from t5x import models
from t5x.examples.t5 import network
DROPOUT_RATE = %gin.REQUIRED
Z_LOSS = 0.0001
MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel:
  module = @network.Transformer()
  optimizer_def = @adafactor.Adafactor()
  z_loss = %Z_LOSS
  loss_normalizing_factor = 233472
adafactor.Adafactor:
  decay_rate = 0.7
  beta1 = 0.9
  logical_factor_rules = @adafactor.standard_logical_factor_rules()
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 32128
  dtype = 'bfloat16'
  emb_dim = 64
  num_heads = 4
  num_encoder_layers = 3
  num_decoder_layers = 2
  head_dim = 16
  mlp_dim = 96
  mlp_activations = ('gelu', 'linear')
  dropout_rate = %DROPOUT_RATE
  logits_via_embedding = False
"""
RUN = """
import __main__ as train_script
from t5x import utils
include 'below/base.gin'
MODEL_DIR = %gin.REQUIRED
MIXTURE_OR_TASK_NAME = 'mine'
MIXTURE_OR_TASK_MODULE = None
TASK_FEATURE_LENGTHS = {'inputs': 256, 'targets': 64}
TRAIN_STEPS = 1_020_000
BATCH_SIZE = 16
USE_CACHED_TASKS = True
train_script.train:
  model = %MODEL
  model_dir = %MODEL_DIR
  total_steps = %TRAIN_STEPS
  train_dataset_cfg = @train/utils.DatasetConfig()
  checkpoint_cfg = @utils.CheckpointConfig()
  eval_period = 100
  random_seed = None
  relative_steps = None
train/utils.DatasetConfig:
  mixture_or_task_name = %MIXTURE_OR_TASK_NAME
  task_feature_lengths = %TASK_FEATURE_LENGTHS
  split = 'train'
  batch_size = %BATCH_SIZE
  shuffle = True
  seed = None
  use_cached = %USE_CACHED_TASKS
  pack = False
  module = %MIXTURE_OR_TASK_MODULE
infer_eval/utils.DatasetConfig.split = 'test'
utils.RestoreCheckpointConfig.path = 'gs://there/checkpoint_1000000'
utils.SaveCheckpointConfig.period = 5000
partitioning.PjitPartitioner.num_partitions = 2
trainer.Trainer.num_microbatches = 4
trainer.Trainer.learning_rate_fn = @utils.create_learning_rate_scheduler()
utils.create_learning_rate_scheduler:
  factors = 'constant'
  base_learning_rate = 0.001
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "base.gin").write_text(BASE)
    (tmp_path / "run.gin").write_text(RUN)
    (tmp_path / "plain.gin").write_text(f"{RUN}train_script.train.infer_eval_dataset_cfg = None\n")
    return tmp_path / "run.gin"


def converted(*argv):
    config.reset()
    return exits.run_verb(convert_config.main, [str(arg) for arg in argv])


def test_a_run_is_translated_and_builds(run, tmp_path, capsys):
    assert converted(run, f"--to={tmp_path}/mine.gin") == 0
    noted = capsys.readouterr().err
    assert "note: infer_eval/DatasetConfig.split is not written: capibara evaluate" in noted
    assert "note: train.relative_steps is not written: it is None" in noted
    config.reset()
    config.parse([tmp_path / "mine.gin"], ["MODEL_DIR = runs/x", "DROPOUT_RATE = 0.1", "BATCH_SIZE = 32"])
    trainer = config.build(Trainer)
    assert (trainer.model_dir, trainer.steps, trainer.z_loss) == ("runs/x", 1_020_000, 1e-4)
    assert (trainer.init_from, trainer.init_with) == ("gs://there/checkpoint_1000000", "state")
    assert trainer.loss_normalization == 233472
    model = trainer.model
    assert (model.embed_dim, model.num_layers, model.encoder_layers, model.head_dim) == (64, 2, 3, 16)
    assert (model.activation, model.head, model.dtype, model.dropout_rate) == ("geglu", "separate", "bfloat16", 0.1)
    data = trainer.dataset
    assert (data.kind, data.length, data.encoder_length, data.packing) == ("encoder_decoder", 64, 256, "none")
    assert (data.mixture_or_task_name, data.use_cached, data.task_module) == ("mine", True, None)
    assert (trainer.plan.batch_size, trainer.plan.tensor, trainer.plan.accumulation) == (32, 2, 4)
    assert (trainer.evaluation.every, trainer.checkpointing.every) == (100, 5000)
    optimizer = trainer.optimizer
    assert (optimizer.name, optimizer.momentum, optimizer.clip_norm, optimizer.weight_decay) == (
        "adafactor",
        0.9,
        None,
        0,
    )
    assert (optimizer.adafactor.decay_rate, optimizer.schedule.factors) == (0.7, "constant")


def test_metrics_of_generated_texts_are_asked_for(run, tmp_path):
    lines = (
        "train_script.train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()\nEVALUATOR_NUM_EXAMPLES = 7\n"
    )
    run.write_text(RUN + lines + "seqio.Evaluator.num_examples = %EVALUATOR_NUM_EXAMPLES\n")
    found = t5x_gin.translate(str(run))
    assert found.left == ()
    for line in (
        "Evaluation.task_metrics = True",
        "SeqioEvaluation.split = 'test'",
        "SeqioEvaluation.num_examples = 7",
    ):
        assert f"\n{line}  #" in found.text
    assert "task_metrics" not in t5x_gin.translate(str(run.with_name("plain.gin"))).text


def test_networks_of_other_names(run, tmp_path):
    text = BASE.replace("examples.t5 import", "examples.scalable_t5 import")
    (tmp_path / "below" / "base.gin").write_text(text)
    found = t5x_gin.translate(str(run)).text
    assert "relative_tables = 'each_layer'" in found and "Adafactor.factoring = 'stacked'" in found
    text = BASE.replace("EncoderDecoderModel", "DecoderOnlyModel").replace("T5Config", "TransformerConfig")
    text = text.replace("  num_encoder_layers = 3\n  num_decoder_layers = 2", "  num_layers = 2")
    text = text.replace("logits_via_embedding = False", "logits_via_embedding = True")
    text += "models.DecoderOnlyModel.inputs_bidirectional_attention = True\n"
    (tmp_path / "below" / "base.gin").write_text(text)
    found = t5x_gin.translate(str(run))
    assert found.left == () and "Dataset.length = 320" in found.text
    (tmp_path / "mine.gin").write_text(found.text)
    config.reset()
    config.parse([tmp_path / "mine.gin"], ["MODEL_DIR = runs/x", "DROPOUT_RATE = 0.0"])
    trainer = config.build(Trainer)
    assert (trainer.dataset.kind, trainer.model.inputs_attention) == ("prefix", "bidirectional")
    assert (trainer.model.positions, trainer.model.logit_scale, trainer.model.attention_scale) == (
        "relative",
        0.125,
        1.0,
    )


DECODING = {
    "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4": (
        dict(max_new_tokens=64, beams=BeamSearch(num_decodes=4)),
        None,
    ),
    "BEAM_SIZE = 3\nmodels.EncoderDecoderModel.predict_batch_with_aux:\n  num_decodes = %BEAM_SIZE\n"
    "  return_all_decodes = True\n  decoder_params = {'alpha': 0.8, 'max_decode_len': 9}\n"
    "decoding.beam_search.min_log_prob = -30.0\ndecoding.temperature_sample.topk = 3": (
        dict(max_new_tokens=9, beams=BeamSearch(num_decodes=3, num_return=3, alpha=0.8, min_log_prob=-30.0)),
        "temperature_sample.topk is not written: beam_search decodes",
    ),
    "models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample\ndecoding.temperature_sample:\n"
    "  temperature = 0.7\n  topk = 0\n  topp = 0.9\n  cache_offset = 0\n"
    "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 5": (
        dict(max_new_tokens=64, temperature=0.7, top_p=0.9, num_decodes=5),
        None,
    ),
    "models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample": (
        dict(max_new_tokens=64, temperature=1.0, top_k=1),
        None,
    ),
}


@pytest.mark.parametrize("given", DECODING)
def test_options_of_generation_are_translated(given, run, tmp_path, capsys):
    fields, note = DECODING[given]
    run.write_text(f"{RUN}{given}\n")
    assert converted(run, f"--to={tmp_path}/mine.gin") == 0
    noted = capsys.readouterr().err
    assert "note: capibara evaluate decodes so with '--gin.SeqioEvaluation.sampling=@Sampling()'" in noted
    assert note is None or note in noted
    config.reset()
    config.parse([tmp_path / "mine.gin"], ["MODEL_DIR = runs/x", "DROPOUT_RATE = 0.1"])
    assert config.build(Sampling) == Sampling(**fields)


def test_a_run_with_metrics_of_texts_decodes_them_as_bound(run, tmp_path):
    lines = (
        "train_script.train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()\n"
        "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4\n"
    )
    run.write_text(RUN + lines)
    assert converted(run, f"--to={tmp_path}/mine.gin") == 0
    config.reset()
    config.parse([tmp_path / "mine.gin"], ["MODEL_DIR = runs/x", "DROPOUT_RATE = 0.1"])
    trainer = config.build(Trainer)
    run_of_parts = Run(**parts_of(trainer))
    options.check(trainer, run_of_parts.samples, run_of_parts.tasks)
    assert config.build(SeqioEvaluation).sampling == Sampling(beams=BeamSearch(num_decodes=4), max_new_tokens=64)


@pytest.mark.parametrize("vocabulary", ["SentencePieceVocabulary", "ByteVocabulary"])
def test_sentinels_of_a_vocabulary_are_those_of_the_task(vocabulary, run):
    run.write_text(f"{RUN}seqio.{vocabulary}.extra_ids = 100\n")
    result = t5x_gin.translate(str(run))
    assert result.left == () and f"{vocabulary}.extra_ids is not written: the task's own vocabulary" in result.notes


def test_the_module_of_the_tasks_may_be_imported(run, tmp_path):
    run.write_text(f"import my.tasks\n{RUN}")
    assert "\nDataset.task_module = 'my.tasks'  # import my.tasks\n" in t5x_gin.translate(str(run)).text
    run.write_text(f"import my.tasks\nimport my.metrics\n{RUN}")
    result = t5x_gin.translate(str(run))
    assert "task_module" not in result.text
    assert any("it imports my.metrics, my.tasks: set Dataset.task_module" in note for note in result.notes)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (
            "models.EncoderDecoderModel.predict_batch_with_aux.prompt_with_targets = True",
            "predict_batch_with_aux.prompt_",
        ),
        ("decoding.beam_search.max_decode_step = 5", "beam_search.max_decode_step"),
        ("models.EncoderDecoderModel.decode_fn = @mine.decode", "decode_fn"),
        ("decoding.beam_search.eos_id = 5", "beam_search.eos_id"),
    ],
)
def test_options_of_generation_without_a_counterpart_are_refused(given, name, run, tmp_path, capsys):
    run.write_text(f"{RUN}{given}\n")
    assert converted(run, f"--to={tmp_path}/mine.gin") == 2
    error = capsys.readouterr().err
    assert f"{name}" in error and "which capibara does not have" in error and error.count("\n") == 1


def test_bindings_without_a_counterpart_are_refused_by_name(run, tmp_path, capsys):
    run.write_text(RUN + "models.EncoderDecoderModel.other_option = 4\n")
    assert converted(run, f"--to={tmp_path}/mine.gin") == 2
    error = capsys.readouterr().err
    assert "binds EncoderDecoderModel.other_option, which capibara does not have" in error and error.count("\n") == 1
    assert not (tmp_path / "mine.gin").exists()
    assert converted(run, "--leave_out") == 0
    assert "# EncoderDecoderModel.other_option has no place in capibara" in capsys.readouterr().out
    for line, told in (
        (
            "utils.RestoreCheckpointConfig.path = @elsewhere()",
            "is no plain value: capibara has it as Trainer.init_from",
        ),
        ("train/utils.DatasetConfig.split = 'test'", "train/DatasetConfig.split is 'test', must be 'train'"),
        (
            "TASK_FEATURE_LENGTHS = {'text': 3}",
            "TASK_FEATURE_LENGTHS is {'text': 3}, must be {'inputs': N, 'targets': N}",
        ),
        ("network.T5Config.mlp_activations = ('tanh',)", "mlp_activations is ('tanh',), must be one of"),
        ("optimizers.adamw.b1 = 0.9", "the optimizer adamw is not translated, only Adafactor is"),
        (
            "infer_script.infer.mode = 'predict'",
            "it configures infer of T5X, and only training and models are translated",
        ),
        ("BATCH_SIZE = %BATCH_SIZE", "%BATCH_SIZE is a macro of itself"),
    ):
        run.write_text(f"{RUN}{line}\n")
        assert converted(run) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("include '/etc/passwd'", "includes '/etc/passwd', must be a file below T5X's repository"),
        ("include '../run.gin'", "must be a file below"),
        ("include 'nothing.gin'", "which is in none of its folders: give T5X's repository"),
        ("include 'run.gin'", "includes itself"),
        ("include 'link.gin'", "which is in none of its folders"),
        ("A = " + "[" * 5000, "nested"),
        ("A = ", "run.gin"),
        ("A = {}".format("0" * (1 << 20)), "run.gin"),
        ("\x00", "run.gin"),
    ],
)
def test_a_hostile_file_is_refused_in_a_line(line, told, run, tmp_path, capsys):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "other.gin").write_text("A = 1\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link.gin").symlink_to(tmp_path / "outside" / "other.gin")
    (inner / "run.gin").write_text(f"{line}\n")
    assert converted(inner / "run.gin") == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1 and len(error) < 2500


def test_nothing_that_a_file_names_is_imported(run, tmp_path, monkeypatch):
    (tmp_path / "wicked_module.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run.write_text("import wicked_module\nfrom wicked_module import part\n" + RUN)
    assert t5x_gin.translate(str(run)).left == ()
    assert "wicked_module" not in sys.modules


def test_macros_of_t5x_that_nothing_uses_are_refused_by_name(tmp_path):
    (tmp_path / "mine.gin").write_text("MODEL_PARALLEL_SUBMESH = (2, 2, 1, 1)\n")
    with pytest.raises(
        UserError, match="mine.gin:1: MODEL_PARALLEL_SUBMESH is a macro of T5X that capibara does not have"
    ):
        config.parse([tmp_path / "mine.gin"])
    (tmp_path / "mine.gin").write_text("OWN = 1\n")
    config.parse([tmp_path / "mine.gin"])
