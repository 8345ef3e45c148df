"""Verified checkpoints beside np.save with fsync and Orbax as it comes; and 500 random bit flips.

    python benchmarks/checkpoint.py [--mib=1024] [--rounds=5] [--folder=DIR] [--json=OUT]
    python benchmarks/checkpoint.py --flips=500
    python benchmarks/checkpoint.py --training [--rounds=15]

The state is float32, in eight arrays. All contenders write it in turn, to the same disk, and read it back from the page
cache; ratios are of medians. save: until it is on the disk, no older step is removed; Orbax does not sync all of it.
blocking: what a save takes of the training loop's time. load: until all arrays are on the device, ours verified.
--flips: one bit of a file of a checkpoint at a time, as often as is said, the step plain, compressed and encrypted in turn.
  `convert verify` must find each out, and restoring must refuse the step or (unread) give back every bit; what only
  changed the manifest's white space is harmless. Exit code 1 where one is silent.
--training: blocks of 20 steps of a run, with a save at the beginning and without, in turn. The ratio is the median of each
  block with a save over the mean of the two around it, so that a machine that gets slower counts for neither.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))  # the checkout's package, installed or not
os.environ["JAX_PLATFORMS"] = "cpu"
ARRAYS = 8
STEPS = 20
GOALS = {"save": 1.6, "load": 1.5, "blocking": 0.05, "training": 1.03}


class NumPy:
    """One file an array, synced."""

    def __init__(self, folder: pathlib.Path, arrays):
        import numpy as np

        self._np, self._folder, self._arrays = np, folder, {name: np.asarray(x) for name, x in arrays.items()}

    def save(self, step: int) -> float:
        (self._folder / str(step)).mkdir(parents=True)
        for name, array in self._arrays.items():
            with open(self._folder / str(step) / f"{name}.npy", "wb") as file:
                self._np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        return 1.0

    def remove(self, step: int) -> None:
        shutil.rmtree(self._folder / str(step))

    def load(self, step: int) -> object:
        return [self._np.load(self._folder / str(step) / f"{name}.npy") for name in self._arrays]


class Ours:
    """A run's checkpoints, as train has them."""

    def __init__(self, folder: pathlib.Path, arrays):
        import jax
        import jax.numpy as jnp

        from capibara.checkpoints.manager import Checkpointing, CheckpointReader, Checkpoints
        from capibara.training.base.state import TrainState, with_shardings

        config = Checkpointing(keep=1000)
        self._reader = lambda: CheckpointReader(str(folder), config)
        self._folder, self._checkpoints = folder, Checkpoints(str(folder), config)
        self._state = TrainState(step=jnp.int32(0), params=arrays, opt_state=(), ema=None)
        self._target = with_shardings(self._state, jax.tree.map(lambda x: x.sharding, self._state))

    def save(self, step: int) -> float:
        """Returns the share of the time for which the caller was held up."""
        begin_s = time.perf_counter()
        self._checkpoints.save(step + 1, self._state, {}, {})
        blocked_s = time.perf_counter() - begin_s
        self._checkpoints.wait()
        return blocked_s / (time.perf_counter() - begin_s)

    def remove(self, step: int) -> None:
        shutil.rmtree(self._folder / "checkpoints" / str(step + 1))

    def close(self) -> None:
        self._checkpoints.close()

    def load(self, step: int) -> object:
        import jax

        return jax.block_until_ready(self._reader().restore(self._target)[1])


class Orbax:
    """A CheckpointManager as it comes."""

    def __init__(self, folder: pathlib.Path, arrays):
        import jax
        import orbax.checkpoint as ocp

        self._ocp, self._arrays = ocp, arrays
        self._target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
        self._manager = ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions())

    def save(self, step: int) -> float:
        begin_s = time.perf_counter()
        self._manager.save(step, args=self._ocp.args.StandardSave(self._arrays))
        blocked_s = time.perf_counter() - begin_s
        self._manager.wait_until_finished()
        return blocked_s / (time.perf_counter() - begin_s)

    def remove(self, step: int) -> None:
        self._manager.delete(step)

    def close(self) -> None:
        self._manager.close()

    def load(self, step: int) -> object:
        import jax

        return jax.block_until_ready(self._manager.restore(step, args=self._ocp.args.StandardRestore(self._target)))


