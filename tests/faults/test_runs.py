"""Runs that are stopped, resumed, and handed other data: as a user starts them, and in this process."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import time

import jax
import numpy as np
import pytest

from capibara.checkpoints import manifest
from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.sharding import Plan

TRAIN = ("train", "--gin_file=tiny.gin", "--emulate=8")


def assert_equal_states(one, other):
    jax.tree.map(np.testing.assert_array_equal, dataclasses.asdict(one), dataclasses.asdict(other))


def steps_of(run):
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_for_step(run, step):
    for _ in range(1200):
        try:
            if any(record["kind"] == "train" and record["step"] >= step for record in records(run)):
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise TimeoutError(f"no step {step} in {run}")


@pytest.mark.heavy
@pytest.mark.fault(4)
def test_sigterm_saves_the_step_at_hand(shell):
    run = shell.folder / "run"
    child = shell.start(*TRAIN, "--gin.TRAIN_STEPS=100000")
    wait_for_step(run, 5)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, err) == (143, ""), err
    [step] = steps_of(run)
    assert step >= 5 and max(r["step"] for r in records(run) if r["kind"] == "train") == step
    done = shell.run(*TRAIN, f"--gin.TRAIN_STEPS={step + 2}")
    assert done.code == 0 and f"resuming from step {step};" in done.out
    assert steps_of(run) == [step, step + 2]


@pytest.mark.fault(5)
@pytest.mark.heavy
def test_a_second_sigterm_does_no_harm(shell):
    run = shell.folder / "twice"
    child = shell.start(*TRAIN, "--gin.MODEL_DIR=twice", "--gin.TRAIN_STEPS=100000")
    wait_for_step(run, 3)
    for _ in range(20):
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    _, err = child.communicate(timeout=120)
    assert (child.returncode, err) == (143, "")
    [step] = steps_of(run)
    assert json.loads((run / "checkpoints" / str(step) / "manifest.json").read_text())["step"] == step


@pytest.mark.fault(22)
def test_a_run_resumes_from_the_step_before_a_corrupted_one_and_says_so(make_trainer, train, caplog):
    trainer = make_trainer(checkpointing=Checkpointing(every=4), steps=8)
    whole = train(trainer)
    newest = pathlib.Path(trainer.model_dir) / "checkpoints" / "8"
    path = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(path, path.stat().st_size - 1)
    again = train(trainer)
    assert again.start_step == 4 and "checkpoints/8 is corrupted: " in caplog.text
    assert again.metrics[5]["checkpoints_corrupted"] == 1.0 and "checkpoints_corrupted" not in whole.metrics[5]
    assert again.batches == whole.batches[4:]
    assert_equal_states(again.state, whole.state)


@pytest.mark.heavy
@pytest.mark.fault(26, 29)
def test_stops_leave_no_trace(make_trainer, train, tmp_path):
    """60 steps in one run; in two; in four: batches, losses, state."""
    trainer = make_trainer(steps=60, ema_decay=0.9)
    whole = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "whole")))
    for name, stops in (("once", (7,)), ("often", (9, 10, 41))):
        parts = [
            train(dataclasses.replace(trainer, model_dir=str(tmp_path / name), steps=steps)) for steps in (*stops, 60)
        ]
        assert [part.start_step for part in parts] == [0, *stops]
        assert [batch for part in parts for batch in part.batches] == whole.batches
        assert {step: loss for part in parts for step, loss in part.losses.items()} == whole.losses
        assert_equal_states(parts[-1].state, whole.state)


@pytest.mark.heavy
@pytest.mark.fault(27)
@pytest.mark.parametrize("plan, devices", [(Plan(batch_size=8, fsdp=2, tensor=2), 4), (Plan(batch_size=8), 1)])
def test_a_run_goes_on_on_another_mesh(make_trainer, train, tmp_path, plan, devices):
    trainer = make_trainer(steps=10)
    whole = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "whole")))
    first = train(dataclasses.replace(trainer, steps=5))
    second = train(dataclasses.replace(trainer, plan=plan), jax.devices()[:devices])
    assert_equal_states(second.started, first.state)
    assert [*first.batches, *second.batches] == whole.batches
    for step in range(6, 11):
        assert second.losses[step] == pytest.approx(whole.losses[step], rel=1e-5)


@pytest.mark.fault(30)
@pytest.mark.parametrize("how", [pytest.param("gone", marks=pytest.mark.heavy), "changed", "of another version"])
def test_without_the_data_iterators_state_nothing_is_started_anew(make_trainer, train, how):
    trainer = make_trainer(steps=4)
    train(trainer)
    step = pathlib.Path(trainer.model_dir) / "checkpoints" / "4"
    run, content = step / "run.json", (step / "run.json").read_text()
    if how == "gone":
        run.unlink()
    elif how == "changed":
        run.write_text(re.sub(r'"rows": \[\[\d+', '"rows": [[99', content))
    else:  # whole, by a manifest that fits it
        values = json.loads(content)
        values["data"]["version"] = 0
        run.write_text(json.dumps(values))
        from etils import epath

        folder = epath.Path(step)
        old = manifest.read(folder)
        [new] = manifest.of_disk(folder, ["run.json"])
        files = tuple(new if file.path == "run.json" else file for file in old.files)
        manifest.write(folder, dataclasses.replace(old, files=files))
    message = (
        "is not one that this version of capibara wrote" if how == "of another version" else "holds no step that is"
    )
    with pytest.raises(UserError, match=message):
        train(dataclasses.replace(trainer, steps=6))


@pytest.mark.heavy
@pytest.mark.fault(31)
def test_workers_and_prefetch_lose_no_sample(make_trainer, train, tmp_path):
    dataset = dataclasses.replace(make_trainer().dataset, workers=2, prefetch=4)
    plain = make_trainer(steps=12, model_dir=str(tmp_path / "plain"))
    whole = train(plain)
    trainer = make_trainer(steps=12, dataset=dataset, model_dir=str(tmp_path / "workers"))
    first = train(dataclasses.replace(trainer, steps=5))
    second = train(trainer)
    assert first.batches + second.batches == whole.batches and len(set(whole.batches)) == 12


@pytest.mark.fault(32)
def test_data_that_changed_since_the_save_is_refused(make_trainer, train, tmp_path):
    from capibara.data.sources.sources import JsonlSource

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"the river {i} is wide"}) + "\n" for i in range(300)))
    source = JsonlSource(files=(str(corpus),), validation_fraction=0.1)
    trainer = make_trainer(steps=3, dataset=dataclasses.replace(make_trainer().dataset, source=source))
    train(trainer)
    corpus.write_text(corpus.read_text().replace("river 17 ", "river 18 "))
    with pytest.raises(UserError, match="the data state does not fit this run: .*data.* was .*, is "):
        train(dataclasses.replace(trainer, steps=5))


def with_flipped_bit(array, device):
    """The array with one bit of its first element changed in the copy of one device."""
    parts = []
    for shard in array.addressable_shards:
        data = np.array(jax.device_get(shard.data))
        if shard.device == device:
            data.reshape(-1)[:1].view(np.uint32)[0] ^= 1 << 12
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.mark.fault(42)
def test_a_bit_that_flips_in_one_replica_ends_the_run(make_trainer, train, monkeypatch):
    """In the first device's copy, in step 4; compared every third step."""
    from capibara.sharding.replicas import SilentCorruption
    from capibara.training import loop

    set_up = loop.set_up

    def broken(*args, **options):
        run, initial = set_up(*args, **options)

        def flipping(state, batch):
            state, metrics = run.train_step(state, batch)
            if jax.device_get(state.step) == 4:
                leaves, tree = jax.tree.flatten(state.params)
                leaves[0] = with_flipped_bit(leaves[0], jax.devices()[0])
                state = dataclasses.replace(state, params=jax.tree.unflatten(tree, leaves))
            return state, metrics

        return dataclasses.replace(run, train_step=flipping), initial

    monkeypatch.setattr(loop, "set_up", broken)
    trainer = make_trainer(steps=20, plan=Plan(batch_size=8, data=8), replica_check_every=3)
    trainer = dataclasses.replace(trainer, checkpointing=Checkpointing(every=2))
    with pytest.raises(SilentCorruption, match=r"silent data corruption: \S+ differs on \S*0 from the other replicas"):
        train(trainer)
    assert steps_of(pathlib.Path(trainer.model_dir)) == [2, 4]


@pytest.mark.heavy
@pytest.mark.fault(47)
def test_a_changed_configuration_is_shown_or_refused(shell):
    args = (*TRAIN, "--gin.MODEL_DIR=config")
    assert shell.run(*args, "--gin.TRAIN_STEPS=2").code == 0
    done = shell.run(*args, "--gin.TRAIN_STEPS=3", "--gin.LEARNING_RATE=5e-3")
    assert done.code == 0 and "changed since the last start: " in done.out and "0.005" in done.out
    for binding, message in (
        ("DecoderConfig.mlp_dim=96", "holds another model: params/"),
        ("Optimizer.name='sgd'", "holds another optimizer's state: opt_state/"),
        ("LENGTH=32", "length was 64, is 32"),
    ):
        done = shell.run(*args, "--gin.TRAIN_STEPS=4", f"--gin.{binding}")
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err
    assert steps_of(shell.folder / "config") == [2, 3]
