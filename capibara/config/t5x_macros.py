"""T5X's macros in a run file of capibara: the field that each binds, or what to do instead.

In T5X a run file sets macros at its head, and the files that it includes bind fields to them. Here a macro of such a name
that no file uses binds the field of the same meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError

MODEL = "the model"  # stands for the class of Trainer.model
_NORMALIZATIONS = {
    "NUM_REAL_TARGET_TOKENS": "tokens", "NUM_TOTAL_TARGET_TOKENS": "positions", "AVERAGE_PER_SEQUENCE": "documents",
}  # fmt: skip
# Class or function of T5X -> the class here that has most of its options.
_OWNERS = {
    "PjitPartitioner": "Plan", "DatasetConfig": "Dataset", "CheckpointConfig": "Checkpointing",
    "SaveCheckpointConfig": "Checkpointing", "RestoreCheckpointConfig": "Trainer.init_from",
    "create_learning_rate_scheduler": "FactorSchedule", "T5Config": "EncoderDecoderConfig",
    "TransformerConfig": "DecoderConfig", "EncoderDecoderModel": "Trainer", "DecoderOnlyModel": "Trainer",
    "beam_search": "BeamSearch", "temperature_sample": "Sampling", "train": "Trainer", "Evaluator": "SeqioEvaluation",
}  # fmt: skip
# Macro -> the field that it binds.
_FIELDS = {
    "MODEL_DIR": "Trainer.model_dir",
    "TRAIN_STEPS": "Trainer.steps",
    "BATCH_SIZE": "Plan.batch_size",
    "MIXTURE_OR_TASK_NAME": "Dataset.mixture_or_task_name",
    "MIXTURE_OR_TASK_MODULE": "Dataset.task_module",
    "USE_CACHED_TASKS": "Dataset.use_cached",
    "SHUFFLE_TRAIN_EXAMPLES": "Dataset.shuffle",
    "DROPOUT_RATE": f"{MODEL}.dropout_rate",
    "VOCAB_SIZE": f"{MODEL}.vocab_size",
    "ACTIVATION_DTYPE": f"{MODEL}.dtype",
    "INITIAL_CHECKPOINT_PATH": "Trainer.init_from",
    "EVAL_STEPS": "Evaluation.max_batches",
    "EVAL_PERIOD": "Evaluation.every",
    "RANDOM_SEED": "Trainer.seed",
    "Z_LOSS": "Trainer.z_loss",
    "LABEL_SMOOTHING": "Trainer.label_smoothing",
    "LOSS_NORMALIZING_FACTOR": "Trainer.loss_normalization",
    "NUM_MODEL_PARTITIONS": "Plan.tensor",
    "NUM_EXPERT_PARTITIONS": "Plan.expert",
    "LEARNING_RATE": "Schedule.learning_rate",
}
# Macros that capibara's own files use, too: a later binding of the field wins.
_OURS = frozenset(("MODEL_DIR", "TRAIN_STEPS", "BATCH_SIZE", "MIXTURE_OR_TASK_NAME", "LEARNING_RATE"))
_GIN_MACRO = "gin.macro"
_ANY = 1  # stands for a value that is not set yet
_LENGTHS = "TASK_FEATURE_LENGTHS"
# Unsupported macro -> what to do instead.
_REFUSED = {
    "TRAIN_STEPS_RELATIVE": "set TRAIN_STEPS, which counts from the first step of the checkpoint",
    "USE_HARDWARE_RNG": "take it out, JAX's generator is used",
    "VOCABULARY": "take it out, a task brings its own (Dataset.vocabulary names one)",
    "OUTPUT_FEATURES": "take it out, a task brings its own",
    "OPTIMIZER": "bind Optimizer.name and Optimizer's other fields",
    "MODEL": "bind Trainer.model, e.g. to @EncoderDecoderConfig()",
    "ARCHITECTURE": "bind Trainer.model, e.g. to @EncoderDecoderConfig()",
    "MODEL_PARALLEL_SUBMESH": "take it out, Plan.tensor says how many devices share a layer",
    "NUM_EXPERTS": "bind MixtureOfExperts.num_experts",
    "EXPERT_DROPOUT_RATE": "take it out, experts drop out at the model's dropout_rate",
    "TRAIN_EVAL_MIXTURE_OR_TASK_NAME": "take it out, the validation split of the task is evaluated",
    "USE_CACHED_TASKS_TRAIN_EVAL": "take it out, USE_CACHED_TASKS is for training and evaluation",
    "INFER_EVAL_DATASET_CFG": "bind Evaluation.task_metrics = True",
    "EVALUATOR_NUM_EXAMPLES": "bind Evaluation.task_metrics = True and SeqioEvaluation.num_examples",
    "EVALUATOR_USE_MEMORY_CACHE": "take it out, examples are kept in memory",
    "JSON_WRITE_N_RESULTS": "take it out, capibara evaluate --predictions writes all",
    "CHECKPOINT_PATH": "use capibara evaluate --model_dir",
    "EVAL_OUTPUT_DIR": "use capibara evaluate --out",
    "INFER_OUTPUT_DIR": "use capibara evaluate --predictions",
    "MODEL_OUTPUT_DIR": "use capibara convert --to",
    "MODEL_NAME": "use capibara convert --to",
    "TF_EXAMPLE_FILE_PATHS": "make a task of the files",
    "TF_EXAMPLE_FILE_TYPE": "make a task of the files",
    "MIXTURE_NAME": "set MIXTURE_OR_TASK_NAME",
    "FEATURE_LENGTHS": f"set {_LENGTHS}",
    "BEAM_SIZE": "bind Sampling.beams = @BeamSearch() and BeamSearch.num_decodes",
}
NAMES = frozenset((*_FIELDS, *_REFUSED, _LENGTHS))
LastBindings = Mapping[str, tuple[int, str]]


def last_bindings(
    bound_at: Mapping[tuple[str, str, str], str], follows: Mapping[tuple[str, str, str], str | None]
) -> LastBindings:
    """Macro or field -> the number of its last binding in the order of all bindings, and its file and line.

    Args:
      bound_at: (scope, selector, parameter) -> file and line of its binding, in the order of the bindings.
      follows: the same keys -> the macro that is its value, which may be bound later.
    """
    numbered = {key: (number, where) for number, (key, where) in enumerate(bound_at.items())}
    result: dict[str, tuple[int, str]] = {}
    for key, last in numbered.items():
        scope, selector, parameter = key
        if selector == _GIN_MACRO:
            result[scope] = last
        elif not scope:
            macro = (follows[key] or "", _GIN_MACRO, "value")
            result[f"{selector.rpartition('.')[2]}.{parameter}"] = max(last, numbered.get(macro, last))
    return result


def statements(macro: str, value: object, model: str | None, bound: LastBindings) -> list[str]:
    """The Gin statements that a macro of T5X stands for.

    Args:
      macro, value, model: as in `bindings`.
      bound: from `last_bindings`.

    Raises:
      UserError: as `bindings`; or a later line binds the field to another value.
    """
    if repr(value) == "%gin.REQUIRED" and macro not in _REFUSED:  # `build` then reports that it has no value
        fields = ["Dataset.length"] if macro == _LENGTHS else bindings(macro, _ANY, model)
        texts = {field: f"%{macro}" for field in fields}
    else:
        texts = bindings(macro, value, model)
    if macro in _OURS:
        texts = {field: text for field, text in texts.items() if field not in bound or bound[field] < bound[macro]}
    for field in texts:
        if field in bound and bound[field] > bound[macro]:
            raise UserError(
                f"{macro} sets {field}, which a later line binds again ({bound[field][1]}): put {macro} below that line, or "
                "remove one of them"
            )
    return [f"{field} = {text}" for field, text in texts.items()]


def bindings(macro: str, value: object, model: str | None) -> dict[str, str]:
    """The fields that a macro of T5X binds: field -> its value as Gin text.

    Args:
      macro: one of NAMES.
      value: its value.
      model: the class of Trainer.model; None: not bound.

    Raises:
      UserError: capibara has no such field; the message says what to do instead.
    """
    if macro in _REFUSED:
        if value is None and macro in ("TRAIN_STEPS_RELATIVE", "EVALUATOR_NUM_EXAMPLES", "JSON_WRITE_N_RESULTS"):
            return {}  # T5X's own default, which its run files write out
        raise UserError(f"{macro} is a macro of T5X that capibara does not have: {_REFUSED[macro]}")
    if macro == _LENGTHS:
        return {field: repr(length) for field, length in _lengths(value, model).items()}
    field = _FIELDS[macro]
    if field.startswith(MODEL):
        if model is None:
            raise UserError(f"{macro} sets a field of the model, but Trainer.model is not bound: bind it")
        field = field.replace(MODEL, model)
    if macro == "RANDOM_SEED" and value is None:  # T5X draws one
        return {}
    if macro == "INITIAL_CHECKPOINT_PATH":
        return {field: f"%{macro}", "Trainer.init_with": repr("state")}
    if macro == "LOSS_NORMALIZING_FACTOR":
        return {field: repr("sum" if value is None else _NORMALIZATIONS.get(str(value).rpartition(".")[2], value))}
    return {field: f"%{macro}"}


def _lengths(value: Any, model: str | None) -> dict[str, int]:
    """The fields for row lengths that correspond to the lengths of a task's features."""
    numbers = isinstance(value, Mapping) and all(type(n) is int and n > 0 for n in value.values())
    if not numbers or not {"targets"} <= value.keys() <= {"inputs", "targets"}:
        raise UserError(f"{_LENGTHS} is {value!r}, must be {{'inputs': N, 'targets': N}}, or without 'inputs'")
    targets, inputs = value["targets"], value.get("inputs")
    if model == "EncoderDecoderConfig":
        if inputs is None:
            raise UserError(f"{_LENGTHS} is {value!r}, and an encoder-decoder reads 'inputs', too: add it")
        return {"Dataset.length": targets, "Dataset.encoder_length": inputs}
    if inputs is None:
        return {"Dataset.length": targets}
    if model == "EncoderConfig":
        raise UserError(f"{_LENGTHS} is {value!r}, and an encoder alone reads 'targets': leave 'inputs' out")
    return {"Dataset.length": inputs + targets, "Dataset.inputs_length": inputs}


def of_t5x(selector: str) -> str:
    """A hint if an unknown selector is a class or a function of T5X."""
    ours = _OWNERS.get(selector.rpartition(".")[2])
    return f": it is T5X's, see {ours} here (docs/migrating_from_t5x.md)" if ours else ""