def speed(mib: int, rounds: int, folder: str) -> dict:
    """Medians of seconds by contender."""
    import jax

    from capibara.core import allocator

    allocator.keep_freed_memory()  # as train does on CPUs; for all contenders

    rows = mib * 2**20 // 4 // 1024 // ARRAYS
    arrays = {f"layer_{i}": jax.random.normal(jax.random.key(i), (rows, 1024)) for i in range(ARRAYS)}
    jax.block_until_ready(arrays)
    root = pathlib.Path(tempfile.mkdtemp(prefix="capibara-checkpoint-", dir=folder))
    try:
        contenders = {
            name: make(root / name, arrays) for name, make in (("numpy", NumPy), ("capibara", Ours), ("orbax", Orbax))
        }
        found = {name: {"save": [], "load": [], "blocking": []} for name in contenders}
        for step in range(rounds + 1):  # the first is not counted: imports, page faults
            for name in [*contenders][step % 3 :] + [*contenders][: step % 3]:
                os.sync()
                begin_s = time.perf_counter()
                blocking = contenders[name].save(step)
                saved_s = time.perf_counter()
                loaded = contenders[name].load(step)
                figures = (saved_s - begin_s, time.perf_counter() - saved_s, blocking)
                del loaded  # all of it is held until then, by every contender
                if step:
                    for what, figure in zip(("save", "load", "blocking"), figures):
                        found[name][what].append(figure)
                contenders[name].remove(step)
            print(f"round {step} of {rounds}", file=sys.stderr)
    finally:
        for name in ("capibara", "orbax"):
            contenders[name].close()
        shutil.rmtree(root, ignore_errors=True)
    return {name: {what: statistics.median(s) for what, s in figures.items()} for name, figures in found.items()}


def show_speed(mib: int, found: dict) -> None:
    """Prints the table."""
    print(f"{mib} MiB of float32 in {ARRAYS} arrays; medians; x: of np.save with fsync, np.load")
    print(f"{'':10}{'save s':>9}{'x':>7}{'load s':>9}{'x':>7}{'blocking':>10}")
    for name, figures in found.items():
        save, load = (figures[what] / found["numpy"][what] for what in ("save", "load"))
        blocking = "" if name == "numpy" else f"{figures['blocking']:.1%}"
        print(f"{name:10}{figures['save']:9.2f}{save:7.2f}{figures['load']:9.2f}{load:7.2f}{blocking:>10}")
    print(f"goals: save {GOALS['save']}x, load {GOALS['load']}x, blocking {GOALS['blocking']:.0%}")


class Flipped:
    """A small checkpoint whose bits are flipped, one at a time.

    Args:
      root: an empty folder.
      options: of Checkpointing.
    """

    def __init__(self, root: pathlib.Path, **options):
        import jax
        import jax.numpy as jnp

        from capibara.checkpoints.manager import Checkpointing, CheckpointReader, Checkpoints
        from capibara.training.base.state import TrainState, with_shardings

        self._reader = lambda: CheckpointReader(str(root), Checkpointing(**options))
        arrays = {f"layer_{i}": jax.random.normal(jax.random.key(i), (64, 64)) for i in range(ARRAYS)}
        moments = jax.tree.map(lambda x: (x * 0.1).astype(jnp.bfloat16), arrays)
        self._state = TrainState(jnp.int32(1), arrays, (moments,), None)
        self._target = with_shardings(self._state, jax.tree.map(lambda x: x.sharding, self._state))
        self._about = 1, {"rows": [[1, 2]]}, {"early_stopping": {"best": 0.5}}
        with Checkpoints(str(root), Checkpointing(**options)) as checkpoints:
            checkpoints.save(self._about[0], self._state, *self._about[1:])
        self._step = root / "checkpoints" / "1"
        self._files = sorted(path for path in self._step.rglob("*") if path.is_file())
        if self.restored() is not True:
            raise AssertionError("a step that nothing was done to does not come back")

    def flip(self, index: int, rng: random.Random) -> str:
        """Flips a bit of the file of that index, looks, and flips it back; what became of it."""
        from etils import epath

        from capibara.checkpoints import manifest

        path = self._files[index % len(self._files)]
        before = path.read_bytes()
        after = bytearray(before)
        after[rng.randrange(len(after))] ^= 1 << rng.randrange(8)
        path.write_bytes(after)
        try:
            restored = self.restored()
            try:
                manifest.verify(epath.Path(self._step))
                found = False
            except manifest.Corrupted:
                found = True
            if restored is not False and found:
                return "refused" if restored is None else "unread"
            if restored and path.name == manifest.NAME and json.loads(after) == json.loads(before):
                return "harmless"
            print(f"silent: {path.relative_to(self._step)}, restored {restored}, found {found}", file=sys.stderr)
            return "silent"
        finally:
            path.write_bytes(before)

    def restored(self) -> bool | None:
        """Whether restoring gives back what was saved, to the bit; None: it refuses to."""
        import jax
        import numpy as np

        from capibara.core.types import UserError

        try:
            found, state = self._reader().restore(self._target)
        except UserError:
            return None
        if (found.step, found.data, found.progress) != self._about:
            return False
        leaves, saved = jax.tree.leaves(state), jax.tree.leaves(self._state)
        return len(leaves) == len(saved) and all(
            x.dtype == y.dtype and x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()
            for x, y in zip(leaves, saved)
        )


