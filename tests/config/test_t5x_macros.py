"""T5X's macros in a run file: each takes effect, or is refused by its name with what to do; none is ignored."""

import pytest

from capibara import config
from capibara.config import t5x_macros
from capibara.core.types import UserError
from capibara.training.trainer import Trainer

RUN = """
include "runs/pretrain.gin"
include "models/tiny.gin"
Dataset.mixture_or_task_name = "task"
MODEL_DIR = "runs/x"
TRAIN_STEPS = 10
"""
T5 = """
include "models/t5_small.gin"
include "runs/pretrain_t5.gin"
Dataset.mixture_or_task_name = "task"
MODEL_DIR = "runs/x"
TRAIN_STEPS = 10
"""
# Every macro that a Gin file of T5X's repository defines: its value in a run file, and what becomes of it: a field's value
# (a path from the Trainer), or the end of the line that refuses it.
MACROS = {
    "MODEL_DIR": ("runs/y", "model_dir", "runs/y"),
    "TRAIN_STEPS": (70, "steps", 70),
    "BATCH_SIZE": (48, "plan.batch_size", 48),
    "MIXTURE_OR_TASK_NAME": ("mine", "dataset.mixture_or_task_name", "mine"),
    "LEARNING_RATE": (0.5, "optimizer.schedule.learning_rate", 0.5),
    "MIXTURE_OR_TASK_MODULE": ("my.tasks", "dataset.task_module", "my.tasks"),
    "USE_CACHED_TASKS": (True, "dataset.use_cached", True),
    "SHUFFLE_TRAIN_EXAMPLES": (False, "dataset.shuffle", False),
    "TASK_FEATURE_LENGTHS": ({"inputs": 40, "targets": 24}, "dataset.length", 64),
    "DROPOUT_RATE": (0.25, "model.dropout_rate", 0.25),
    "VOCAB_SIZE": (512, "model.vocab_size", 512),
    "ACTIVATION_DTYPE": ("bfloat16", "model.dtype", "bfloat16"),
    "INITIAL_CHECKPOINT_PATH": ("gs://there/checkpoint_1", "init_from", "gs://there/checkpoint_1"),
    "EVAL_STEPS": (7, "evaluation.max_batches", 7),
    "EVAL_PERIOD": (9, "evaluation.every", 9),
    "RANDOM_SEED": (3, "seed", 3),
    "Z_LOSS": (0.0001, "z_loss", 0.0001),
    "LABEL_SMOOTHING": (0.1, "label_smoothing", 0.1),
    "LOSS_NORMALIZING_FACTOR": ("NUM_REAL_TARGET_TOKENS", "loss_normalization", "tokens"),
    "NUM_MODEL_PARTITIONS": (2, "plan.tensor", 2),
    "NUM_EXPERT_PARTITIONS": (2, "plan.expert", 2),
    "TRAIN_STEPS_RELATIVE": (5, None, "set TRAIN_STEPS, which counts from the first step"),
    "USE_HARDWARE_RNG": (False, None, "take it out"),
    "VOCABULARY": ("x", None, "a task brings its own"),
    "OUTPUT_FEATURES": ("x", None, "a task brings its own"),
    "OPTIMIZER": ("x", None, "bind Optimizer.name"),
    "MODEL": (5, None, "bind Trainer.model"),
    "MODEL_PARALLEL_SUBMESH": (None, None, "Plan.tensor says how many devices"),
    "NUM_EXPERTS": (8, None, "bind MixtureOfExperts.num_experts"),
    "EXPERT_DROPOUT_RATE": (0.1, None, "the model's dropout_rate"),
    "TRAIN_EVAL_MIXTURE_OR_TASK_NAME": ("x", None, "the validation split of the task"),
    "USE_CACHED_TASKS_TRAIN_EVAL": (True, None, "USE_CACHED_TASKS is for training and evaluation"),
    "EVALUATOR_NUM_EXAMPLES": (5, None, "SeqioEvaluation.num_examples"),
    "EVALUATOR_USE_MEMORY_CACHE": (True, None, "take it out"),
    "JSON_WRITE_N_RESULTS": (5, None, "capibara evaluate --predictions"),
    "CHECKPOINT_PATH": ("x", None, "capibara evaluate --model_dir"),
    "EVAL_OUTPUT_DIR": ("x", None, "capibara evaluate --out"),
    "INFER_OUTPUT_DIR": ("x", None, "capibara evaluate --predictions"),
    "MODEL_OUTPUT_DIR": ("x", None, "capibara convert --to"),
    "MODEL_NAME": ("x", None, "capibara convert --to"),
    "TF_EXAMPLE_FILE_PATHS": ("x", None, "make a task of the files"),
    "TF_EXAMPLE_FILE_TYPE": ("x", None, "make a task of the files"),
    "MIXTURE_NAME": ("x", None, "set MIXTURE_OR_TASK_NAME"),
    "FEATURE_LENGTHS": ({"inputs": 4}, None, "set TASK_FEATURE_LENGTHS"),
    "BEAM_SIZE": (4, None, "BeamSearch.num_decodes"),
    "ARCHITECTURE": ("x", None, "bind Trainer.model"),
    "INFER_EVAL_DATASET_CFG": ("x", None, "bind Evaluation.task_metrics"),
}


