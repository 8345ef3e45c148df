"""Set-up of a run: mesh, model, compiled step, data and checkpoints, with the slow parts side by side."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.data.loader import Loader, make_loader
from capibara.models import api
from capibara.training import state as states
from capibara.training.callbacks import RunInfo
from capibara.training.checkpoints import Checkpoints
from capibara.training.evaluate import EvalStep, evaluate, make_eval_step
from capibara.training.metrics import EarlyStopping
from capibara.training.state import TrainState
from capibara.training.step import make_train_step
from capibara.training.trainer import Trainer
from capibara.types import BATCH_KEYS, Batch, Params, UserError


@dataclasses.dataclass
class Run:
    """What the loop works with. Made by `set_up`."""

    trainer: Trainer
    mesh: Mesh
    model: api.Model
    batch_sharding: NamedSharding
    abstract_state: TrainState
    init: Callable[[jax.Array], TrainState]
    train_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    eval_step: EvalStep
    batches: Loader
    checkpoints: Checkpoints

    def start(self) -> tuple[TrainState, int, EarlyStopping]:
        """Restores the newest checkpoint, data iterator included, or makes a new state.

        Returns:
          state, its step, and the early-stopping state.
        """
        patience = self.trainer.evaluation.patience
        step = self.checkpoints.latest_step()
        if step is None:
            return self.init(jax.random.key(self.trainer.seed)), 0, EarlyStopping(patience)
        restored = self.checkpoints.restore(step, self.abstract_state)
        self.batches.set_state(restored.data)
        return restored.state, step, EarlyStopping(patience, restored.progress["early_stopping"])

    def save(self, step: int, state: TrainState, early: EarlyStopping) -> None:
        """Hands a checkpoint to the asynchronous writer."""
        self.checkpoints.save(step, state, self.batches.get_state(), {"early_stopping": early.state()})

    def next_batch(self) -> dict[str, jax.Array]:
        """The next batch of the run, on its devices."""
        return sharding.global_batch(self.batch_sharding, next(self.batches))

    def evaluate(self, params: Params) -> dict[str, float]:
        """Metrics over the validation split."""
        evaluation = self.trainer.evaluation
        rows = evaluation.batch_size or self.trainer.plan.batch_size // self.trainer.plan.accumulation
        with make_loader(
            self.trainer.dataset,
            split="validation",
            batch_size=rows,
            shard_index=jax.process_index(),
            shard_count=jax.process_count(),
            epochs=1,
        ) as loader:
            batches = loader if evaluation.max_batches is None else _first(loader, evaluation.max_batches)
            return evaluate(self.eval_step, params, batches, self.batch_sharding)

    def info(self, start_step: int, peak_flops: float | None, config: str) -> RunInfo:
        """What callbacks are told."""
        tokens = self.trainer.plan.batch_size * self.trainer.dataset.length
        return RunInfo(
            model_dir=self.trainer.model_dir,
            start_step=start_step,
            total_steps=self.trainer.steps,
            param_count=self.model.param_count,
            tokens_per_step=tokens,
            flops_per_step=self.model.flops_per_token(self.trainer.dataset.length) * tokens,
            device_count=self.mesh.size,
            device_kind=self.mesh.devices.flat[0].device_kind,
            peak_flops=peak_flops,
            config=config,
        )


def set_up(trainer: Trainer, devices: list[jax.Device] | None = None) -> Run:
    """Builds everything. The data feed and the checkpoint library start in threads while the step compiles."""
    mesh = sharding.make_mesh(trainer.plan, devices)
    model = api.build(trainer.model)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        data = pool.submit(_open_data, trainer)
        checkpoints = pool.submit(Checkpoints, trainer.model_dir, trainer.checkpointing)
        parts = compile_step(trainer, model, mesh)
        vocabulary, batches = data.result()
    eval_step = make_eval_step(model, trainer.plan, mesh, vocabulary.token_bytes())
    return Run(
        trainer=trainer,
        mesh=mesh,
        model=model,
        eval_step=jax.jit(eval_step),
        batches=batches,
        checkpoints=checkpoints.result(),
        **parts,
    )


def compile_step(trainer: Trainer, model: api.Model, mesh: Mesh) -> dict[str, Any]:
    """Compiles the train step ahead of time from shapes alone; nothing is allocated.

    Returns:
      Run's fields batch_sharding, abstract_state, init and train_step.
    """
    plan, ema = trainer.plan, trainer.ema_decay is not None
    tx = trainer.optimizer.build(trainer.steps, model.axes)
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=ema)
    abstract_state = states.abstract_state(model, tx, shardings, ema=ema)
    batch_sharding = sharding.batch_sharding(mesh, plan.rules)
    step = make_train_step(
        model,
        tx,
        trainer.optimizer.schedule.build(trainer.steps),
        plan,
        mesh,
        z_loss=trainer.z_loss,
        ema_decay=trainer.ema_decay,
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    abstract = abstract_batch(plan.batch_size, trainer.dataset.length, batch_sharding)
    init = functools.partial(states.init_state, model, tx, ema=ema)
    return {
        "batch_sharding": batch_sharding,
        "abstract_state": abstract_state,
        "init": jax.jit(init, out_shardings=shardings),
        "train_step": jitted.lower(abstract_state, abstract).compile(),
    }


def abstract_batch(rows: int, length: int, batch_sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a global batch."""
    dtypes = {name: jnp.float32 if name == "weights" else jnp.int32 for name in BATCH_KEYS}
    return {name: jax.ShapeDtypeStruct((rows, length), d, sharding=batch_sharding) for name, d in dtypes.items()}


def _open_data(trainer: Trainer) -> tuple[Any, Loader]:
    vocabulary = trainer.dataset.get_vocabulary()
    if vocabulary.size > trainer.model.vocab_size:
        raise UserError(
            f"DecoderConfig.vocab_size ({trainer.model.vocab_size}) must be at least the vocabulary's size "
            f"({vocabulary.size}): try {int(np.ceil(vocabulary.size / 128)) * 128}"
        )
    loader = make_loader(
        trainer.dataset,
        split="train",
        batch_size=trainer.plan.batch_size,
        shard_index=jax.process_index(),
        shard_count=jax.process_count(),
    )
    return vocabulary, loader


def _first(loader: Loader, count: int):
    for _, batch in zip(range(count), loader):
        yield batch
