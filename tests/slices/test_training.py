"""Every program of a run with sharded parameters, lowered and compiled by the TPU compiler for real slices."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import pytest
from matrix import LENGTH, LOSSES, ROWS, SLICES, Case, compiles_on, running, shown

from capibara import sharding
from capibara.checkpoints import saving
from capibara.consensus.privacy import Privacy
from capibara.evaluation import scoring
from capibara.evaluation.context.losses import make_row_losses
from capibara.evaluation.remix.remixing import RemixExperts, layers
from capibara.inference.engine.placement import own_chips
from capibara.inference.thinking.reward_model import make_answer_scores
from capibara.interop.experts import measuring
from capibara.models.layers.rope import Trial
from capibara.objectives import reference
from capibara.objectives.base import of_cross_entropy
from capibara.objectives.batches import LoaderBatches, make_totals
from capibara.optim import Optimizer
from capibara.planner.compiler import compile as compiler
from capibara.planner.hardware import slices, xla_flags
from capibara.sharding.replicas import ReplicaCheck
from capibara.strategies import rollouts
from capibara.strategies.distillation import teacher
from capibara.strategies.group import member
from capibara.training import evaluation as evaluate
from capibara.training import run_folder, setup


def step(case):
    return setup.lower_step(case.trainer, case.model, case.mesh, case.state)


def start(case):
    return case.state.init(case.model).lower(jax.random.key(0), pretrained=None)


def start_with_given(case):
    return case.state.init(case.model).lower(jax.random.key(0), pretrained=case.params_of(case.model.plain))


def evaluation(case):
    """With the average of the parameters, where one is kept."""
    eval_step = evaluate.make_eval_step(case.model, case.plan, case.mesh, case.trainer.dataset.vocabulary.token_bytes())
    return eval_step.lower(case.state.abstract.eval_params, case.batch())


def preference_totals(case):
    objective = case.trainer.loss.objective(case.model, case.trainer.dataset)
    return make_totals(objective, case.plan, case.mesh).lower(case.state.abstract.params, case.batch())


def own_loss_evaluation(case):
    """As a loss of the user's own evaluates, on the loader's batches."""
    run = types.SimpleNamespace(plan=case.plan, mesh=case.mesh)
    batches = LoaderBatches(run, of_cross_entropy(case.model, 0.0))
    return batches._totals.lower(case.state.abstract.params, case.batch())


def reference_answers(case):
    dataset = case.trainer.dataset
    answers = reference.make_answers(case.model, case.plan, case.mesh, dataset.most_pairs)
    return answers.lower(case.state.abstract.params, case.batch(dataset.batch_spec(case.plan.batch_size)))


def rollout_log_probabilities(case):
    spec = case.trainer.dataset.batch_spec(case.plan.batch_size)
    del spec["numbers"]
    log_p = rollouts.make_log_probabilities(case.model, case.plan, case.mesh)
    return log_p.lower(case.state.abstract.params, case.batch(spec))


def teacher_log_probs(case):
    dataset, rows = case.trainer.dataset, sharding.batch_sharding(case.mesh, case.plan.rules)
    options = dict(vocab_size=case.model.config.vocab_size, temperature=2.0, top_k=16)
    log_probs = teacher.make_teacher(case.model, case.plan, case.mesh, rows, **options)
    return log_probs.lower(case.state.abstract.params, case.batch(dataset.batch_spec(case.plan.batch_size)))


def rollout_parameters(case):
    return own_chips.make_computed(case.model, case.mesh, case.plan.rules).lower(case.state.abstract.params)


def scores(case):
    return scoring.make_scores(case.model, case.plan, case.mesh).lower(case.state.abstract.params, case.batch())


def answer_scores(case):
    return make_answer_scores(case.model, case.plan, case.mesh).lower(case.state.abstract.params, case.batch())


def descent_of_remix(case):
    config, everywhere = case.model.config, jax.sharding.NamedSharding(case.mesh, jax.sharding.PartitionSpec())
    remix = RemixExperts(references=("x.jsonl",), neighbours=2, method="neighborhood_gradient", steps=2)
    spec, rows = dict(case.trainer.batch_spec), case.plan.batch_size
    sizes = (config.num_layers, config.moe.num_experts)
    spec |= {"pathway_at": ((rows, LENGTH), "int32"), "pathway_scores": ((rows, *sizes), "float32")}
    spec |= {"pathway_weights": ((rows, config.num_layers), "float32")}
    of_prompts = ((rows // 2, 2), (rows // 2, len(layers(config)), sizes[1]))
    arrays = [jax.ShapeDtypeStruct(shape, "float32", sharding=everywhere) for shape in of_prompts]
    descent = scoring.make_model_descent(case.model, case.plan, case.mesh, remix)
    return descent.lower(case.state.abstract.params, case.batch(spec), *arrays)


def row_losses(case):
    everywhere = jax.sharding.NamedSharding(case.mesh, jax.sharding.PartitionSpec())
    config = case.model.config
    factors = (config.rope.rotated_dims(config.attention_of("global").rotary_size) // 2,)
    of_trial = ((factors, "float32"), ((), "float32"), ((), "int32"))
    trial = Trial(*(jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in of_trial))
    losses = make_row_losses(case.model, case.plan, case.mesh)
    return losses.lower(case.state.abstract.params, case.batch(), trial)


def use_of_experts(case):
    return measuring.make_sums(case.model, case.plan, case.mesh, 2).lower(case.state.abstract.params, case.batch())


def replica_check(case):
    params = case.state.abstract.params
    return ReplicaCheck(params, case.mesh).sums.lower(*jax.tree.leaves(params))


def all_finite(case):
    return saving.all_finite.lower(case.state.abstract)


def fingerprint(case):
    return reference.weighed.lower(jax.tree.leaves(case.state.abstract.params))


def merge(case):
    return run_folder.merger(case.model, case.params_of(case.model.plain)).lower(case.state.abstract.params)


def group_sums(case):
    everywhere = jax.sharding.NamedSharding(case.mesh, jax.sharding.PartitionSpec())
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=everywhere)
    return member.sums.lower(dict.fromkeys(("loss", "grad_norm", "tokens", "skipped"), scalar))


def group_whole(case):
    largest = max(jax.tree.leaves(case.state.abstract.params), key=lambda x: x.size)
    return member.replicating(case.mesh).lower(largest)


def array_for_other_chips(case):
    """For each tensor-parallel half of the chips that draw."""
    largest = max(jax.tree.leaves(case.state.abstract.params), key=lambda x: x.size)
    mesh = jax.sharding.Mesh(case.mesh.devices.reshape(-1, 2), ("copies", "tensor"))
    spec = jax.sharding.PartitionSpec(*[None] * (len(largest.shape) - 1), "tensor")
    return own_chips.resharding(jax.sharding.NamedSharding(mesh, spec)).lower(largest)


GENERAL = ("decoder", "windows", "experts", "encoder-decoder", "encoder")
ADAPTED = ("decoder LoRA", "decoder QLoRA", "experts LoRA")
READS = ("decoder", "experts", "encoder-decoder")


class Program(NamedTuple):
    """A program of a run.

    Attributes:
      site: where the product jits it, "file qualified.name".
      lower: gives the lowered program of a Case.
      models: of which it is compiled.
      options: of the Trainer.
    """

    site: str
    lower: Callable[[Case], jax.stages.Lowered]
    models: tuple[str, ...]
    options: dict = {}


STEP, START, MERGE = (
    "training/setup.py lower_step",
    "training/setup.py StateSpec.init",
    "training/run_folder/reading.py merger",
)
OWN_LOSS = "objectives/batches.py make_totals"
ANSWERS, LOG_P = "objectives/reference.py make_answers", "strategies/rollouts.py make_log_probabilities"
COMPUTED = "inference/engine/placement/own_chips.py _computed"
RESHARDED = "inference/engine/placement/own_chips.py resharding"
DPO, GRPO = {"loss": LOSSES["Dpo"]}, {"loss": LOSSES["Grpo"]}
TEACHER, DISTILLATION = "strategies/distillation/teacher.py make_teacher", {"loss": LOSSES["Distillation"]}
MUON = {"optimizer": Optimizer(name="muon", state_dtype="int8")}
PRIVATE = {"privacy": Privacy(clip_norm=1.0, noise_multiplier=1.0)}
PROGRAMS = {
    "train step": Program(
        STEP, step, (*GENERAL, "gpt-oss", "latents", "recurrent", "entries", "gemma3n", *ADAPTED, "gemma3n QLoRA")
    ),
    "train step, Muon": Program(STEP, step, ("decoder", "experts"), MUON),
    "train step, DPO": Program(STEP, step, ("decoder", "experts", "decoder QLoRA"), DPO),
    "train step, privacy": Program(STEP, step, ("decoder", "experts", "decoder QLoRA"), PRIVATE),
    "train step, GRPO": Program(STEP, step, ("decoder", "experts", "decoder QLoRA"), GRPO),
    "train step, distillation": Program(STEP, step, ("decoder", "experts", "decoder QLoRA"), DISTILLATION),
    "train step, DuoAttention": Program(STEP, step, ("gates",), {"loss": LOSSES["DuoAttention"]}),
    "new state": Program(START, start, (*READS, "decoder QLoRA")),
    "state of given weights": Program(START, start_with_given, ("experts", "experts LoRA", "decoder QLoRA")),
    "evaluation": Program("training/evaluation.py make_eval_step", evaluation, (*GENERAL, "gemma3n", "decoder QLoRA")),
    "evaluation, DPO": Program("objectives/batches.py make_totals", preference_totals, ("decoder", "experts"), DPO),
    "evaluation, own loss": Program(OWN_LOSS, own_loss_evaluation, ("decoder", "experts")),
    "reference, DPO": Program(ANSWERS, reference_answers, ("decoder", "experts", "decoder QLoRA"), DPO),
    "log-probabilities, GRPO": Program(LOG_P, rollout_log_probabilities, ("decoder", "experts"), GRPO),
    "teacher, distillation": Program(TEACHER, teacher_log_probs, ("decoder", "experts"), DISTILLATION),
    "parameters for rollouts": Program(COMPUTED, rollout_parameters, ("decoder", "experts", "decoder QLoRA")),
    "parameter for other chips": Program(RESHARDED, array_for_other_chips, ("decoder", "experts")),
    "scores": Program("evaluation/scoring.py _scores", scores, READS),
    "scores of answers": Program(
        "inference/thinking/reward_model.py make_answer_scores", answer_scores, ("decoder", "experts")
    ),
    "descent of a remix": Program("evaluation/remix/descent.py make_descent", descent_of_remix, ("experts",)),
    "losses with a scaling": Program(
        "evaluation/context/losses.py make_row_losses", row_losses, ("decoder", "experts")
    ),
    "use of experts": Program("interop/experts/measuring.py make_sums", use_of_experts, ("experts", "gpt-oss")),
    "replica check": Program("sharding/replicas.py _checksums", replica_check, ("experts", "decoder QLoRA")),
    "all finite": Program("checkpoints/saving.py all_finite", all_finite, ("experts", "decoder QLoRA")),
    "fingerprint of weights": Program("objectives/reference.py weighed", fingerprint, ("experts", "decoder QLoRA")),
    "loss of a group's node": Program("strategies/group/member.py sums", group_sums, ("decoder",)),
    "parameter of a group's node": Program(
        "strategies/group/member.py replicating", group_whole, ("decoder", "experts")
    ),
    "merge of adapters": Program(MERGE, merge, ADAPTED),
}
# What partitions by hand -> a program, and a model of it, that it is part of.
WITHIN = {
    "training/privacy/gradient.py make_private_gradient": ("train step, privacy", "decoder"),
    "models/layers/embedding.py lookup": ("train step", "experts"),
    "models/parts/moe.py MoeMLP.weighted_sum": ("train step", "experts"),
    "kernels/attention/splash.py _on_mesh": ("train step", "experts"),
    "kernels/cross_entropy/layout.py on_shards": ("train step", "experts"),
    "sharding/replicas.py _checksums": ("replica check", "decoder QLoRA"),
}
ON_ALL_MESHES = ("train step", "evaluation")
SHORT = {  # in `make test`: on the first mesh of the slice
    ("train step", "experts", "v5e-8"),
    ("train step, privacy", "decoder", "v5e-4"),
    ("new state", "decoder", "v5e-4"),
    ("evaluation", "decoder", "v6e-8"),
    ("evaluation, DPO", "decoder", "v5e-4"),
    ("evaluation, own loss", "decoder", "v5e-4"),
    ("reference, DPO", "decoder", "v5e-16"),
    ("log-probabilities, GRPO", "decoder", "v5e-4"),
    ("train step, distillation", "decoder", "v5e-4"),
    ("teacher, distillation", "decoder", "v5e-4"),
    ("train step, DuoAttention", "gates", "v5e-4"),
    ("parameters for rollouts", "decoder QLoRA", "v5e-4"),
    ("parameter for other chips", "decoder", "v5e-4"),
    ("scores", "encoder-decoder", "v5e-4"),
    ("scores of answers", "decoder", "v5e-4"),
    ("losses with a scaling", "decoder", "v5e-4"),
    ("descent of a remix", "experts", "v5e-4"),
    ("use of experts", "experts", "v5e-4"),
    ("replica check", "decoder QLoRA", "v5e-4"),
    ("all finite", "decoder QLoRA", "v5e-4"),
    ("fingerprint of weights", "decoder QLoRA", "v5e-4"),
    ("merge of adapters", "experts LoRA", "v6e-4"),
    ("loss of a group's node", "decoder", "v5e-4"),
    ("parameter of a group's node", "decoder", "v5e-4"),
}


def matrix():
    for name, program in PROGRAMS.items():
        for model, (slice_name, meshes) in itertools.product(program.models, SLICES.items()):
            for number, sizes in enumerate(meshes if name in ON_ALL_MESHES else meshes[:1]):
                if not compiles_on(model, sizes) or ("privacy" in program.options and "stage" in sizes):
                    continue
                is_short = number == 0 and (name, model, slice_name) in SHORT
                yield pytest.param(
                    *(name, model, slice_name, sizes),
                    marks=() if is_short else pytest.mark.heavy,
                    id=f"{name}-{model}-{slice_name}-{shown(sizes)}",
                )


@pytest.mark.parametrize("name, model, slice_name, sizes", list(matrix()))
def test_a_program_of_a_run_compiles_for_the_slice(name, model, slice_name, sizes, tell):
    program = PROGRAMS[name]
    case = Case(model, slice_name, sizes, program.options)
    chip = slices.parse(slice_name).chip.name
    flags = xla_flags.of_plan(chip, case.plan) if program.site == STEP else None  # as `train` does
    with running(program.site, *(site for site, of in WITHIN.items() if of == (name, model))):
        lowered = program.lower(case)
    report = compiler.compile_train_step(lowered, flags)
    assert report.fits
    tell(name, model, slice_name, sizes, report)


def offloaded():
    """Every kind of stack, and meshes with and without stages; one of either chip in the short suite."""
    for slice_name, sizes in (("v5e-4", dict(fsdp=4)), ("v6e-8", dict(fsdp=2, stage=2, tensor=2))):
        for model in (*GENERAL, "latents", "recurrent", "entries", "gemma3n", "decoder QLoRA"):
            if compiles_on(model, sizes):
                marks = () if model == "decoder" else pytest.mark.heavy
                yield pytest.param(model, slice_name, sizes, id=f"{model}-{slice_name}", marks=marks)


@pytest.mark.parametrize("model, slice_name, sizes", list(offloaded()))
def test_the_inputs_of_all_layers_are_in_the_hosts_memory(model, slice_name, sizes, tell):
    case = Case(model, slice_name, sizes)
    plan = dataclasses.replace(case.plan, remat="offload", remat_names=("layer_input",))
    trainer = dataclasses.replace(case.trainer, plan=plan)
    lowered = setup.lower_step(trainer, case.model, case.mesh)
    report = compiler.compile_train_step(lowered, xla_flags.of_plan(slices.parse(slice_name).chip.name, plan))
    config = case.trainer.model
    tokens = ROWS * LENGTH / case.mesh.size  # on one device, by any of these axes
    of_inputs = config.num_layers * tokens * config.embed_dim * 2
    assert report.fits and report.host_temporary_bytes >= of_inputs
    assert report.costs.host_bytes >= 2 * of_inputs  # to the host, and back
    tell("train step, offload", model, slice_name, sizes, report)
