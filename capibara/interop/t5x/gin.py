"""A T5X Gin file as one of ours: its bindings are read as data and written anew, each with a note of where it comes from.

Nothing that it names is imported or called. Files that it includes are read from the folders that the user names.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.config import Statement, statements_of
from capibara.config.search import Text
from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.t5x import decoding as t5x_decoding

_FILES, _MOST_BYTES = 64, 1 << 20
_UNSET = "%gin.REQUIRED"
_NO_TASKS = {"__gin__", "__main__", "clu", "flax", "flaxformer", "jax", "optax", "seqio", "t5x"}  # roots of modules
_OTHER_RUNS = {"evaluate", "infer", "save", "precompile"}
_MACROS = (  # that are given on the command line
    "MODEL_DIR", "MIXTURE_OR_TASK_NAME", "MIXTURE_OR_TASK_MODULE", "TRAIN_STEPS", "BATCH_SIZE", "DROPOUT_RATE",
    "USE_CACHED_TASKS", "SHUFFLE_TRAIN_EXAMPLES", "EVAL_STEPS", "EVAL_PERIOD", "Z_LOSS", "LABEL_SMOOTHING",
)  # fmt: skip
_NETWORKS = {"t5": "shared", "scalable_t5": "each_layer", "decoder_only": "shared"}
_ACTIVATIONS = {
    ("relu",): "relu", ("gelu",): "gelu", ("gelu", "linear"): "geglu", ("silu", "linear"): "swiglu",
    ("swish", "linear"): "swiglu",
}  # fmt: skip
_NORMALIZATIONS = {
    None: "sum", "NUM_REAL_TARGET_TOKENS": "tokens", "NUM_TOTAL_TARGET_TOKENS": "positions", "AVERAGE_PER_SEQUENCE": "documents",
}  # fmt: skip
_NETWORK_DEFAULTS = {
    "dtype": "float32", "emb_dim": 512, "num_heads": 8, "head_dim": 64, "mlp_dim": 2048, "mlp_activations": ("relu",),
    "dropout_rate": 0.1, "logits_via_embedding": False,
}  # fmt: skip
_SIZES = {
    "vocab_size": "vocab_size", "emb_dim": "embed_dim", "num_heads": "num_heads", "head_dim": "head_dim",
    "mlp_dim": "mlp_dim", "num_encoder_layers": "num_encoder_layers", "num_decoder_layers": "num_layers",
    "num_layers": "num_layers", "dtype": "dtype", "dropout_rate": "dropout_rate",
}  # fmt: skip
_OPTIMIZER = {
    "beta1": "Optimizer.momentum", "min_dim_size_to_factor": "Optimizer.factored_min_size",
    "multiply_by_parameter_scale": "Optimizer.parameter_scale", "global_norm_clip_threshold": "Optimizer.clip_norm",
}  # fmt: skip
_ADAFACTOR = (
    "decay_rate", "step_offset", "clipping_threshold", "epsilon1", "epsilon2", "max_parameter_scale", "weight_decay_rate",
    "weight_decay_rate_lr_exponent",
)  # fmt: skip
_SCHEDULE = (
    "factors", "base_learning_rate", "warmup_steps", "decay_factor", "steps_per_decay", "steps_per_cycle", "step_offset",
    "min_learning_rate",
)  # fmt: skip
# Owners and parameters whose work is done here otherwise, or always: (owner, parameter) -> the note.
_ELSEWHERE = {
    ("train", "train_dataset_cfg"): "Trainer.dataset", ("train", "train_eval_dataset_cfg"): "the task's validation split",
    ("train", "infer_eval_dataset_cfg"): "capibara evaluate, on a run folder", ("train", "checkpoint_cfg"): "Checkpointing",
    ("train", "partitioner"): "Plan", ("train", "trainer_cls"): "the loop", ("train", "model"): "Trainer.model",
    ("train", "use_hardware_rng"): "JAX's own", ("train", "summarize_config_fn"): "config.gin of the run folder",
    ("train", "inference_evaluator_cls"): "capibara evaluate", ("train", "stats_period"): "Trainer.log_every",
    ("PjitPartitioner", "logical_axis_rules"): "Rules", ("PjitPartitioner", "model_parallel_submesh"): "Plan",
    ("CheckpointConfig", "restore"): "Trainer.init_from", ("CheckpointConfig", "save"): "Checkpointing",
    ("RestoreCheckpointConfig", "mode"): "Trainer.init_from", ("RestoreCheckpointConfig", "dtype"): "float32",
    ("SaveCheckpointConfig", "dtype"): "float32", ("SaveCheckpointConfig", "save_dataset"): "always",
    ("Trainer", "learning_rate_fn"): "Optimizer.schedule", ("Transformer", "config"): "Trainer.model",
    ("DecoderWrapper", "config"): "Trainer.model", ("Adafactor", "logical_factor_rules"): "Adafactor.factoring",
    ("SentencePieceVocabulary", "sentencepiece_model_file"): "the task's own vocabulary",
    ("SentencePieceVocabulary", "extra_ids"): "the task's own vocabulary",
    ("ByteVocabulary", "extra_ids"): "the task's own vocabulary",
    ("Evaluator", "logger_cls"): "capibara evaluate", ("Evaluator", "num_examples"): "capibara evaluate",
    ("Evaluator", "use_memory_cache"): "capibara evaluate", ("JSONLogger", "write_n_results"): "capibara evaluate",
}  # fmt: skip
_MODELS = ("EncoderDecoderModel", "DecoderOnlyModel", "PrefixLanguageModel")
for _owner in _MODELS:
    for _name, _where in (("module", "Trainer.model"), ("optimizer_def", "Trainer.optimizer")):
        _ELSEWHERE[_owner, _name] = _where
    for _name in ("input_vocabulary", "output_vocabulary", "vocabulary"):
        _ELSEWHERE[_owner, _name] = "the task's own vocabulary"


@dataclasses.dataclass(frozen=True)
class Translated:
    """What a T5X Gin file comes to.

    Attributes:
      text: our Gin file.
      notes: a line for each binding that is somewhere else here.
      left: bindings that have no place here.
    """

    text: str
    notes: tuple[str, ...]
    left: tuple[str, ...]


def translate(path: str, folders: Sequence[str] = ()) -> Translated:
    """A T5X Gin file as one of ours.

    Args:
      path: of the file.
      folders: in which the files that it includes are looked for, beside its own: T5X's repository.

    Raises:
      UserError: a file is missing, no Gin, or what it configures is no training of T5X's networks.
    """
    reading = _Reading([os.path.dirname(os.path.abspath(path)), *map(os.path.abspath, folders)])
    reading.file(path, ())
    return _translated(_Bindings(reading))


class _Reading:
    """All bindings of a file and of those that it includes; the last of each holds.

    Attributes:
      bound: (scope, owner's last name, parameter) -> its value.
      macros: name -> value.
      modules: that it imports.
    """

    def __init__(self, folders: Sequence[str]):
        self._folders, self._count = folders, 0
        self.bound: dict[tuple[str, str, str], Any] = {}
        self.macros: dict[str, Any] = {}
        self.modules: list[str] = []

    def file(self, path: str, around: tuple[str, ...]) -> None:
        self._count += 1
        if os.path.realpath(path) in around or self._count > _FILES:
            raise UserError(f"{path} includes itself, or more than {_FILES} files: it is no run of T5X")
        if not os.path.isfile(path):
            raise UserError(f"{path} is no file: name a Gin file of T5X")
        text = limits.read_text(path, _MOST_BYTES)
        for statement in statements_of(text, path):
            self._take(statement, path, (*around, os.path.realpath(path)))

    def _take(self, statement: Statement, path: str, around: tuple[str, ...]) -> None:
        if statement.include is not None:
            self.file(self._resolved(statement.include, path), around)
        elif statement.module is not None:
            self.modules.append(statement.module)
        elif statement.parameter:
            self.bound[statement.scope, statement.owner.rpartition(".")[2], statement.parameter] = statement.value
        else:
            self.macros[f"{statement.scope}/{statement.owner}".lstrip("/")] = statement.value

    def _resolved(self, name: str, path: str) -> str:
        if os.path.isabs(name) or ".." in name.split("/"):
            raise UserError(
                f"{path} includes {name!r}, must be a file below T5X's repository: write its path from there"
            )
        for folder in self._folders:
            if os.path.isfile(result := os.path.join(folder, name)):
                if os.path.commonpath([os.path.realpath(result), os.path.realpath(folder)]) == os.path.realpath(folder):
                    return result
        raise UserError(
            f"{path} includes {name!r}, which is in none of its folders: give T5X's repository, --gin_search_paths=FOLDER"
        )


class _Bindings:
    """The bindings of a `_Reading` that are not translated yet, and the lines of ours that are.

    Attributes:
      left: (scope, owner's last name, parameter) -> value.
      lines: of our file.
      retained: macros of T5X's that ours has, too.
      notes: on bindings that are not written.
      modules: that T5X's file imports.
    """

    def __init__(self, reading: _Reading):
        self.left, self._macros, self.modules = dict(reading.bound), reading.macros, reading.modules
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.retained: dict[str, str] = {}

    def value(self, value: object) -> Any:
        """With macros followed."""
        seen: set[str] = set()
        while isinstance(value, Text) and str(value).startswith("%"):
            if str(value) == _UNSET:
                return value
            if str(value) in seen:
                raise UserError(f"{value} is a macro of itself: give it a value")
            seen.add(str(value))
            if str(value)[1:] not in self._macros:
                return Text(_UNSET)
            value = self._macros[str(value)[1:]]
        return value

    def taken(self, owner: str, name: str, default: object = None, scope: str = "") -> Any:
        return self.value(self.left.pop((scope, owner, name), default))

    def has(self, owner: str, name: str, scope: str = "") -> bool:
        return (scope, owner, name) in self.left

    def put(self, ours: str, value: object, theirs: str) -> None:
        value = str(value) if isinstance(value, Text) else repr(value)
        if value.startswith("@"):
            raise UserError(f"{theirs} = {value} is no plain value: capibara has it as {ours}, give it there")
        self.lines.append(f"{ours} = {value}  # {theirs}")

    def moved(self, owner: str, name: str, ours: str, scope: str = "", default: object = None) -> Any:
        """Writes a binding under our name, its macro too; returns its value."""
        raw = self.left.get((scope, owner, name), default)
        value = self.taken(owner, name, default, scope)
        macro = str(raw)[1:] if isinstance(raw, Text) and str(raw)[1:] in _MACROS else None
        if macro is None:
            self.put(ours, value, _shown(scope, owner, name))
        else:
            self.retained[macro] = str(value) if isinstance(value, Text) else repr(value)
            self.lines.append(f"{ours} = %{macro}  # {_shown(scope, owner, name)}")
        return value

    def each(self, owner: str, names: Mapping[str, str], scope: str = "") -> None:
        for theirs, ours in names.items():
            if self.has(owner, theirs, scope):
                self.moved(owner, theirs, ours, scope)


def _translated(run: _Bindings) -> Translated:
    decoder = any(owner in ("DecoderOnlyModel", "TransformerConfig") for _, owner, _ in run.left)
    head = ["# Made by capibara convert-config of a T5X Gin file; each line says what it was."]
    if others := sorted({owner for _, owner, _ in run.left} & _OTHER_RUNS):
        raise UserError(
            f"it configures {others[0]} of T5X, and only training and models are translated: take its run file"
        )
    targets = None
    if any(owner == "train" for _, owner, _ in run.left):
        targets = _data(run, decoder)
        _training(run)
    _model(run, decoder)
    _objective(run, decoder)
    _optimizer(run)
    _decoding(run, decoder, targets)
    for (scope, owner, name), value in list(run.left.items()):
        where = "capibara evaluate" if scope == "infer_eval" else _ELSEWHERE.get((owner, name))
        if where is None and _has_its_default(run, owner, name, value):
            where = "it is None"
        if where is not None:
            del run.left[scope, owner, name]
            run.notes.append(f"{_shown(scope, owner, name)} is not written: {where}")
    left = tuple(_shown(*key) for key in run.left)
    rest = [f"# {name} has no place in capibara" for name in left]
    macros = [f"{name} = {value}" for name, value in run.retained.items()]
    return Translated("\n".join([*head, "", *macros, *run.lines, *rest]) + "\n", tuple(run.notes), left)


def _has_its_default(run: _Bindings, owner: str, name: str, value: object) -> bool:
    return (owner, name) in (("train", "relative_steps"), ("train", "eval_steps")) and run.value(value) is None


def _training(run: _Bindings) -> None:
    run.lines += ["", "Trainer.plan = @Plan()", "Trainer.evaluation = @Evaluation()"]
    run.lines.append("Trainer.checkpointing = @Checkpointing()")
    names = {"model_dir": "Trainer.model_dir", "total_steps": "Trainer.steps", "eval_period": "Evaluation.every"}
    names |= {"eval_steps": "Evaluation.max_batches"}
    run.each("train", names)
    _task_metrics(run)
    if (seed := run.taken("train", "random_seed")) is not None:
        run.put("Trainer.seed", seed, "train.random_seed")
    if (parts := run.taken("PjitPartitioner", "num_partitions", 1)) != 1:
        run.put("Plan.tensor", parts, "PjitPartitioner.num_partitions")
    if (batches := run.taken("Trainer", "num_microbatches")) is not None:
        run.put("Plan.accumulation", batches, "Trainer.num_microbatches")
    run.each("SaveCheckpointConfig", {"period": "Checkpointing.every"})
    retained = run.taken("SaveCheckpointConfig", "keep")
    run.put("Checkpointing.keep", 1_000_000 if retained is None else retained, "SaveCheckpointConfig.keep")
    path = run.taken("RestoreCheckpointConfig", "path", [])
    if path not in ([], (), None, ""):
        path = path[0] if isinstance(path, (list, tuple)) and len(path) == 1 else path
        run.put("Trainer.init_from", path, "RestoreCheckpointConfig.path")
        run.put("Trainer.init_with", "state", "it restores the optimizer's state and the step too")


def _task_metrics(run: _Bindings) -> None:
    """The metrics of generated texts during training."""
    if run.value(run.left.get(("", "train", "infer_eval_dataset_cfg"))) is None:
        return
    run.taken("train", "infer_eval_dataset_cfg")
    run.put("Evaluation.task_metrics", True, "train.infer_eval_dataset_cfg")
    if isinstance(split := run.taken("DatasetConfig", "split", None, "infer_eval"), str) and split != _UNSET:
        run.put("SeqioEvaluation.split", split, "infer_eval/DatasetConfig.split")
    if (count := run.taken("Evaluator", "num_examples")) is not None:
        run.put("SeqioEvaluation.num_examples", count, "seqio.Evaluator.num_examples")


def _data(run: _Bindings, decoder: bool) -> int | None:
    """Of the data; the tokens of a text, as far as they are said."""
    targets = None
    run.lines += ["Trainer.dataset = @Dataset()"]
    kind = "encoder_decoder"
    if decoder:
        kind = "prefix" if _bidirectional(run) is True else "causal"
    run.put("Dataset.kind", kind, "the model")
    lengths = run.taken("DatasetConfig", "task_feature_lengths", Text(_UNSET), "train")
    if isinstance(lengths, Mapping) and {"targets"} <= lengths.keys() <= {"inputs", "targets"}:
        targets = lengths["targets"]
        total = sum(lengths.values()) if decoder else lengths["targets"]
        run.put("Dataset.length", total, f"TASK_FEATURE_LENGTHS = {dict(lengths)}")
        if decoder and "inputs" in lengths:
            run.put("Dataset.inputs_length", lengths["inputs"], "TASK_FEATURE_LENGTHS")
        if not decoder:
            run.put("Dataset.encoder_length", lengths.get("inputs"), "TASK_FEATURE_LENGTHS")
    elif str(lengths) == _UNSET:
        names = ["Dataset.length"] if decoder else ["Dataset.length", "Dataset.encoder_length"]
        for name in names:
            run.put(name, Text(_UNSET), "TASK_FEATURE_LENGTHS has no value")
    else:
        raise UserError(f"TASK_FEATURE_LENGTHS is {limits.shortened(lengths)}, must be {{'inputs': N, 'targets': N}}")
    ours_of = {"mixture_or_task_name": "Dataset.mixture_or_task_name", "batch_size": "Plan.batch_size"}
    ours_of |= {"shuffle": "Dataset.shuffle", "use_cached": "Dataset.use_cached"}
    run.each("DatasetConfig", ours_of, "train")
    for name, ours in (("module", "Dataset.task_module"), ("seed", "Dataset.seed")):
        if run.value(run.left.get(("train", "DatasetConfig", name))) is not None:
            run.moved("DatasetConfig", name, ours, "train")
        else:
            run.taken("DatasetConfig", name, scope="train")
            if name == "module":
                _imported_tasks(run)
    pack = run.taken("DatasetConfig", "pack", True, "train")
    run.put("Dataset.packing", "best_fit" if pack else "none", "train/DatasetConfig.pack")
    _check_split(run, "train", "train")
    _check_split(run, "train_eval", "validation")
    run.each("DatasetConfig", {"batch_size": "Evaluation.batch_size"}, "train_eval")
    for name in ("mixture_or_task_name", "task_feature_lengths", "shuffle", "seed", "use_cached", "pack", "module"):
        if run.has("DatasetConfig", name, "train_eval"):
            run.taken("DatasetConfig", name, scope="train_eval")
            run.notes.append(f"train_eval/DatasetConfig.{name} is not written: evaluation reads as training does")
    return targets


def _imported_tasks(run: _Bindings) -> None:
    """The module that registers the tasks, where T5X's file imports it instead of naming it."""
    modules = sorted({name for name in run.modules if name.partition(".")[0] not in _NO_TASKS})
    if len(modules) == 1:
        run.put("Dataset.task_module", modules[0], f"import {modules[0]}")
    elif modules:
        run.notes.append(f"it imports {', '.join(modules)}: set Dataset.task_module to the one that registers the task")


def _bidirectional(run: _Bindings) -> Any:
    return run.taken("DecoderOnlyModel", "inputs_bidirectional_attention", False)


def _check_split(run: _Bindings, scope: str, split: str) -> None:
    if (bound := run.taken("DatasetConfig", "split", split, scope)) not in (split, Text(_UNSET)):
        raise UserError(f"{scope}/DatasetConfig.split is {bound!r}, must be {split!r}: name it so in the task")


def _model(run: _Bindings, decoder: bool) -> None:
    ours, owner = ("DecoderConfig", "TransformerConfig") if decoder else ("EncoderDecoderConfig", "T5Config")
    run.lines += ["", f"Trainer.model = @{ours}()"]
    network = next((name for name in _NETWORKS if f"t5x.examples.{name}" in " ".join(run.modules)), "t5")
    layers = {"num_layers": 6} if decoder else {"num_encoder_layers": 6, "num_decoder_layers": 6}
    defaults = _NETWORK_DEFAULTS | layers | {"vocab_size": Text(_UNSET)}
    values = {}
    for name, default in defaults.items():
        if name in _SIZES:
            values[name] = run.moved(owner, name, f"{ours}.{_SIZES[name]}", default=default)
        else:
            values[name] = run.taken(owner, name, default)
    bound = values["mlp_activations"]
    activations = tuple(bound) if isinstance(bound, (list, tuple)) else (bound,)
    if not all(isinstance(name, str) for name in activations) or activations not in _ACTIVATIONS:
        raise UserError(
            f"{owner}.mlp_activations is {limits.shortened(bound)}, must be one of {', '.join(map(str, _ACTIVATIONS))}"
        )
    run.put(f"{ours}.activation", _ACTIVATIONS[activations], f"{owner}.mlp_activations")
    tied = values["logits_via_embedding"] is True
    run.put(f"{ours}.head", "tied" if tied else "separate", f"{owner}.logits_via_embedding")
    if decoder:
        run.put(f"{ours}.positions", "relative", "the network")
        run.put(f"{ours}.attention_scale", 1.0, "the network")
        if tied:
            run.put(f"{ours}.logit_scale", float(values["emb_dim"]) ** -0.5, "the network")
        if any("Dataset.kind = 'prefix'" in line for line in run.lines):
            run.put(f"{ours}.inputs_attention", "bidirectional", "DecoderOnlyModel.inputs_bidirectional_attention")
    elif _NETWORKS[network] != "shared":
        run.put(f"{ours}.relative_tables", _NETWORKS[network], f"t5x.examples.{network}")
    if run.has(owner, "scan_layers"):
        loop = "scan" if run.taken(owner, "scan_layers") else "unroll"
        run.put(f"{ours}.layer_loop", loop, f"{owner}.scan_layers")
    policy = run.taken(owner, "remat_policy", "none")
    if policy not in (None, "none"):
        run.put("Plan.remat", {"minimal": "minimal", "full": "full"}.get(policy, policy), f"{owner}.remat_policy")


def _objective(run: _Bindings, decoder: bool) -> None:
    for owner in _MODELS:
        run.each(owner, {"z_loss": "Trainer.z_loss", "label_smoothing": "Trainer.label_smoothing"})
        if not run.has(owner, "loss_normalizing_factor"):
            continue
        factor = run.taken(owner, "loss_normalizing_factor")
        name = str(factor).rpartition(".")[2] if isinstance(factor, (str, Text)) else factor
        known = _NORMALIZATIONS.get(name, name) if name is None or isinstance(name, str) else float(name)
        if isinstance(known, str) and known not in _NORMALIZATIONS.values():
            raise UserError(f"{owner}.loss_normalizing_factor is {known!r}, must be a number or one of T5X's three")
        run.put("Trainer.loss_normalization", known, f"{owner}.loss_normalizing_factor")
    if not any(line.startswith("Trainer.loss_normalization") for line in run.lines):
        run.put("Trainer.loss_normalization", "sum", "T5X's own")


def _decoding(run: _Bindings, decoder: bool, targets: int | None) -> None:
    """`targets`: tokens of a text, as far as they are said."""
    keys = [key for key in run.left if key[1] in t5x_decoding.OWNERS]
    keys += [key for key in run.left if key[1] in _MODELS and key[2] in t5x_decoding.OF_MODELS]
    keys_of = {key[2] if key[1] in _MODELS else f"{key[1]}.{key[2]}": key for key in keys}
    result = t5x_decoding.translated(decoder, {n: run.value(run.left[k]) for n, k in keys_of.items()}, targets)
    if not keys_of:
        return
    run.lines.append("")
    lines = list(result.lines)
    if any(line.startswith("Evaluation.task_metrics") for line in run.lines):
        lines.insert(
            0, ("SeqioEvaluation.sampling", "@Sampling()", "for the task's metrics, and recorded for capibara infer")
        )
    else:
        run.notes.append("capibara evaluate decodes so with '--gin.SeqioEvaluation.sampling=@Sampling()'")
    for ours, value, theirs in lines:
        run.lines.append(f"{ours} = {value}  # {theirs}")
    for name in keys_of.keys() - set(result.left):
        del run.left[keys_of[name]]
    run.notes += result.unused


def _optimizer(run: _Bindings) -> None:
    run.lines += ["", "Trainer.optimizer = @Optimizer()", "Optimizer.adafactor = @Adafactor()"]
    other = [owner for _, owner, _ in run.left if owner in ("AdamW", "adamw", "adam", "sgd", "lamb", "chain")]
    if other:
        raise UserError(f"the optimizer {other[0]} is not translated, only Adafactor is: bind Optimizer by hand")
    run.put("Optimizer.name", "adafactor", "OPTIMIZER")
    run.put("Optimizer.weight_decay", 0.0, "T5X's own")
    if not run.has("Adafactor", "global_norm_clip_threshold"):
        run.put("Optimizer.clip_norm", None, "T5X's own")
    run.each("Adafactor", _OPTIMIZER)
    run.each("Adafactor", {name: f"Adafactor.{name}" for name in _ADAFACTOR})
    if any("t5x.examples.scalable_t5" in module for module in run.modules):
        run.put("Adafactor.factoring", "stacked", "t5x.examples.scalable_t5")
    run.lines.append("Optimizer.schedule = @FactorSchedule()")
    run.each("create_learning_rate_scheduler", {name: f"FactorSchedule.{name}" for name in _SCHEDULE})


def _shown(scope: str, owner: str, name: str) -> str:
    return f"{scope}/{owner}.{name}".lstrip("/")
