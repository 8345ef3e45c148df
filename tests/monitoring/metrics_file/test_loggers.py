"""metrics.jsonl, how it is read after restarts, and TensorBoard files."""

import dataclasses
import errno
import gc
import glob
import json
import math
import os
import struct
import threading

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.monitoring.metrics_file import loggers
from capibara.monitoring.metrics_file.loggers import MetricsFile, TensorBoard, mfu, read_metrics
from capibara.training.base.callbacks import RunInfo

RUN = RunInfo(
    model_dir="",
    start_step=0,
    total_steps=100,
    param_count=1000,
    tokens_per_step=64,
    flops_per_step=6e12,
    device_count=4,
    device_kind="TPU v5 lite",
    peak_flops=2e12,
    config="Trainer.seed = 1",
)


def record(run, steps, reason="interrupted", loss=1.0):
    """One start of the program that logs train metrics at `steps`."""
    callback = MetricsFile()
    callback.on_train_begin(run)
    for step in steps:
        callback.on_step(step, {"loss": loss, "step_s": 1.5})
    callback.on_train_end(steps[-1], reason)


@pytest.fixture
def run(tmp_path):
    return dataclasses.replace(RUN, model_dir=str(tmp_path / "new" / "run"))


def lines_of(run):
    with open(loggers.metrics_path(run.model_dir), encoding="utf-8") as file:
        return file.read().removesuffix("\n").split("\n")


def losses(run):
    return {r["step"]: r["loss"] for r in read_metrics(run.model_dir) if r["kind"] == "train"}


def test_mfu():
    assert mfu(RUN, 1.5) == pytest.approx(6e12 / 1.5 / (4 * 2e12))
    assert mfu(dataclasses.replace(RUN, peak_flops=None), 1.5) is None
    assert mfu(RUN, 0.0) is None


@pytest.mark.parametrize(
    ("line", "is_record"),
    [
        ('{"kind": "train", "step": 1, "time": 2.5, "loss": NaN}', True),
        ('{"kind": "train", "step": 1}', True),
        ('{"kind": "train", "step": 1, "loss": 1%s}' % ("0" * 400), True),
        ('{"kind": "train", "step": 1%s}' % ("0" * 400), False),
        ('{"kind": "train", "step": 9007199254740992}', False),
        ('{"kind": "train", "step": true}', False),
        ('{"kind": "train", "step": 1, "time": NaN}', False),
        ('{"kind": "train", "step": 1, "time": 1e300}', False),
        ('{"kind": "train", "step": 1, "time": "now"}', False),
        ('{"kind": ["train"], "step": 1}', False),
        ('{"kind": "event", "step": 1, "event": ["start"]}', False),
        ('{"kind": "sample", "step": 1, "prompt": {}}', False),
        ("[" * 100_000, False),
        ("\x00", False),
        ("", False),
    ],
)
def test_what_is_a_record(line, is_record):
    found = loggers.parse(line)
    assert (found is not None) == is_record
    assert found is None or math.isinf(found.get("loss") or math.inf) or math.isnan(found["loss"])