@pytest.fixture
def built(tmp_path):
    """(lines after a run's, flags) -> the Trainer."""

    def build(lines, *flags, run=RUN):
        path = tmp_path / "run.gin"
        path.write_text(f"{run}{lines}\n")
        config.parse([path], flags)
        return config.build(Trainer)

    yield build
    config.reset()


def field_of(trainer, path):
    for name in path.split("."):
        trainer = getattr(trainer, name)
    return trainer


@pytest.mark.parametrize("name", MACROS)
@pytest.mark.parametrize("by_flag", [False, True], ids=["in a file", "as a flag"])
def test_each_macro_of_t5x_works_or_is_refused(built, name, by_flag):
    value, path, expected = MACROS[name]
    given = ("", f"{name} = {value!r}") if by_flag else (f"{name} = {value!r}",)
    if path is None:
        with pytest.raises(UserError, match=f"{name} is a macro of T5X that capibara does not have: .*{expected}"):
            built(*given)
    else:
        assert field_of(built(*given), path) == expected


def test_the_table_has_every_macro():
    assert t5x_macros.NAMES == set(MACROS)


@pytest.mark.parametrize("name", [name for name, (_, path, _) in MACROS.items() if path is not None])
def test_a_macro_that_is_required_is_asked_for(built, name):
    with pytest.raises(UserError, match=name):
        built(f"{name} = %gin.REQUIRED")


def test_a_refused_macro_is_refused_without_a_value(built):
    with pytest.raises(UserError, match="OPTIMIZER is a macro of T5X that capibara does not have"):
        built("OPTIMIZER = %gin.REQUIRED")


@pytest.mark.parametrize(
    "name, field", [("MODEL_DIR", "Trainer.model_dir"), ("MIXTURE_OR_TASK_NAME", "Dataset.mixture_or_task_name")]
)
def test_what_comes_last_holds_of_a_field_and_its_macro(built, name, field):
    path = MACROS[name][1]
    assert field_of(built(f'{name} = "first"\n{field} = "last"'), path) == "last"
    assert field_of(built(f'{field} = "first"\n{name} = "last"'), path) == "last"
    assert field_of(built(f'{field} = "first"', f"{name} = 'flag'"), path) == "flag"


def test_the_models_class_may_be_a_macro(built):
    lines = "SHAPE = @DecoderConfig()\nTrainer.model = %SHAPE"
    assert built(f"{lines}\nDROPOUT_RATE = 0.5").model.dropout_rate == 0.5


def test_lengths_of_features(built):
    lengths = "TASK_FEATURE_LENGTHS = {'inputs': 40, 'targets': 24}"
    decoder, both = built(lengths).dataset, built(lengths, run=T5).dataset
    assert (decoder.length, decoder.inputs_length, decoder.encoder_length) == (64, 40, None)
    assert (both.length, both.inputs_length, both.encoder_length) == (24, None, 40)
    assert built("TASK_FEATURE_LENGTHS = {'targets': 24}").dataset.inputs_length is None
    with pytest.raises(UserError, match="and an encoder-decoder reads 'inputs', too"):
        built("TASK_FEATURE_LENGTHS = {'targets': 24}", run=T5)
    for wrong in ("{'inputs': 24}", "{'text': 4, 'targets': 2}", "{'targets': 0}", "{'targets': True}", "7", "None"):
        with pytest.raises(
            UserError, match=r"run.gin:\d+: TASK_FEATURE_LENGTHS is .*, must be {'inputs': N, 'targets': N}"
        ):
            built(f"TASK_FEATURE_LENGTHS = {wrong}")


