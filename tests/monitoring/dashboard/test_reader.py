"""Run folders are followed: new ones, appended lines, replaced files, large files, little memory."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest

from capibara.monitoring.reading import folders, large, memory, parsing, preview, reader, tables, thinning
from capibara.monitoring.reading import run as run_module
from capibara.monitoring.reading.reader import Change, Reader
from capibara.monitoring.reading.run import Limits, Run, Status


def line(step, loss=1.0):
    return json.dumps({"kind": "train", "step": step, "time": 1.7e9 + step, "loss": loss, "step_s": 1.0}) + "\n"


def start(step=0):
    return json.dumps({"kind": "event", "step": step, "time": 1.7e9, "event": "start"}) + "\n"


def sample(step):
    return json.dumps({"kind": "sample", "step": step, "time": 1.7e9, "prompt": f"p {step}", "text": "x"}) + "\n"


def run_folder(folder, text):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(text)
    return folder


@pytest.fixture
def follow(tmp_path):
    """A reader whose looks the test makes itself."""
    made = []

    def of(root=tmp_path, **options):
        made.append(Reader([str(root)], lambda change: None, scan_s=0.0, **options))
        return made[-1]

    yield of
    for one in made:
        one._large.end()


def all_read(follower, within_s=30.0):
    limit_s = time.monotonic() + within_s
    change = follower.look()
    while any(run.is_loading for run in follower.runs.values()):
        assert time.monotonic() < limit_s
        time.sleep(0.01)
        more = follower.look()
        change.updated += more.updated
        change.reloaded += more.reloaded
    return change


def only(follower):
    (run,) = follower.runs.values()
    return run


def test_runs_appear_and_go(tmp_path, follow):
    follower = follow()
    assert not follower.look()
    run_folder(tmp_path / "a" / "b", start() + line(1))
    change = follower.look()
    assert len(change.added) == 1 and only(follower).name == "a/b"
    run_folder(tmp_path / "c", "")
    assert len(follower.look().added) == 1
    os.rename(tmp_path / "c", tmp_path / ".hidden")
    assert len(follower.look().removed) == 1 and only(follower).name == "a/b"


def test_appended_lines_are_read_once_whole(tmp_path, follow):
    follower, path = follow(), run_folder(tmp_path / "run", start() + line(1)) / "metrics.jsonl"
    all_read(follower)
    with open(path, "a") as file:
        for step in range(2, 8):
            text = line(step)
            file.write(text[:20])
            file.flush()
            follower.look()
            assert only(follower).step == step - 1
            file.write(text[20:])
            file.flush()
            assert follower.look().updated == [only(follower).id]
            assert only(follower).step == step
    assert not follower.look()


def test_a_replaced_file_is_read_again(tmp_path, follow):
    follower, path = (
        follow(),
        run_folder(tmp_path / "run", start() + "".join(map(line, range(1, 50)))) / "metrics.jsonl",
    )
    all_read(follower)
    path.write_text(start() + line(1, 7.0))
    follower.look()
    follower.look()
    assert only(follower).view("train").columns["loss"].tolist() == [7.0]
    path.write_text(start() + "".join(line(step, 8.0) for step in range(1, 90)))  # longer than what was read
    change = follower.look()
    assert only(follower).view("train").columns["loss"].tolist() == [8.0] * 89
    assert change.reloaded == [only(follower).id]


def test_a_roll_back_voids_points(tmp_path, follow):
    follower, path = (
        follow(),
        run_folder(tmp_path / "run", start() + "".join(map(line, range(1, 50)))) / "metrics.jsonl",
    )
    all_read(follower)
    with open(path, "a") as file:
        file.write(json.dumps({"kind": "event", "step": 20, "time": 1.7e9, "event": "roll_back"}) + "\n" + line(21))
    assert follower.look().reloaded == [only(follower).id]
    assert only(follower).step == 21


def test_a_roll_back_keeps_the_samples_up_to_its_step(tmp_path, follow):
    samples = "".join(sample(step) for step in (19, 20, 21))
    path = run_folder(tmp_path / "run", start() + "".join(map(line, range(1, 22))) + samples) / "metrics.jsonl"
    follower = follow()
    all_read(follower)
    with open(path, "a") as file:
        file.write(json.dumps({"kind": "event", "step": 20, "time": 1.7e9, "event": "roll_back"}) + "\n")
    follower.look()
    assert [one.step for one in only(follower).samples.values()] == [19, 20]


def test_large_files_are_read_by_several_processes(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(reader, "SMALL_BYTES", 10_000)
    monkeypatch.setattr(large, "PART_BYTES", 20_000)
    text = start() + "".join(line(step, step / 7) for step in range(1, 3_000))
    run_folder(tmp_path / "run", text + line(3_000)[:30])
    follower = follow()
    all_read(follower)
    view = only(follower).view("train")
    assert view.steps.tolist() == list(range(1, 3_000))
    assert view.columns["loss"].tolist() == [step / 7 for step in range(1, 3_000)]
    assert only(follower).position == len(text)


def test_a_process_that_dies_loses_no_part_of_a_large_file(tmp_path, follow, monkeypatch):
    """Its parts, and those that waited for it, are read all the same, and in order."""
    monkeypatch.setattr(reader, "SMALL_BYTES", 10_000)
    monkeypatch.setattr(large, "PART_BYTES", 20_000)
    monkeypatch.setattr(large, "processes", lambda: 1)
    run_folder(tmp_path / "run", start() + "".join(line(step) for step in range(1, 3_000)))
    follower = follow()
    pool = follower._large._processes()
    pool.submit(time.sleep, 0.3)  # until the parts wait behind what ends the process
    dies = pool.submit(os._exit, 1)
    all_read(follower)
    assert dies.exception() is not None and only(follower).fault is None
    assert only(follower).view("train").steps.tolist() == list(range(1, 3_000))


def test_a_part_of_a_large_file_that_cannot_be_read_is_not_skipped(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(reader, "SMALL_BYTES", 10_000)
    monkeypatch.setattr(reader, "PAUSE_S", 0.0)
    monkeypatch.setattr(large, "PART_BYTES", 20_000)
    text, parse, faults = start() + "".join(line(step) for step in range(1, 1_000)), parsing.parse, []

    def fails(part):
        if part.start and not faults:
            faults.append(part)
            raise OSError(5, "Input/output error")
        return parse(part)

    def no_process(files):
        raise RuntimeError("no process can be started")

    monkeypatch.setattr(large.LargeFiles, "_processes", no_process)
    monkeypatch.setattr(parsing, "parse", fails)
    run_folder(tmp_path / "run", text)
    follower = follow()
    all_read(follower)
    assert faults and only(follower).position == len(text)
    assert only(follower).view("train").steps.tolist() == list(range(1, 1_000))


@pytest.fixture
def small_previews(monkeypatch):
    """Files of 10 kB count as large, and are previewed from blocks of 2 kB."""
    monkeypatch.setattr(reader, "SMALL_BYTES", 10_000)
    monkeypatch.setattr(large, "PART_BYTES", 50_000)
    monkeypatch.setattr(preview, "DISK", preview._Pace(8, 2_000))
    monkeypatch.setattr(reader, "SETTLE_S", 0.0)


def test_a_large_file_is_shown_before_it_is_read(tmp_path, follow, small_previews):
    finish = json.dumps({"kind": "event", "step": 2_000, "time": 1.7e9, "event": "end", "reason": "finished"}) + "\n"
    text = start() + "".join(line(step, step / 7) for step in range(1, 2_001)) + finish
    run_folder(tmp_path / "run", text + line(2_001)[:30])
    follower = follow()
    assert follower.look().added and follower.runs
    run, few = only(follower), only(follower).view("train")
    assert run.is_loading and run.is_coarse and run.share_read == 0 and run.position == len(text)
    assert (few.steps[0], few.steps[-1]) == (1, 2_000) and 50 < len(few) < 1_000  # from end to end
    assert np.diff(few.steps).min() > 0 and few.columns["loss"].tolist() == (few.steps / 7).tolist()
    assert run.status(Limits()) is Status.FINISHED and run.goodput() == {}  # which needs all lines
    assert all_read(follower).reloaded == [run.id]
    assert run.view("train").steps.tolist() == list(range(1, 2_001)) and run.goodput()
    assert not run.is_coarse and run.share_read == 1 and run.position == len(text)


def test_a_preview_shows_no_steps_that_were_repeated(tmp_path, small_previews):
    """A roll-back between two blocks is not seen, but its steps are."""
    again = json.dumps({"kind": "event", "step": 300, "time": 1.7e9, "event": "roll_back"}) + "\n"
    text = start() + "".join(line(step, 1.0) for step in range(1, 1_001)) + again
    text += "".join(line(step, 2.0) for step in range(301, 901))
    path = run_folder(tmp_path / "run", text) / "metrics.jsonl"
    shown = Run(str(path.parent), "run")
    shown.show(preview.preview(str(path), len(text)))
    view = shown.view("train")
    assert view.steps[-1] == 900 and set(view.columns["loss"][view.steps > 300]) == {2.0}
    assert set(view.columns["loss"][view.steps <= 300]) == {1.0} and np.diff(view.steps).min() > 0


def test_a_preview_names_no_samples(tmp_path, follow, small_previews):
    """It does not know their places in the file; they are found when all of it is read."""
    text = start() + "".join(line(step) + sample(step) for step in range(1, 501))
    run_folder(tmp_path / "run", text)
    follower = follow()
    follower.look()
    run = only(follower)
    assert run.is_unread and len(run.view("train")) > 10 and not run.samples
    all_read(follower)
    found = [parsing.line_at(run.path, one) for one in run.samples.values()]
    assert [one["step"] for one in found] == list(range(1, 501))


def test_a_preview_needs_no_whole_line_in_each_block(tmp_path, follow, small_previews):
    """A sample that is longer than all blocks: what lies around it is shown, and the file is read."""
    sample = json.dumps({"kind": "sample", "step": 5, "time": 1.0, "prompt": "p", "text": "x" * 30_000}) + "\n"
    for name, text in {"middle": "".join(map(line, range(1, 99))) + sample + line(99), "end": line(1) + sample}.items():
        run_folder(tmp_path / name, start() + text)
    follower = follow()
    all_read(follower)
    assert {run.name: run.step for run in follower.runs.values()} == {"middle": 99, "end": 1}
    assert all(len(run.samples) == 1 and not run.is_coarse for run in follower.runs.values())


def test_what_is_shown_can_be_drawn_before_the_rest_is_read(tmp_path, follow, small_previews, monkeypatch):
    monkeypatch.setattr(reader, "SETTLE_S", 0.3)
    run_folder(tmp_path / "run", start() + "".join(map(line, range(1, 2_001))))
    follower = follow()
    begin_s = time.monotonic()
    follower.look()
    follower.look()
    assert only(follower).is_coarse and not len(follower._large)
    all_read(follower)
    assert time.monotonic() - begin_s > 0.3


def test_runs_that_are_looked_at_are_read_first(tmp_path, follow, small_previews, monkeypatch):
    monkeypatch.setattr(large, "processes", lambda: 1)
    for name in "abcdef":
        run_folder(tmp_path / name, start() + "".join(map(line, range(1, 2_001))))
    follower = follow()
    follower.look()
    last = list(follower.runs.values())[-1]
    assert follower.run(last.id) is last
    follower.look()
    assert last.id in follower._large and len(follower._large) == 2  # of the six
    all_read(follower)


def test_many_new_runs_are_shown_before_all_were_looked_at(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(reader, "LOOK_S", 0.0)
    for name in "abc":
        run_folder(tmp_path / name, start() + line(1))
    follower = follow()
    assert len(follower.look().added) == 3 and all(run.is_new for run in follower.runs.values())
    monkeypatch.setattr(reader, "LOOK_S", 60.0)
    assert len(follower.look().updated) == 3


@pytest.fixture
def few_rows(monkeypatch):
    """Where memory is short, 150 rows are kept."""
    monkeypatch.setattr(run_module, "OLDER_ROWS", 100)
    monkeypatch.setattr(run_module, "_NEWEST_ROWS", 50)


def test_memory_is_bounded_and_rows_come_back(tmp_path, follow, few_rows):
    for name in "abcd":
        run_folder(tmp_path / name, start() + "".join(line(step) for step in range(1, 2_000)))
    follower = follow(most_bytes=150_000)
    all_read(follower)
    runs = list(follower.runs.values())
    assert sum(run.held_bytes for run in runs if not run.is_coarse) <= 150_000
    dropped = next(run for run in runs if run.is_coarse)
    goodput, few = dropped.goodput(), dropped.view("train").steps.tolist()
    assert few[0] == 1 and few[-50:] == list(range(1_950, 2_000)) and 100 < len(few) <= 150
    with open(dropped.path, "a") as file:
        file.write(line(2_000))
    follower.look()
    assert dropped.step == 2_000 and len(dropped.view("train")) == len(few) + 1  # it is followed all the same
    assert dropped.goodput()["productive"] == goodput["productive"] + 1.0
    follower.run(dropped.id)
    limit_s = time.monotonic() + 60
    while len(dropped.view("train")) != 2_000 and time.monotonic() < limit_s:
        follower.look()
        time.sleep(0.02)
    assert len(dropped.view("train")) == 2_000 and dropped.goodput()["productive"] == goodput["productive"] + 1.0


def test_runs_for_which_there_is_no_memory_are_not_read_again_and_again(tmp_path, follow, few_rows):
    for name in "abcd":
        run_folder(tmp_path / name, start() + "".join(line(step) for step in range(1, 2_000)))
    follower = follow(most_bytes=200_000)
    all_read(follower)
    for run in follower.runs.values():  # all four are looked at, and two have room
        follower.run(run.id)
    for _ in range(20):
        follower.look()
        time.sleep(0.02)
    versions = {run.id: run.version for run in follower.runs.values()}
    for _ in range(20):
        follower.look()
        time.sleep(0.02)
    assert {run.id: run.version for run in follower.runs.values()} == versions and not len(follower._large)
    assert sum(not run.is_coarse for run in follower.runs.values()) == 2


def test_memory_is_saved_although_small_runs_keep_theirs(few_rows):
    small, tall = Run("/runs/small", "small"), Run("/runs/tall", "tall")
    for run, count in ((small, 100), (tall, 3_000)):
        run.apply(parsing.parse_text((start() + "".join(map(line, range(1, count)))).encode(), 0))
    small.wanted_s, tall.wanted_s = 1.0, 2.0  # the small one is the first to be dropped, and is not
    memory.save([small, tall], tall.held_bytes + small.held_bytes // 2)
    assert tall.is_coarse and len(tall.view("train")) <= 150
    assert not small.is_coarse and len(small.view("train")) == 99


def test_folders_that_can_be_looked_at_again_are_no_fault(tmp_path, follow, monkeypatch):
    run_folder(tmp_path / "run", start() + line(1))
    follower = follow()
    with monkeypatch.context() as patch:

        def fails(roots):
            raise OSError(5, "Input/output error")

        patch.setattr(folders, "runs_below", fails)
        assert not follower.look() and "Input/output error" in follower.fault
    assert len(follower.look().added) == 1 and follower.fault is None


def test_files_that_cannot_be_read_are_named_and_tried_again(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(reader, "PAUSE_S", 0.0)
    folder = run_folder(tmp_path / "run", "")
    os.unlink(folder / "metrics.jsonl")
    os.mkdir(folder / "metrics.jsonl")
    follower = follow()
    follower.look()
    assert only(follower).fault
    os.rmdir(folder / "metrics.jsonl")
    (folder / "metrics.jsonl").write_text(start() + line(1))
    follower.look()
    assert only(follower).fault is None and only(follower).step == 1


def test_a_run_whose_lines_make_no_sense_ends_no_other(tmp_path, follow, monkeypatch):
    for name in "abc":
        run_folder(tmp_path / name, start() + line(1))
    apply = Run.apply

    def fails(run, *rest):
        if run.name == "b":
            raise ZeroDivisionError("absurd")
        apply(run, *rest)

    monkeypatch.setattr(Run, "apply", fails)
    follower = follow()
    assert len(follower.look().updated) == 2
    assert {run.name: run.fault for run in follower.runs.values()} == {"a": None, "b": "absurd", "c": None}
    assert not follower.look()  # it is tried again later


def test_links_are_not_followed(tmp_path):
    run_folder(tmp_path / "elsewhere" / "secret", line(1))
    root = tmp_path / "root"
    run_folder(root / "run", line(1))
    os.symlink(tmp_path / "elsewhere", root / "link")
    os.symlink(root, root / "loop")
    assert list(folders.runs_below([str(root)]).values()) == ["run"]


def test_a_reader_finds_what_is_new_by_itself(tmp_path):
    changes = []
    follower = Reader([str(tmp_path)], changes.append, poll_s=0.05, scan_s=0.1)
    follower.start()
    try:
        run_folder(tmp_path / "run", start() + line(1))
        limit_s = time.monotonic() + 10
        while not any(change.updated for change in changes):
            assert time.monotonic() < limit_s
            time.sleep(0.02)
    finally:
        follower.stop()
    assert isinstance(changes[0], Change)


def test_spikes_stay_when_points_are_thinned_out():
    x, y = np.arange(1_000_000.0), np.ones(1_000_000)
    y[123_457], y[987_654] = 50.0, -50.0
    found = thinning.thinned(x, y, 500)
    assert len(found.x) <= 500 and not found.is_exact
    assert {123_457.0, 987_654.0, 0.0, 999_999.0} <= set(found.x.tolist())
    assert thinning.thinned(x[:500], y[:500], 500).is_exact


def test_smoothing_starts_without_a_bias():
    found = thinning.smoothed(np.array([3.0, 5.0, 5.0]), 0.5)
    assert found.tolist() == pytest.approx([3.0, (1.5 * 0.5 + 2.5) / 0.75, (0.375 + 1.25 + 2.5) / 0.875])


def test_rows_grow_without_a_loss():
    from capibara.monitoring.reading.parsing import rows_of

    table = tables.Table()
    for step in range(1, 300):
        table.append(
            rows_of(
                [
                    {
                        "kind": "train",
                        "step": step,
                        "time": 1.0,
                        "loss": float(step),
                        **({"x": 1.0} if step > 200 else {}),
                    }
                ]
            )
        )
    assert table.view().columns["loss"].tolist() == [float(step) for step in range(1, 300)]
    table.truncate(100)
    assert table.last_step == 100


def test_names_of_metrics_have_a_limit(monkeypatch):
    monkeypatch.setattr(tables, "MOST_METRICS", 5)
    table = tables.Table()
    for step in range(1, 20):
        record = {"kind": "train", "step": step, "time": 1.0, f"metric_{step}": 1.0}
        table.append(parsing.rows_of([record]))
    assert [*table.view().columns] == [f"metric_{step}" for step in range(1, 6)] and len(table) == 19


def test_runs_in_a_bucket_are_followed(follow):
    import fsspec

    files = fsspec.filesystem("memory")
    text = start() + "".join(map(line, range(1, 40)))
    files.pipe_file("/bucket/runs/group/run/metrics.jsonl", text.encode())
    try:
        follower = follow("memory:///bucket/runs")
        all_read(follower)
        assert only(follower).name == "group/run" and only(follower).step == 39
        files.pipe_file("/bucket/runs/group/run/metrics.jsonl", (text + line(40) + line(41)[:20]).encode())
        follower.look()
        assert only(follower).step == 40 and only(follower).position == len(text + line(40))
        files.pipe_file("/bucket/runs/group/run/metrics.jsonl", (start() + line(1)).encode())  # it was started over
        follower.look()
        assert only(follower).step == 1
    finally:
        files.rm("/bucket", recursive=True)