class TestMetricsFile:
    def test_every_kind_of_line(self, run):
        callback = MetricsFile()
        callback.on_train_begin(run)
        callback.on_step(10, {"loss": np.float32(2.5), "step_s": 1.5})
        callback.on_evaluate(10, {"loss": 2.25, "bits_per_byte": 1.5})
        callback.on_sample(10, 'de"f', "\u2028 é\n\x1b")
        callback.on_checkpoint(10)
        callback.on_train_end(10, "finished")
        start, train, evaluation, sample, checkpoint, end = map(json.loads, lines_of(run))
        assert (start["kind"], start["event"], start["step"], start["param_count"]) == ("event", "start", 0, 1000)
        assert train["kind"] == "train" and train["loss"] == 2.5 and train["mfu"] == pytest.approx(0.5)
        assert evaluation["kind"] == "eval" and evaluation["bits_per_byte"] == 1.5
        assert sample["prompt"] == 'de"f' and sample["text"] == "\u2028 é\n\x1b"
        assert (checkpoint["event"], end["event"], end["reason"]) == ("checkpoint", "end", "finished")
        assert all(abs(r["time"] - start["time"]) < 60 for r in (train, end))

    def test_samples_of_the_system_and_facts(self, run):
        callback = MetricsFile()
        callback.on_system(0, {"cpus": 2})  # from a thread that is too early
        callback.on_train_begin(run)
        callback.on_system(3, {"cpus": 2, "hbm_used_bytes": None, "devices": {"x": [1.5, None]}})
        callback.on_facts(0, {"git": {"commit": "a", "dirty": True}, "command": ["python"]})
        callback.on_train_end(3, "finished")
        callback.on_system(3, {"cpus": 2})  # from one that is too late
        _, system, facts, end = map(json.loads, lines_of(run))
        assert (system["kind"], system["step"]) == ("system", 3) and end["event"] == "end"
        assert (system["cpus"], system["hbm_used_bytes"], system["devices"]) == (2, None, {"x": [1.5, None]})
        assert facts["event"] == "facts" and facts["facts"]["git"] == {"commit": "a", "dirty": True}
        assert [r["kind"] for r in read_metrics(run.model_dir)] == ["event", "event", "system", "event"]

    def test_threads_do_not_mix_their_lines(self, run):
        callback = MetricsFile()
        callback.on_train_begin(run)
        write = [lambda: callback.on_system(1, {"text": "x" * 5000}), lambda: callback.on_step(1, {"loss": 1.0})]
        threads = [threading.Thread(target=lambda one=one: [one() for _ in range(100)]) for one in write]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        callback.on_train_end(1, "finished")
        assert len(loggers.all_records(loggers.metrics_path(run.model_dir))) == 202

    def test_each_line_is_on_disk_at_once(self, run):
        callback = MetricsFile()
        callback.on_train_begin(run)
        for step in range(1, 4):
            callback.on_step(step, {"loss": 1.0})
            assert json.loads(lines_of(run)[-1])["step"] == step

    def test_values_that_are_not_finite_are_null(self, run):
        record(run, [1], loss=math.nan)
        assert "NaN" not in "".join(lines_of(run))
        assert losses(run) == {1: None}

    def test_no_mfu_where_the_peak_is_unknown(self, run):
        record(dataclasses.replace(run, peak_flops=None), [1])
        assert "mfu" not in json.loads(lines_of(run)[1])

    def test_undecodable_sample(self, run):
        callback = MetricsFile()
        callback.on_train_begin(run)
        callback.on_sample(1, "", "\udc80")
        assert read_metrics(run.model_dir)[-1]["text"] == "\udc80"

    def test_a_folder_has_the_name(self, run):
        os.makedirs(loggers.metrics_path(run.model_dir))
        for mistake in (lambda: MetricsFile().on_train_begin(run), lambda: read_metrics(run.model_dir)):
            with pytest.raises(UserError, match="metrics.jsonl is a folder, must be a file") as error:
                mistake()
            assert "\n" not in str(error.value)

    def test_disk_full(self, run, monkeypatch):
        callback = MetricsFile()
        callback.on_train_begin(run)

        class Full:
            def write(self, text):
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(callback._lines, "_file", Full())
        with pytest.raises(UserError, match="metrics.jsonl cannot be written: disk full") as error:
            callback.on_step(1, {"loss": 1.0})
        assert "\n" not in str(error.value)


class TestReadMetrics:
    def test_resume_keeps_the_newer_lines_and_the_file(self, run):
        record(run, [10, 20, 30], loss=1.0)
        before = lines_of(run)
        record(dataclasses.replace(run, start_step=20), [25, 30], loss=2.0)
        assert lines_of(run)[: len(before)] == before
        assert losses(run) == {10: 1.0, 20: 1.0, 25: 2.0, 30: 2.0}

    def test_steps_after_the_checkpoint_are_void(self, run):
        """The run was killed at 30, went back to 20 and has logged nothing since."""
        record(run, [10, 20, 30], loss=1.0)
        MetricsFile().on_train_begin(dataclasses.replace(run, start_step=20))
        assert losses(run) == {10: 1.0, 20: 1.0}

    def test_starts_and_samples(self, run):
        for start in (0, 5, 5):
            callback = MetricsFile()
            callback.on_train_begin(dataclasses.replace(run, start_step=start))
            callback.on_sample(5, "a", f"text {start}")
            callback.on_sample(5, "b", f"text {start}")
        records = read_metrics(run.model_dir)
        assert [r["step"] for r in records if r.get("event") == "start"] == [0, 5]
        samples = [(r["prompt"], r["text"]) for r in records if r["kind"] == "sample"]
        assert samples == [("a", "text 5"), ("b", "text 5")]

    def test_a_torn_last_line(self, run):
        """Cut at every byte of the last line: the earlier records are read, and the next start loses nothing."""
        record(run, [1, 2, 3], loss=0.5)
        path = loggers.metrics_path(run.model_dir)
        with open(path, "rb") as file:
            whole = file.read()
        last = whole.rstrip(b"\n").rfind(b"\n") + 1
        for cut in range(last, len(whole) - 1):
            with open(path, "wb") as file:
                file.write(whole[:cut])
            assert losses(run) == {1: 0.5, 2: 0.5, 3: 0.5}
            record(dataclasses.replace(run, start_step=3), [4], loss=0.25)
            assert losses(run) == {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.25}

    def test_lines_that_are_no_records(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'\n[1]\n{"kind": "train"}\n\xff\xfe\n{"kind": "train", "step": 1, "loss": 3.0}\n')
        assert [r["step"] for r in read_metrics(str(path))] == [1]

    def test_missing(self, tmp_path):
        with pytest.raises(UserError, match="does not exist: name a run folder"):
            read_metrics(str(tmp_path))


