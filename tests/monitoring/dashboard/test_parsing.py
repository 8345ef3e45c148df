"""Columns hold what read_metrics reads line by line."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from capibara.monitoring.metrics_file.loggers import all_records, read_metrics
from capibara.monitoring.reading import parsing
from capibara.monitoring.reading import run as run_module
from capibara.monitoring.reading.run import Limits, Run, Status, start_value


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks from little text."""
    monkeypatch.setattr(parsing, "BLOCK_BYTES", 3_000)


def write(path, records):
    path.write_text(
        "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records), encoding="utf-8"
    )


def read(folder):
    """A run of all that a folder's file holds."""
    run = Run(str(folder), "run")
    run.apply(parsing.parse(parsing.Range(run.path, 0, (folder / "metrics.jsonl").stat().st_size)))
    return run


def check_same(run, folder):
    """Raises AssertionError if the tables differ from what read_metrics returns."""
    expected: dict[str, list] = {}
    for record in read_metrics(str(folder)):
        if record["kind"] not in ("event", "sample"):
            expected.setdefault(record["kind"], []).append(record)
    views = {kind: view for kind, view in run.views().items() if len(view)}
    assert views.keys() == expected.keys()
    for kind, records in expected.items():
        view = views[kind]
        assert view.steps.tolist() == [record["step"] for record in records]
        for index, record in enumerate(records):
            for name, value in record.items():
                if name in ("kind", "step") or isinstance(value, (list, dict, str)):
                    continue
                found = view.times[index] if name == "time" else view.columns[name][index]
                assert found == (math.inf if value is None else value), (kind, name, record)
            missing = set(view.columns) - set(record)
            assert all(math.isnan(view.columns[name][index]) for name in missing)


def line(step, **more):
    noise = random.Random(step)
    fields = {
        "loss": noise.random() * 10,
        "grad_norm": noise.random() * 1e-7,
        "tokens": 512.0,
        "learning_rate": 1e-05 * step,
    }
    return {"kind": "train", "step": step, "time": 1.7e9 + step, **fields, **more}


def start(step):
    return {"kind": "event", "step": step, "time": 1.7e9 + step, "event": "start"}


def test_a_plain_run(tmp_path, small_blocks):
    write(tmp_path / "metrics.jsonl", [start(0), *map(line, range(1, 500))])
    check_same(read(tmp_path), tmp_path)


def test_forms_change_within_a_block(tmp_path, small_blocks):
    records = [start(0)]
    for step in range(1, 400):
        records.append(line(step, **({"evaluate_s": 1.5, "save_s": 0.5} if step % 7 == 0 else {})))
        if step % 50 == 0:
            records.append({"kind": "eval", "step": step, "time": 1.7e9, "loss": 2.0, "bits_per_byte": 1.0})
    write(tmp_path / "metrics.jsonl", records)
    check_same(read(tmp_path), tmp_path)


def test_keys_of_equal_length_are_not_mixed_up(tmp_path, small_blocks):
    write(
        tmp_path / "metrics.jsonl",
        [start(0), *(line(step, **{"abc" if step % 2 else "cba": float(step)}) for step in range(1, 300))],
    )
    check_same(read(tmp_path), tmp_path)


def test_digits_in_names(tmp_path, small_blocks):
    more = {f"expert_load/{expert}": 1.25 for expert in range(12)} | {"node_0/loss": 2.5, "node_1/loss": -3e-12}
    write(tmp_path / "metrics.jsonl", [start(0), *(line(step, **more) for step in range(1, 200))])
    check_same(read(tmp_path), tmp_path)


