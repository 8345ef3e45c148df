"""The table of a group's nodes, made of what a real coordinator writes."""

from __future__ import annotations

import json

import pytest

from capibara.cli.composition import group_facts, run_facts
from capibara.strategies.group.exchange import Agreed, Exchange
from tests.strategies.group.test_coordinator import Play, coordinator, moved, send, start


def node_of(folder, exchange):
    folder.mkdir(parents=True)
    (folder / "config.gin").write_text(
        f"EXCHANGE = {str(exchange)!r}\nGroupNode.every = 50\nGroupNode.exchange = %EXCHANGE\nTrainer.group = @GroupNode()\n"
    )
    return str(folder)


def honest(exchange, round_, name, model):
    send(exchange, round_, name, start() if model is None else moved(model, (round_, ord(name))), every=50)


def silent(exchange, round_, name, model):
    if model is None or round_ == 2:
        honest(exchange, round_, name, model)


def missing_once(exchange, round_, name, model):
    if round_ != 2:
        honest(exchange, round_, name, model)


def garbage(exchange, round_, name, model):
    if round_ < 2:
        honest(exchange, round_, name, model)
    else:
        send(exchange, round_, name, model, data=b"\x07" * 300, every=50)


def answer(folder, *roots):
    return run_facts.questions(list(map(str, roots)))["group"](folder)


