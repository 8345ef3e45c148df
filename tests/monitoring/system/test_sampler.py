"""Samples of what a run uses: in metrics.jsonl, without waiting for them, and a warning before memory is full."""

import dataclasses
import json
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from capibara.core.types import UserError
from capibara.monitoring.defaults import Monitoring
from capibara.monitoring.metrics_file.loggers import MetricsFile, all_records, metrics_path
from capibara.monitoring.system import compiles, devices, facts, host, sampler
from capibara.monitoring.system.sampler import SystemMetrics
from capibara.monitoring.system.tpu import METRICS, TpuReader
from capibara.training.base.callbacks import Callback
from tests.monitoring.trackers.runs import RUN, TOKEN

GIB = 1 << 30


class Said(Callback):
    def __init__(self):
        self.lines, self.samples, self.threads = [], [], set()

    def on_status(self, text):
        self.lines.append(text)

    def on_system(self, step, metrics):
        self.samples.append((step, metrics))
        self.threads.add(threading.current_thread())


@pytest.fixture
def run(tmp_path):
    return dataclasses.replace(RUN, model_dir=str(tmp_path / "run"))


def begun(run, *more, every_s=0.1, **options):
    said = Said()
    monitoring = Monitoring(callbacks=(MetricsFile(),), more=(said, *more))
    callbacks = monitoring.build(SystemMetrics(every_s=every_s, **options))
    callbacks.on_train_begin(run)
    callbacks.on_spent(run.start_step, {})
    return callbacks, said


def records_of(run):
    return all_records(metrics_path(run.model_dir))


def wait_for(what):
    limit_s = time.monotonic() + 20
    while not (found := what()):
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    return found


def test_samples_come_during_the_run_and_at_its_end(run):
    callbacks, said = begun(run)
    for step in range(1, 11):
        callbacks.on_step(step, {"loss": 1.0, "step_s": step / 10})
    wait_for(lambda: said.samples and said.samples[-1][0] == 10)
    callbacks.on_step(11, {"loss": 1.0})
    callbacks.on_train_end(11, "finished")
    count = len(said.samples)
    records = records_of(run)
    events = [r["event"] for r in records if r["kind"] == "event"]
    assert sorted(events[:3]) == ["facts", "spent", "start"] and events[0] == "start"
    assert records[-1]["event"] == "end" and records[-2]["kind"] == "system" and records[-2]["step"] == 11
    last = records[-2]
    assert (last["step_s_p50"], last["step_s_p90"]) == pytest.approx((0.55, 0.91)) and last["step_s_p99"] > 0.98
    assert last["process_memory_bytes"] > 0 and last["cpus"] > 0 and last["disk_free_bytes"] > 0
    assert last["compile_s"] >= 0 and type(last["compiles"]) is int
    unavailable = [name for name in (*METRICS.values(), "device_memory_bytes", "device_memory_peak_bytes")]
    assert {name: last[name] for name in unavailable} == dict.fromkeys(unavailable)
    assert "devices" not in last and "warning" not in last
    time.sleep(0.3)
    assert len(said.samples) == count and threading.main_thread() not in said.threads


def test_a_step_without_a_time_hides_no_others(run):
    callbacks, _ = begun(run)
    for step, step_s in enumerate((0.5, float("nan"), float("inf"), 0.5), 1):
        callbacks.on_step(step, {"loss": 1.0, "step_s": step_s})
    callbacks.on_train_end(4, "finished")
    last = [record for record in records_of(run) if record["kind"] == "system"][-1]
    assert [last[f"step_s_p{percent}"] for percent in (50, 90, 99)] == [0.5, 0.5, 0.5]


def test_the_record_has_machine_packages_and_git_state(run, monkeypatch):
    monkeypatch.setattr(
        sys,
        "orig_argv",
        ["python", f"--token={TOKEN}", "--api_key", "a b!", "--gin.TRAIN_STEPS=3", "--password", "hunter2"],
    )
    callbacks, _ = begun(run)
    callbacks.on_train_end(0, "finished")
    (found,) = [r["facts"] for r in records_of(run) if r.get("event") == "facts"]
    assert found["packages"]["jax"] == jax.__version__ and found["devices"] == "4 x TPU v5 lite"
    assert found["command"] == COMMAND and found["memory_bytes"] > 0


COMMAND = ["python", "--token=[hidden]", "--api_key", "a b!", "--gin.TRAIN_STEPS=3", "--password", "[hidden]"]