def test_none_is_what_t5x_has_by_default(built):
    trainer = built("RANDOM_SEED = None\nMIXTURE_OR_TASK_MODULE = None\nTRAIN_STEPS_RELATIVE = None\nEVAL_STEPS = None")
    assert (trainer.seed, trainer.dataset.task_module, trainer.evaluation.max_batches) == (0, None, None)
    assert built("LOSS_NORMALIZING_FACTOR = None").loss_normalization == "sum"
    assert built("LOSS_NORMALIZING_FACTOR = 2048").loss_normalization == 2048
    assert (
        built("INITIAL_CHECKPOINT_PATH = 'x'").init_with == "state"
    )  # T5X restores the optimizer's state and the step


def test_the_later_value_holds_or_is_told(built):
    assert built("Trainer.z_loss = 0.5\nZ_LOSS = 0.25").z_loss == 0.25
    assert built("Z = 0.5\nTrainer.z_loss = %Z\nZ_LOSS = 0.25").z_loss == 0.25
    told = (
        r"run.gin:\d+: Z_LOSS sets Trainer.z_loss, which a later line binds again \(.*run.gin:\d+\): put Z_LOSS below"
    )
    for lines in ("Z_LOSS = 0.25\nTrainer.z_loss = 0.5", "Trainer.z_loss = %Z\nZ_LOSS = 0.25\nZ = 0.5"):
        with pytest.raises(UserError, match=told):
            built(lines)
    with pytest.raises(UserError, match=r"Z_LOSS sets Trainer.z_loss, .*\(command line"):
        built("Z_LOSS = 0.25", "Trainer.z_loss = 0.5")
    assert built("Z_LOSS = 0.25\nTrainer.z_loss = %Z_LOSS").z_loss == 0.25


def test_a_macro_that_is_to_be_given(built):
    with pytest.raises(UserError, match="TASK_FEATURE_LENGTHS"):
        built("TASK_FEATURE_LENGTHS = %gin.REQUIRED")
    given = "TASK_FEATURE_LENGTHS = {'targets': 24}"
    assert built("TASK_FEATURE_LENGTHS = %gin.REQUIRED", given).dataset.length == 24


def test_a_run_records_what_its_macros_gave(built, tmp_path):
    trainer = built("TASK_FEATURE_LENGTHS = {'inputs': 40, 'targets': 24}\nDROPOUT_RATE = 0.25")
    recorded = config.Recorded(config.operative(), "config.gin")
    config.parse([], [], [], recorded)
    assert config.build(Trainer) == trainer


def test_places_of_inputs_and_targets_are_checked(built):
    for lines, told in (
        ("Dataset.inputs_length = 256", "from 1 to below Dataset.length"),
        ("Dataset.inputs_length = 8\nDataset.mixture_or_task_name = None\ninclude 'tasks/stdlib.gin'", "leave it out"),
    ):
        with pytest.raises(UserError, match=f"Dataset.inputs_length .*{told}"):
            built(lines)
    with pytest.raises(UserError, match="Dataset.inputs_length .* is only for a decoder on a SeqIO task"):
        built("Dataset.inputs_length = 8", run=T5)


@pytest.mark.parametrize(
    ("binding", "ours"),
    [
        ("partitioning.PjitPartitioner.num_partitions = 2", "Plan"),
        ("train/utils.DatasetConfig.batch_size = 8", "Dataset"),
        ("utils.SaveCheckpointConfig.period = 5", "Checkpointing"),
    ],
)
def test_a_binding_of_t5x_is_refused_with_its_class_here(binding, ours):
    with pytest.raises(UserError, match=rf"it is T5X's, see {ours} here \(docs/migrating_from_t5x.md\)"):
        config.parse(["quickstart.gin"], [binding])


def test_a_file_of_t5x_is_to_be_translated(tmp_path):
    (tmp_path / "run.gin").write_text("from __gin__ import dynamic_registration\nfrom t5x import adafactor\n")
    with pytest.raises(
        UserError, match="run.gin:2: no module named t5x.*: translate a file of T5X first, with capibara conv"
    ):
        config.parse([tmp_path / "run.gin"])