def test_who_had_a_part_and_why_others_had_none(tmp_path):
    exchange, folder = tmp_path / "runs" / "group", node_of(tmp_path / "runs" / "a", tmp_path / "runs" / "group")
    config = coordinator(exchange, num_nodes=5, grace_s=0.3, consensus_timeout_s=5.0)
    config.run(check=Play(exchange, {**dict.fromkeys("abc", honest), "d": silent, "e": garbage}))
    found = answer(folder, tmp_path / "runs")
    assert found["unavailable"] is None and found["source"] == "reports"
    rows = {node["name"]: node for node in found["nodes"]}
    assert {name: node["state"] for name, node in rows.items()} == {
        "a": "accepted", "b": "accepted", "c": "accepted", "d": "absent", "e": "rejected",
    }  # fmt: skip
    assert rows["d"]["reason"].startswith("it sent nothing") and rows["e"]["reason"] and rows["a"]["reason"] == ""
    assert (rows["d"]["rejections"], rows["e"]["rejections"]) == (2, 2) and rows["a"]["last_rejected"] is None
    assert found["step"] == 150 and found["history"]["steps"] == [50, 100, 150]
    assert found["history"]["accepted"] == [[1, 1, 1, 0, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert rows["e"]["last_rejected"] == 150 and rows["a"]["loss"] == 1.0 and rows["e"]["loss"] is None
    assert found["failed_rounds"] == 0 and 0 < found["score"] < 1 and found["line"]
    json.dumps(found, allow_nan=False)


def test_failed_rounds_are_counted(tmp_path):
    exchange, folder = tmp_path / "group", node_of(tmp_path / "a", tmp_path / "group")
    nodes = {"a": honest, "b": missing_once, "c": missing_once}
    coordinator(exchange, max_retries=3).run(check=Play(exchange, nodes))
    found = answer(folder, tmp_path)
    assert found["failed_rounds"] == 1 and found["history"]["score"][1] == 0.0


def test_an_exchange_elsewhere_is_not_read(tmp_path):
    """A run folder may come from anyone, and name any folder of this machine or any bucket."""
    exchange, folder = tmp_path / "elsewhere", node_of(tmp_path / "runs" / "a", tmp_path / "elsewhere")
    coordinator(exchange).run(check=Play(exchange, dict.fromkeys("abc", honest)))
    found = answer(folder, tmp_path / "runs")
    assert found.keys() == {"unavailable"} and f"meets in {exchange}: name that folder" in found["unavailable"]
    assert answer(folder, tmp_path / "runs", exchange)["nodes"]
    (tmp_path / "runs" / "link").symlink_to(exchange)
    for odd in (tmp_path / "runs" / "link", f"{tmp_path}/runs/../elsewhere", f"{tmp_path}/runs2", "gs://theirs/group"):
        other = node_of(tmp_path / "runs" / str(abs(hash(str(odd)))), odd)
        assert "name that folder" in answer(other, tmp_path / "runs")["unavailable"], odd


@pytest.mark.parametrize(
    ("config", "why"),
    [("", "is no node"), ("GroupNode.exchange = @x()\n", "is no node"), ("GroupNode.exchange = 5\n", "is no node")],
)
def test_a_run_without_a_group(tmp_path, config, why):
    (tmp_path / "config.gin").write_text(config)
    assert why in answer(str(tmp_path), tmp_path)["unavailable"]


def test_a_group_that_has_not_begun(tmp_path):
    folder = node_of(tmp_path / "a", tmp_path / "group")
    (tmp_path / "group").mkdir()
    assert "has ended no round yet" in answer(folder, tmp_path)["unavailable"]


def test_reports_that_make_no_sense_are_shown_as_far_as_they_do():
    reports = [
        {"round": 1, "accepted": [1], "without": None},
        {"round": 2, "accepted": {"a": 5, "b": {"loss": "x"}}, "without": {"c": [1]}, "vote": 7, "score": {}},
    ]
    found = group_facts.as_table(reports, 10)
    assert [(node["name"], node["state"]) for node in found["nodes"]] == [
        ("a", "accepted"),
        ("b", "accepted"),
        ("c", "rejected"),
    ]
    assert found["failed_rounds"] == 2 and found["votes"] is None and found["history"]["accepted"][0] == [None] * 3


def test_votes_are_counted():
    found = group_facts.as_table(
        [{"round": 1, "accepted": {"a": {}}, "without": {}, "vote": {"approve": {"a": 1.0, "b": 0.9}, "without": {}}}],
        1,
    )
    assert found["votes"] == 2


def test_a_node_that_has_left_is_absent():
    reports = [
        {"round": 1, "accepted": {"a": {}, "b": {}}, "without": {}},
        {"round": 2, "accepted": {"a": {}}, "without": {}},
    ]
    left = group_facts.as_table(reports, 10)["nodes"][1]
    assert (left["name"], left["state"], left["reason"], left["rejections"]) == ("b", "absent", "", 0)


def made(folder, *rounds, every=1):
    exchange = Exchange(str(folder))
    exchange.publish(Agreed(1, "rounds/000001/model.safetensors", "", 0, every=every))
    for round_ in rounds:
        exchange.write_report(round_, {"round": round_, "accepted": {"a": {}}, "without": {}})
    return folder


def test_the_newest_rounds_are_shown_in_order(tmp_path, monkeypatch):
    """Their folders have seven digits from a million on."""
    monkeypatch.setattr(group_facts, "ROUNDS", 2)
    made(tmp_path / "group", 999_998, 999_999, 1_000_000)
    found = answer(node_of(tmp_path / "a", tmp_path / "group"), tmp_path)
    assert found["history"]["steps"] == [999_999, 1_000_000] and found["step"] == 1_000_000


def test_a_server_of_a_folder_that_is_a_link(tmp_path):
    made(tmp_path / "disk" / "group", 1)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    folder = node_of(tmp_path / "runs" / "a", tmp_path / "runs" / "group")
    assert answer(folder, tmp_path / "runs")["nodes"]


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_exchange_is_none(tmp_path, blank):
    assert "is no node of a group" in answer(node_of(tmp_path / "a", blank), "/")["unavailable"]


@pytest.mark.parametrize("name", ["rounds/000002", "rounds/000002/report.json", "agreed.json"])
def test_links_in_an_exchange_are_not_followed(tmp_path, name):
    elsewhere, group = made(tmp_path / "elsewhere", 1, 2), made(tmp_path / "runs" / "group", 1)
    Exchange(str(elsewhere)).write_report(2, {"round": 2, "accepted": {"SECRET": {}}, "without": {}})
    (group / name).parent.mkdir(exist_ok=True)
    (group / name).unlink(missing_ok=True)
    (group / name).symlink_to(elsewhere / name)
    found = answer(node_of(tmp_path / "runs" / "a", group), tmp_path / "runs")
    assert "SECRET" not in str(found) and ("is a link" in str(found["unavailable"])) == (name == "agreed.json")


def test_large_reports_are_skipped(tmp_path):
    group = made(tmp_path / "group", 1, 2, 3)
    (group / "rounds" / "000002" / "report.json").write_text(
        '{"round":2,"accepted":{},"without":{},"x":[' + "{}," * 90_000 + "{}]}"
    )
    (group / "rounds" / "000003" / "report.json").write_text(
        json.dumps({"round": 3, "accepted": {}, "without": {"b": "x" * (2 << 20)}})
    )
    found = answer(node_of(tmp_path / "a", group), tmp_path)
    assert found["history"]["steps"] == [1]


@pytest.mark.parametrize("every", [0, -5, 10**4000])
def test_steps_of_a_round_that_make_no_sense(tmp_path, every):
    found = answer(node_of(tmp_path / "a", made(tmp_path / "group", 7, every=every)), tmp_path)
    assert found["step"] == 7 or "is no record of a group" in found["unavailable"]