def test_git_state(tmp_path):
    assert facts.git_state(str(tmp_path)) is None
    mine = ["-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q", "-b", "work"], ["remote", "add", "origin", "https://me:my-password@host/x.git"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "a.py").write_text("one\n")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", *mine, "commit", "-q", "-m", "x"], cwd=tmp_path, check=True)
    clean = facts.git_state(str(tmp_path))
    assert len(clean["commit"]) == 40 and clean["branch"] == "work" and clean["dirty"] is False
    assert clean["remote"] == "https://[hidden]@host/x.git"
    (tmp_path / "a.py").write_text("two\n")
    (tmp_path / "b.py").write_text("new\n")
    changed = facts.git_state(str(tmp_path))
    assert changed["dirty"] is True and changed["untracked"] == 1 and "a.py | 2 +-" in changed["diff_stat"]


def test_memory_that_is_nearly_full_is_named_once_with_the_largest_arrays(run, monkeypatch):
    used = [8 * GIB]
    monkeypatch.setattr(
        host, "memory", lambda: host.Memory(used_bytes=used[0], limit_bytes=10 * GIB, process_bytes=GIB)
    )
    large = jnp.zeros((1 << 20, 16), jnp.float32)
    arrays = {"params/embedding": ((1 << 20, 16), "float32"), "mu/embedding": ((1 << 20, 16), "float32")}
    callbacks, said = begun(dataclasses.replace(run, arrays=arrays))
    wait_for(lambda: said.samples)
    assert said.lines == []
    used[0] = 9 * GIB
    wait_for(lambda: said.lines)
    count = len(said.samples)
    wait_for(lambda: len(said.samples) > count + 2)
    callbacks.on_train_end(0, "finished")
    (line,) = said.lines
    assert line.startswith(
        "warning: host memory is nearly full: 9.00 of 10.00 GiB (90%); largest arrays on a device: 1 x "
    )
    assert "float32[1048576, 16] params/embedding and 1 more (64.0 MiB)" in line
    warned = [r["warning"] for r in records_of(run) if "warning" in r]
    assert warned == [line] and large.nbytes == 64 << 20


def test_devices_are_watched_apart_from_the_host(run, monkeypatch):
    memory = devices.DeviceMemory(
        used_bytes=(GIB, 15 * GIB), peak_bytes=(2 * GIB, None), limit_bytes=(16 * GIB, 16 * GIB)
    )
    monkeypatch.setattr(devices, "memory", lambda: memory)
    callbacks, said = begun(run)
    wait_for(lambda: said.lines)
    callbacks.on_train_end(0, "finished")
    assert said.lines[0].startswith("warning: device memory is nearly full: 15.00 of 16.00 GiB (94%)")
    sample = said.samples[0][1]
    assert (sample["device_memory_bytes"], sample["device_memory_peak_bytes"]) == (15 * GIB, 2 * GIB)
    assert sample["devices"]["device_memory_bytes"] == [GIB, 15 * GIB]
    assert sample["devices"]["device_memory_peak_bytes"] == [2 * GIB, None]


def test_a_share_of_one_never_warns(run, monkeypatch):
    monkeypatch.setattr(host, "memory", lambda: host.Memory(used_bytes=GIB, limit_bytes=GIB, process_bytes=GIB))
    callbacks, said = begun(run, warn_share=1.0)
    callbacks.on_train_end(0, "finished")
    assert said.samples and said.lines == []


def test_buffers_of_one_shape_count_together():
    kept = [jnp.zeros((3, 5, 7, 11), jnp.bfloat16) for _ in range(4)]
    found = next(one for one in devices.largest(most=10_000) if one.shape == (3, 5, 7, 11))
    assert (found.count, found.device_bytes, found.dtype) == (4, 4 * 3 * 5 * 7 * 11 * 2, "bfloat16") and kept
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    split = jax.device_put(jnp.zeros((16, 13, 17)), sharding)
    found = next(
        one for one in devices.largest(most=10_000) if one.shape == (16, 13, 17) and one.dtype == str(split.dtype)
    )
    assert found.device_bytes <= split.nbytes // 8 + split.nbytes  # the shard, and the array from which it was made
    assert devices.listed([]) == "none"


def test_compilations_are_counted():
    before, before_s = compiles.count()
    jax.jit(lambda x: x * 3 + 17)(jnp.arange(23)).block_until_ready()
    after, after_s = compiles.count()
    assert after > before and after_s > before_s