def flips(count: int, folder: str) -> dict:
    """What became of `count` flipped bits, by kind of checkpoint."""
    import logging

    from capibara.checkpoints.encryption import Encryption

    logging.disable(logging.WARNING)
    os.environ["CAPIBARA_CHECKPOINT_KEY"] = "01" * 32
    kinds = {"plain": {}, "compressed": {"compression": "zstd"}, "encrypted": {"encryption": Encryption()}}
    root, rng = pathlib.Path(tempfile.mkdtemp(prefix="capibara-flips-", dir=folder)), random.Random(0)
    try:
        steps = {name: Flipped(root / name, **options) for name, options in kinds.items()}
        found = {name: dict.fromkeys(("refused", "unread", "harmless", "silent"), 0) for name in kinds}
        for index in range(count):
            name = [*kinds][index % len(kinds)]
            found[name][steps[name].flip(index // len(kinds), rng)] += 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return found


def training(rounds: int, folder: str) -> dict:
    """Seconds of blocks of 20 steps of the quickstart's run on one device, every other one with a save, in one process."""
    import logging

    import jax

    from capibara import config
    from capibara.core import allocator
    from capibara.training import assembly
    from capibara.training.feed import BatchFeed
    from capibara.training.setup import set_up
    from capibara.training.trainer import Trainer

    allocator.keep_freed_memory()  # as train does on CPUs
    logging.disable(logging.WARNING)
    model_dir = tempfile.mkdtemp(prefix="capibara-training-", dir=folder)
    bindings = [f"MODEL_DIR={model_dir}", "Plan.fsdp=1", "Plan.tensor=1", "Evaluation.every=0", "Checkpointing.keep=1"]
    config.parse(["quickstart.gin"], bindings)
    seconds: list[float] = []  # of the blocks; those with odd numbers have a save
    try:
        run, initial = set_up(config.build(Trainer), jax.devices()[:1])
        with run:
            start, metrics = assembly.begin(run, initial), {}
            state, step, feed = (
                start.state,
                start.step,
                BatchFeed(run.batches, run.batch_sharding, None, run.trainer.batch_spec),
            )
            for block in range(2 * rounds + 1):
                name = "saves" if block % 2 else "never"
                begin_s = time.perf_counter()
                if name == "saves":
                    run.recovery.save(step, state, feed, metrics)
                for _ in range(STEPS):
                    step += 1
                    batch = feed.next_batch(step, state.params)
                    state, metrics = run.step(step, state, batch, feed.position)
                jax.block_until_ready(state)
                run.checkpoints.wait()  # what of a save is not done by then is paid for, too
                seconds.append(time.perf_counter() - begin_s)
                print(f"{block} of {2 * rounds}: {seconds[-1]:.2f} s, {name}", file=sys.stderr)
    finally:
        shutil.rmtree(model_dir, ignore_errors=True)
    # The first block warms up: the first save has one neighbour that counts.
    ratios = [2 * seconds[i] / (seconds[i - 1] + seconds[i + 1]) for i in range(3, 2 * rounds, 2)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    error = 0.93 * (high - low) / len(ratios) ** 0.5  # of a median, from the quartiles of what it is of
    medians = {"saves": statistics.median(seconds[1::2]), "never": statistics.median(seconds[2::2])}
    return medians | {"ratio": ratio, "standard_error": error, "blocks": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that is measured")
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.flips:
        found = flips(options.flips, options.folder)
        for kind, figures in found.items():
            print(
                f"{kind:10}  {sum(figures.values())} flips: " + ", ".join(f"{n} {name}" for name, n in figures.items())
            )
    elif options.training:
        found = training(options.rounds, options.folder)
        print(f"{STEPS} steps: {found['saves']:.2f} s with a save, {found['never']:.2f} s without: {found['ratio']:.3f}x, "
              f"standard error {found['standard_error']:.3f} (goal {GOALS['training']}x)")  # fmt: skip
    else:
        found = speed(options.mib, options.rounds, options.folder)
        show_speed(options.mib, found)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1))
    return int(bool(options.flips) and any(figures["silent"] for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
