"""Builds what the loop uses from a run that is set up: its first state, its evaluator, batches that the data alone do not make."""

from __future__ import annotations

import dataclasses
import functools

import jax

from capibara.core import tree
from capibara.core.fields import returned
from capibara.core.types import Params
from capibara.data.dataset import Dataset
from capibara.data.pipeline.loader import Loader
from capibara.objectives.batches import BatchProvider, Reporter, RunParts
from capibara.training import evaluation
from capibara.training.base.callbacks import Callback, RunInfo
from capibara.training.base.state import TrainState
from capibara.training.evaluation import Evaluator, Judge, Sampler
from capibara.training.feed import open_loader
from capibara.training.initialization import initial_params, load_model
from capibara.training.recovery import Initial, Start
from capibara.training.setup import Setup


def begin(run: Setup, initial: Initial) -> Start:
    """Makes the initial state of a run, on the mesh."""
    init, method = run.spec.init(run.model), run.trainer.training_method

    def new(key: jax.Array, pretrained: Params | None) -> TrainState:
        state = init(key, pretrained=pretrained)
        return method.with_own_weights(run.trainer.plan, state, initial.starts, run.spec.shardings)

    return run.recovery.begin(initial, new)


def batch_provider(run: Setup, reporter: Reporter) -> BatchProvider | None:
    """The batch provider of a run; None: batches come from the data alone."""
    loss = run.trainer.loss
    if loss is None:
        return None
    return returned(loss.batch_provider(_parts(run, reporter)), BatchProvider, f"{type(loss).__name__}.batch_provider")


def _parts(run: Setup, reporter: Reporter) -> RunParts:
    trainer, mesh = run.trainer, run.mesh

    def open_once(dataset: Dataset, split: str, rows: int) -> Loader:
        return open_loader(dataclasses.replace(trainer, dataset=dataset), mesh, split, rows, epochs=1)

    return RunParts(
        model_dir=trainer.model_dir,
        seed=trainer.seed,
        init_from=trainer.init_from,
        model=run.model,
        dataset=trainer.dataset,
        plan=trainer.plan,
        mesh=mesh,
        batch_sharding=run.batch_sharding,
        batches=run.batches,
        step_temp_bytes=run.step_temp_bytes,
        evaluates=bool(trainer.evaluation.every),
        open_once=open_once,
        validation=functools.partial(evaluation.validation, trainer, mesh, reporter),
        initial_params=functools.partial(initial_params, trainer, run.model, mesh, run.load, run.spec.init(run.model)),
        load_model=functools.partial(load_model, trainer, mesh, run.load),
        reporter=reporter,
    )


def evaluator(
    run: Setup,
    reporter: Reporter,
    provider: BatchProvider | None = None,
    callbacks: Callback = Callback(),
    sampler: Sampler | None = None,
    judge: Judge | None = None,
) -> Evaluator:
    """The evaluator of a run."""
    return Evaluator(
        run.trainer,
        run.mesh,
        run.eval_step,
        run.batch_sharding,
        reporter,
        callbacks,
        provider,
        sampler,
        judge,
        run.model.layer_metrics,
    )


def info(run: Setup, start_step: int, peak_flops: float | None, config: str) -> RunInfo:
    """The facts about a run for callbacks."""
    dataset, arrays = run.trainer.dataset, run.spec.abstract
    tokens = run.trainer.plan.batch_size * dataset.length
    return RunInfo(
        model_dir=run.trainer.model_dir,
        start_step=start_step,
        total_steps=run.trainer.steps,
        param_count=run.model.param_count,
        tokens_per_step=tokens,
        flops_per_step=run.model.flops_per_token(dataset.length, dataset.encoder_length) * tokens,
        device_count=run.mesh.size,
        device_kind=run.mesh.devices.flat[0].device_kind,
        peak_flops=peak_flops,
        config=config,
        arrays={
            name: (leaf.shape, str(leaf.dtype)) for name, leaf in zip(tree.path_names(arrays), jax.tree.leaves(arrays))
        },
        data=run.data,
    )