def test_a_reading_that_fails_ends_nothing(run, monkeypatch, caplog):
    def failing():
        raise OSError("odd machine")

    monkeypatch.setattr(host, "cpus", failing)
    monkeypatch.setattr(facts.host, "cpus", lambda: 1)
    callbacks, said = begun(run)
    monkeypatch.setattr(host, "cpus", failing)
    time.sleep(0.35)
    callbacks.on_step(1, {"loss": 1.0})
    callbacks.on_train_end(1, "finished")
    assert len([one for one in caplog.records if "system metrics cannot be read" in one.message]) == 1
    assert [r["kind"] for r in records_of(run) if r["kind"] == "train"] == ["train"]


def test_an_error_of_the_run_ends_the_thread(run):
    callbacks, said = begun(run)
    wait_for(lambda: said.samples)
    callbacks.close()
    assert not any(thread.name == "system metrics" for thread in threading.enumerate())


def test_none_are_sampled_on_demand_or_without_a_metrics_file(run):
    callbacks, said = begun(run, every_s=0)
    callbacks.on_train_end(0, "finished")
    assert said.samples == [] and [r.get("event") for r in records_of(run)] == ["start", "spent", "end"]
    said = Said()
    callbacks = Monitoring(callbacks=(said,)).build()
    for call, *args in (("on_train_begin", run), ("on_spent", 0, {}), ("on_train_end", 0, "finished")):
        getattr(callbacks, call)(*args)
    assert said.samples == []


def test_mistakes_are_one_line():
    for options in ({"every_s": 0.01}, {"every_s": -1.0}, {"warn_share": 0.0}, {"warn_share": 1.5}):
        with pytest.raises(UserError, match="SystemMetrics") as error:
            SystemMetrics(**options)
        assert "\n" not in str(error.value)


LIBTPU = """
import json, sys, time
assert sys.argv[2:] == NAMES
for _ in range(TIMES):
    print(json.dumps({"duty_cycle_pct": ["50.5", "100"], "hbm_capacity_usage": ["1024", "n/a"], "tensorcore_util": []}), flush=True)
    time.sleep(0.05)
time.sleep(1000)
"""


def fake_libtpu(times):
    return sys.executable, "-c", LIBTPU.replace("NAMES", repr([*METRICS])).replace("TIMES", str(times))


def test_libtpu_answers_in_a_process_of_its_own():
    reader = TpuReader(0.1, fake_libtpu(1000))
    try:
        found = wait_for(reader.read)
        assert found == {"duty_cycle_percent": [50.5, 100.0], "hbm_used_bytes": [1024.0, None]}
    finally:
        reader.close()
    assert reader._process.poll() is not None


def test_an_answer_that_is_too_old_is_none(monkeypatch):
    reader = TpuReader(0.1, fake_libtpu(1))
    try:
        wait_for(reader.read)
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + 10)
        assert reader.read() == {}
    finally:
        monkeypatch.undo()
        reader.close()


def test_on_a_tpu_its_values_are_in_the_samples(run, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(sampler, "TpuReader", lambda every_s: TpuReader(every_s, fake_libtpu(1000)))
    callbacks, said = begun(run)
    sample = wait_for(lambda: next((one for _, one in said.samples if one["duty_cycle_percent"] is not None), None))
    callbacks.on_train_end(0, "finished")
    assert (sample["duty_cycle_percent"], sample["hbm_used_bytes"], sample["tensorcore_util_percent"]) == (
        75.25,
        1024.0,
        None,
    )
    assert sample["devices"]["duty_cycle_percent"] == [50.5, 100.0]
    assert json.dumps(sample)


def test_a_step_does_not_wait_for_samples(run, monkeypatch):
    """A sample that takes long, as on a machine whose /proc is slow, holds up no step."""
    monkeypatch.setattr(
        host, "memory", lambda: time.sleep(0.5) or host.Memory(used_bytes=1, limit_bytes=2, process_bytes=1)
    )
    monkeypatch.setattr(facts, "of_process", lambda *args: {})
    callbacks, _ = begun(run)
    spent_s = []
    for step in range(1, 101):
        begin_s = time.perf_counter()
        callbacks.on_step(step, {"loss": 1.0, "step_s": 0.01})
        spent_s.append(time.perf_counter() - begin_s)
        time.sleep(0.005)
    callbacks.on_train_end(100, "finished")
    assert sorted(spent_s)[90] < 0.002