def test_nulls_lists_texts_and_booleans(tmp_path, small_blocks):
    odd = [
        {"loss": None},
        {"loss": None, "node_0/loss": None},
        {"devices": {"a": [1, 2]}},
        {"warning": 'e-5 + {"x": 1}, 3'},
    ]
    records = [line(step, **odd[step // 40 % 4]) for step in range(1, 300)]
    write(tmp_path / "metrics.jsonl", [start(0), *records])
    check_same(read(tmp_path), tmp_path)


def test_resumed_and_rolled_back(tmp_path, small_blocks):
    records = [start(0), *map(line, range(1, 200)), start(150), *(line(step, loss=1.0) for step in range(151, 260))]
    records += [{"kind": "event", "step": 180, "time": 1.0, "event": "roll_back"}, *map(line, range(181, 230))]
    write(tmp_path / "metrics.jsonl", records)
    check_same(read(tmp_path), tmp_path)


def test_torn_lines_and_garbage_are_skipped(tmp_path, small_blocks):
    records = [start(0), *map(line, range(1, 100)), json.dumps(line(100))[:57], start(90), *map(line, range(91, 150))]
    records += [
        "",
        "[]",
        "{}",
        "null",
        '{"kind": 3, "step": 1}',
        '{"kind": "train", "step": "x"}',
        "\x00\xff",
    ]
    records += [json.dumps(line(151)) + json.dumps(line(152)), '{"kind": "train", "step": 1e400}']
    write(tmp_path / "metrics.jsonl", records)
    check_same(read(tmp_path), tmp_path)


def test_a_line_that_nests_deeply_is_skipped(tmp_path):
    write(tmp_path / "metrics.jsonl", [start(0), line(1), "[" * 100_000, line(2)])
    assert read(tmp_path).view("train").steps.tolist() == [1, 2]


def test_steps_that_go_back_without_an_event(tmp_path, small_blocks):
    order = [*range(1, 120), *range(60, 90), *range(200, 150, -1)]
    write(tmp_path / "metrics.jsonl", [start(0), *(line(step, at=float(index)) for index, step in enumerate(order))])
    check_same(read(tmp_path), tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_random_files_in_random_pieces(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(parsing, "BLOCK_BYTES", 2_000)
    noise, records, step = random.Random(seed), [start(0)], 0
    for _ in range(600):
        chance = noise.random()
        step += 1
        if chance < 0.02:
            step = noise.randrange(step)
            records.append(start(step))
        elif chance < 0.04:
            step = noise.randrange(step)
            records.append({"kind": "event", "step": step, "time": 1.0, "event": "roll_back"})
        elif chance < 0.08:
            records.append({"kind": "eval", "step": step, "time": 1.0, "loss": noise.random()})
        elif chance < 0.1:
            records.append(json.dumps(line(step))[: noise.randrange(150)])
        else:
            records.append(line(step, **({"save_s": 1.0} if noise.random() < 0.1 else {})))
    write(tmp_path / "metrics.jsonl", records)
    content = (tmp_path / "metrics.jsonl").read_bytes()
    run, at = Run(str(tmp_path), "run"), 0
    while at < len(content):
        end = content.find(b"\n", min(len(content) - 1, at + noise.randrange(6_000))) + 1
        run.apply(parsing.parse_text(content[at:end], at))
        at = end
    check_same(run, tmp_path)


def test_a_line_longer_than_the_limit_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(parsing, "BLOCK_BYTES", 1_000)
    monkeypatch.setattr(parsing, "LONGEST_LINE_BYTES", 5_000)
    long = {"kind": "sample", "step": 5, "time": 1.0, "prompt": "p", "text": "x" * 20_000}
    write(tmp_path / "metrics.jsonl", [start(0), *map(line, range(1, 30)), long, *map(line, range(30, 60))])
    assert read(tmp_path).view("train").steps.tolist() == list(range(1, 60))


@pytest.mark.parametrize("count", [3, 50], ids=["few", "many alike"])
def test_absurd_numbers_are_no_records(tmp_path, count):
    huge = "1" + "0" * 400
    text = "".join(json.dumps(one) + "\n" for one in [start(0), *map(line, range(1, 4))])
    for name, number in (("step", 2**53), ("time", "1e300"), ("time", huge), ("step", huge)):
        absurd = {"kind": "train", "step": 9, "time": 1.0, "loss": 1.0} | {name: "NUMBER"}
        text += (json.dumps(absurd).replace('"NUMBER"', str(number)) + "\n") * count
    text += json.dumps(start(3)).replace('"step"', f'"total_steps": {huge}, "step"') + "\n" + json.dumps(line(4)) + "\n"
    run = Run(str(tmp_path), "run")
    run.apply(parsing.parse_text(text.encode(), 0))
    assert run.view("train").steps.tolist() == [1, 2, 3, 4]
    assert run.status(Limits()) and start_value(run, "total_steps") is None


def test_samples_are_found_at_their_place(tmp_path, small_blocks):
    records = [start(0)]
    for step in range(1, 60):
        records += [
            line(step),
            {"kind": "sample", "step": step, "time": 1.0, "prompt": "é " * 150, "text": f"text {step}"},
        ]
    write(tmp_path / "metrics.jsonl", records)
    run = read(tmp_path)
    assert len(run.samples) == 59
    texts = [parsing.line_at(run.path, sample)["text"] for sample in run.samples.values()]
    assert texts == [f"text {step}" for step in range(1, 60)]


def test_goodput_is_that_of_all_lines(demo_runs):
    from capibara.monitoring.metrics_file import goodput

    for path in demo_runs.rglob("metrics.jsonl"):
        expected, found = goodput.account(all_records(str(path))), read(path.parent).goodput()
        assert found.keys() == expected.keys()
        for name, seconds in expected.items():
            assert found[name] == pytest.approx(seconds, abs=1e-6), (path, name)


def test_goodput_of_lines_that_come_out_of_order(tmp_path):
    """What was counted up to the newest line is counted again."""
    early, late = ([line(step, step_s=float(step)) for step in steps] for steps in ([1, 2, 3, 6, 9], [4, 5]))
    both = [Run(str(tmp_path), name) for name in ("asked once", "asked between")]
    for run in both:
        for records in ([start(0), *early], late):
            run.apply(parsing.parse_text("".join(json.dumps(one) + "\n" for one in records).encode(), 0))
            if run is both[1]:
                run.goodput()
    expected = sum([1, 2, 3, 4, 5, 6, 3 * 9])
    assert [run.goodput()["productive"] for run in both] == [expected, expected]


def test_goodput_survives_that_rows_are_dropped_from_memory(demo_runs, monkeypatch):
    monkeypatch.setattr(run_module, "OLDER_ROWS", 10)
    monkeypatch.setattr(run_module, "_NEWEST_ROWS", 5)
    run = read(demo_runs / "group" / "resumed")
    before = run.goodput()
    run.forget_rows()
    assert run.goodput() == pytest.approx(before)
    assert len(run.view("train")) <= 15


def test_the_status_of_a_run(tmp_path):
    run = Run(str(tmp_path), "run")
    assert run.status(Limits()) is Status.WAITING
    text = "".join(json.dumps(one) + "\n" for one in [start(0), *map(line, range(1, 50))])
    run.apply(parsing.parse_text(text.encode(), 0))
    assert run.status(Limits(), 1.7e9 + 60) is Status.RUNNING
    assert run.status(Limits(), 1.7e9 + 300) is Status.STALLED
    assert run.status(Limits(), 1.7e9 + 90_000) is Status.FAILED
    for reason, status in (
        ("finished", Status.FINISHED),
        ("interrupted", Status.INTERRUPTED),
        ("early_stopping", Status.STOPPED_EARLY),
    ):
        end = {"kind": "event", "step": 49, "time": 1.7e9, "event": "end", "reason": reason}
        run.apply(parsing.parse_text((json.dumps(end) + "\n").encode(), 0))
        assert run.status(Limits(), 1.7e9 + 90_000) is status
    run.apply(parsing.parse_text((json.dumps(start(49)) + "\n").encode(), 0))
    assert run.status(Limits(), 1.7e9 + 60) is Status.RUNNING


def test_a_wide_run_keeps_its_columns_apart(tmp_path):
    write(
        tmp_path / "metrics.jsonl",
        [start(0), *(line(step, **{f"metric_{step % 3}": float(step)}) for step in range(1, 100))],
    )
    view = read(tmp_path).view("train")
    steps = view.steps[np.isfinite(view.columns["metric_1"])]
    assert steps.tolist() == [step for step in range(1, 100) if step % 3 == 1]