class TestBucket:
    """The class for buckets, on a local folder: the same file in the end, in few writes."""

    def test_same_lines_as_a_local_file(self, tmp_path):
        path = str(tmp_path / "run" / "metrics.jsonl")
        for lines in (["a", "é", "\udc80"], ["b"]):
            remote = loggers._RemoteLines(path)
            for line in lines:
                remote.write(line)
            remote.close()
        assert (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8") == "a\né\n\\udc80\nb\n"

    def test_writes_are_rare_but_for_checkpoints(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        remote = loggers._RemoteLines(str(path))
        remote.write("1")
        remote.write("2")
        assert path.read_text() == "1\n"
        remote.flush()
        assert path.read_text() == "1\n2\n"


class TestTensorBoard:
    def test_scalars(self, run):
        callback = TensorBoard()
        callback.on_train_begin(run)
        callback.on_step(10, {"loss": 2.5, "step_s": 1.5})
        callback.on_evaluate(10, {"loss": 2.25})
        callback.on_system(10, {"cpus": 2, "hbm_used_bytes": None, "devices": {"x": [1.0]}, "warning": "full"})
        callback.on_sample(10, "def ", "main")
        callback.on_checkpoint(10)
        callback.on_train_end(10, "finished")
        found = scalars(run)
        assert {name: found[name, 10] for name, _ in found if name.startswith("system")} == {"system/cpus": 2}
        assert found[("train/loss", 10)] == 2.5 and found[("eval/loss", 10)] == 2.25
        assert found[("train/mfu", 10)] == pytest.approx(0.5)

    def test_undecodable_sample(self, run):
        callback = TensorBoard()
        callback.on_train_begin(run)
        callback.on_sample(1, "\udc80", "é\udcff")
        callback.on_train_end(1, "finished")
        texts = {v.tag: v.tensor.string_val[0].decode() for e in events(run) for v in e.summary.value}
        assert texts["sample/\\udc80/text_summary"] == "    \\udc80é\\udcff"

    def test_a_file_has_the_folders_name(self, run):
        os.makedirs(run.model_dir)
        with open(os.path.join(run.model_dir, "tensorboard"), "w"):
            pass
        with pytest.raises(UserError, match="tensorboard is a file, must be a folder") as error:
            TensorBoard().on_train_begin(run)
        assert "\n" not in str(error.value)

    def test_a_resumed_run_purges_what_came_after_its_checkpoint(self, run):
        callback = TensorBoard()
        callback.on_train_begin(dataclasses.replace(run, start_step=20))
        callback.on_train_end(20, "finished")
        starts = [e for e in events(run) if e.HasField("session_log")]
        assert [e.step for e in starts] == [21]

    @pytest.mark.parametrize("when", ["in the run", "at its exit"])
    def test_a_bucket_that_takes_no_more_is_said_once_and_left_alone(self, run, bucket_events, caplog, when):
        """Its writer uploads when it is collected: an error there is a traceback after the run's own line."""
        callback = TensorBoard()
        callback.on_train_begin(dataclasses.replace(run, model_dir="closing://run"))
        bucket_events.is_closed = True
        if when == "in the run":
            callback.on_checkpoint(1)
            callback.on_step(2, {"loss": 1.0})
        else:
            callback._events._close_after_fault()
        asked = bucket_events.uploads
        del callback
        gc.collect()
        assert bucket_events.uploads == asked == 1
        assert len(caplog.records) == (when == "in the run")


@pytest.fixture
def bucket_events():
    """The class of a writer to closing://, as tensorboardX has one to gs://."""
    from tensorboardX import record_writer

    class Writer:
        is_closed, uploads = False, 0

        def __init__(self, path):
            pass

        def __del__(self):
            self.close()

        def write(self, data):
            pass

        def flush(self):
            type(self).uploads += 1
            if self.is_closed:
                raise OSError("Forbidden")

        def close(self):
            self.flush()

    class Factory:
        def open(self, path):
            return Writer(path)

        def directory_check(self, path):
            pass

    record_writer.register_writer_factory("closing", Factory())
    return Writer


def events(run):
    """Events in the run's TensorBoard files: records of length, checksum, data, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(glob.glob(os.path.join(run.model_dir, "tensorboard", "*tfevents*"))):
        with open(path, "rb") as file:
            while header := file.read(12):
                (length,) = struct.unpack("<Q", header[:8])
                found.append(Event.FromString(file.read(length)))
                file.read(4)
    return found


def scalars(run):
    return {(v.tag, e.step): v.simple_value for e in events(run) for v in e.summary.value if v.HasField("simple_value")}
