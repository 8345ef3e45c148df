"""Run folders are followed: new ones, appended lines, replaced files, large files, little memory."""

from __future__ import annotations

import json
import os
import time

import pytest

from capibara.monitoring.dashboard.reading import folders, large, reader, tables, thinning
from capibara.monitoring.dashboard.reading.reader import Change, Reader


def line(step, loss=1.0):
    return json.dumps({"kind": "train", "step": step, "time": 1.7e9 + step, "loss": loss, "step_s": 1.0}) + "\n"


def start(step=0):
    return json.dumps({"kind": "event", "step": step, "time": 1.7e9, "event": "start"}) + "\n"


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


def test_large_files_are_read_by_several_processes(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(reader, "_SMALL_BYTES", 10_000)
    monkeypatch.setattr(large, "_PART_BYTES", 20_000)
    text = start() + "".join(line(step, step / 7) for step in range(1, 3_000))
    run_folder(tmp_path / "run", text + line(3_000)[:30])
    follower = follow()
    all_read(follower)
    view = only(follower).view("train")
    assert view.steps.tolist() == list(range(1, 3_000))
    assert view.columns["loss"].tolist() == [step / 7 for step in range(1, 3_000)]
    assert only(follower).position == len(text)


def test_of_many_large_files_the_loss_comes_first(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(reader, "_SMALL_BYTES", 10_000)
    monkeypatch.setattr(large, "_PART_BYTES", 50_000)
    monkeypatch.setattr(reader, "_MANY_BYTES", 100_000)
    for name in "abc":
        run_folder(tmp_path / name, start() + "".join(line(step) for step in range(1, 2_000)))
    follower, seen = follow(), set()
    follower.look()
    while any(run.is_loading for run in follower.runs.values()):
        follower.look()
        for run in follower.runs.values():
            if run.position and run.position == run.size:
                seen.add(tuple(run.view("train").columns))
        time.sleep(0.002)
    assert ("loss",) in seen
    assert {tuple(run.view("train").columns) for run in follower.runs.values()} == {("loss", "step_s")}
    assert all(len(run.view("train")) == 1_999 for run in follower.runs.values())


def test_memory_is_bounded_and_rows_come_back(tmp_path, follow):
    for name in "abcd":
        run_folder(tmp_path / name, start() + "".join(line(step) for step in range(1, 2_000)))
    follower = follow(most_bytes=150_000)
    all_read(follower)
    assert sum(run.held_bytes for run in follower.runs.values()) <= 150_000
    dropped = next(run for run in follower.runs.values() if run.is_partial)
    goodput = dropped.goodput()
    with open(dropped.path, "a") as file:
        file.write(line(2_000))
    follower.look()
    assert dropped.step == 2_000 and len(dropped.view("train")) == 1  # it is followed all the same
    follower.run(dropped.id)
    for _ in range(200):
        follower.look()
        if len(dropped.view("train")) == 2_000:
            break
        time.sleep(0.02)
    assert len(dropped.view("train")) == 2_000 and dropped.goodput()["total"] >= goodput["total"]


def test_files_that_cannot_be_read_are_named_and_tried_again(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(reader, "_PAUSE_S", 0.0)
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


def test_links_are_not_followed(tmp_path):
    run_folder(tmp_path / "elsewhere" / "secret", line(1))
    root = tmp_path / "root"
    run_folder(root / "run", line(1))
    os.symlink(tmp_path / "elsewhere", root / "link")
    os.symlink(root, root / "loop")
    assert list(folders.found([str(root)]).values()) == ["run"]


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
    import numpy as np

    x, y = np.arange(1_000_000.0), np.ones(1_000_000)
    y[123_457], y[987_654] = 50.0, -50.0
    found = thinning.thinned(x, y, 500)
    assert len(found.x) <= 500 and not found.is_exact
    assert {123_457.0, 987_654.0, 0.0, 999_999.0} <= set(found.x.tolist())
    assert thinning.thinned(x[:500], y[:500], 500).is_exact


def test_smoothing_starts_without_a_bias():
    import numpy as np

    found = thinning.smoothed(np.array([3.0, 5.0, 5.0]), 0.5)
    assert found.tolist() == pytest.approx([3.0, (1.5 * 0.5 + 2.5) / 0.75, (0.375 + 1.25 + 2.5) / 0.875])


def test_rows_grow_without_a_loss():
    from capibara.monitoring.dashboard.reading.parsing import rows_of

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
