"""The coordinator: rounds as on a mesh, whatever nodes send, and however often it is stopped."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest

from capibara.consensus.aggregation import Aggregation, CoordinateMedian, Mean, Monna, TrimmedMean
from capibara.consensus.compression import Compression
from capibara.consensus.outer import FedAdam, OuterSgd
from capibara.consensus.privacy import Privacy
from capibara.core.types import UserError
from capibara.storage import hashing
from capibara.strategies.group import arrays
from capibara.strategies.group.coordinator import Coordinator
from capibara.strategies.group.exchange import Exchange, Note, Presence

SHAPES = {"head": (3, 5), "layers/mlp/kernel": (2, 4, 3)}


def start():
    return {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in SHAPES.items()}


def moved(model, seed, size=0.1):
    rng = np.random.default_rng(seed)
    return {name: model[name] + size * rng.standard_normal(model[name].shape).astype(np.float32) for name in SHAPES}


def send(exchange, round_, name, model, *, loss=1.0, tokens=100.0, data=None, **note):
    data = arrays.to_bytes(model) if data is None else data
    facts = {"digest": hashing.hash_of(data), "size": len(data), "loss": loss, "tokens": tokens} | note
    exchange.send(round_, name, data, Note(**facts))


def honest(exchange, round_, name, model):
    send(exchange, round_, name, start() if model is None else moved(model, (round_, ord(name[0]))))


class Play:
    """Nodes that answer each agreed model once: name -> (exchange, round, name, the model or None) -> None."""

    def __init__(self, folder, nodes):
        self.exchange, self.nodes, self.sent = Exchange(str(folder)), nodes, set()

    def __call__(self):
        agreed = self.exchange.agreed()
        round_ = 0 if agreed is None else agreed.round_ + 1
        model = None if agreed is None else arrays.from_bytes(self.exchange.read_model(agreed))
        for name, node in self.nodes.items():
            if (name, round_) not in self.sent:
                self.sent.add((name, round_))
                node(self.exchange, round_, name, model)


def coordinator(folder, **fields):
    own = {"num_nodes": 3, "rounds": 3, "poll_s": 0.001, "grace_s": 0.05, "consensus_timeout_s": 0.3}
    return Coordinator(exchange=str(folder), **own | fields)


def model_of(folder):
    exchange = Exchange(str(folder))
    return arrays.from_bytes(exchange.read_model(exchange.agreed()))


def reports(folder):
    return Exchange(str(folder)).reports()


def three(**others):
    return {"a": honest, "b": honest, "c": honest} | others


def test_rounds_are_outer_steps_with_the_mean_of_the_nodes(tmp_path):
    lines = []
    config = coordinator(tmp_path, outer=OuterSgd(learning_rate=0.7, momentum=0.9))
    said = config.run(lines.append, Play(tmp_path, three()))
    assert said.startswith("finished after 3 rounds") and Exchange(str(tmp_path)).agreed().status == "finished"
    model, momentum = start(), {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for round_ in (1, 2, 3):
        updates = [moved(model, (round_, ord(name))) for name in "abc"]
        for name in model:
            gradient = model[name] - np.mean([update[name] for update in updates], axis=0)
            momentum[name] = gradient + 0.9 * momentum[name]
            model[name] = (model[name] - 0.7 * (gradient + 0.9 * momentum[name])).astype(np.float32)
    for name, found in model_of(tmp_path).items():
        np.testing.assert_allclose(found, model[name], atol=1e-5, rtol=0)
    assert lines[0] == "3 nodes begin: a, b, c" and "agreed by 3 nodes (a, b, c), consensus score 1.00" in lines[1]
    assert [report["round"] for report in reports(tmp_path)] == [1, 2, 3]
    for report in reports(tmp_path):
        assert report["accepted"].keys() == {"a", "b", "c"} and not report["without"]
        assert report["bytes_received"] == 3 * len(arrays.to_bytes(start()))


def garbage(kind):
    """A node that begins well and then sends garbage of a kind."""

    def node(exchange, round_, name, model):
        if model is None:
            return honest(exchange, round_, name, model)
        bad = moved(model, 1)
        if kind == "no file":
            return send(exchange, round_, name, bad, data=b"\x07" * 300)
        if kind == "pickle":
            return send(exchange, round_, name, bad, data=b"\x80\x04cos\nsystem\n.")
        if kind == "header":
            return send(exchange, round_, name, bad, data=(2**62).to_bytes(8, "little") + b"{}")
        if kind == "nan":
            bad["head"][1, 2] = np.nan
        if kind == "infinite":
            bad["head"][:] = np.inf
        if kind == "huge":
            bad = {name: x * 1e30 for name, x in bad.items()}
        if kind == "large":
            bad = moved(model, 1, size=100.0)
        if kind == "missing":
            del bad["head"]
        if kind == "unknown":
            bad["tail"] = bad["head"]
        if kind == "shape":
            bad["head"] = bad["head"].T.copy()
        if kind == "dtype":
            bad["head"] = bad["head"].astype(np.float64)
        if kind == "loss":
            return send(exchange, round_, name, bad, loss=float("nan"), tokens=0.0)
        if kind == "tokens":
            return send(exchange, round_, name, bad, tokens=-5.0)
        if kind == "hash":
            return send(exchange, round_, name, bad, digest="0" * 32)
        if kind == "size":
            return send(exchange, round_, name, bad, size=10**13)
        if kind == "short":
            return send(exchange, round_, name, bad, size=7)
        if kind == "bits":
            return send(exchange, round_, name, bad, bits=3, block=256)
        if kind == "codes":
            return send(exchange, round_, name, bad, bits=8, block=256)
        if kind == "note":
            send(exchange, round_, name, bad)
            (exchange._folder / f"rounds/{round_:06d}/updates/{name}.json").write_text('{"digest": [1]}')
            return None
        return send(exchange, round_, name, bad)

    return node


REASONS = {
    "no file": "it is no safetensors file",
    "pickle": "it is no safetensors file",
    "header": "it is no safetensors file",
    "nan": "its parameters are not finite",
    "infinite": "its parameters are not finite",
    "huge": "the norm of its update",
    "large": "is above 10 times the median",
    "missing": "head is missing, 1 of 2 differ",
    "unknown": "'tail' is unknown, 1 of 2 differ",
    "shape": "its head has shape (5, 3) and dtype float32, must be (3, 5)",
    "dtype": "dtype float64, must be (3, 5) and float32",
    "loss": "it made no update: its loss or gradients were never finite",
    "tokens": "its note has size",
    "hash": "its update is corrupted",
    "size": "its update has 10000000000000 bytes, must be at most",
    "short": "its update",
    "bits": "Compression.bits is 3",
    "codes": "its parameters are not the group's",
    "note": "its note is not one",
}


@pytest.mark.parametrize("kind", REASONS)
def test_garbage_has_no_part_and_is_named_with_the_reason(tmp_path, kind):
    nodes = three(d=garbage(kind))
    coordinator(tmp_path, num_nodes=4, rounds=2, consensus_threshold=0.7).run(check=Play(tmp_path, nodes))
    for report in reports(tmp_path):
        assert report["accepted"].keys() == {"a", "b", "c"}
        assert REASONS[kind] in report["without"]["d"], report["without"]
    without = tmp_path / "without"
    coordinator(without, rounds=2).run(check=Play(without, three()))
    for name, found in model_of(tmp_path).items():
        np.testing.assert_array_equal(found, model_of(without)[name])


def test_a_finite_lie_does_not_move_a_robust_rule(tmp_path):
    def liar(exchange, round_, name, model):
        send(exchange, round_, name, start() if model is None else moved(model, 3, size=-0.5))

    robust = Aggregation(rule=CoordinateMedian(), faults=1)
    config = coordinator(tmp_path, num_nodes=4, rounds=1, aggregation=robust, quorum=3)
    config.run(check=Play(tmp_path, three(d=liar)))
    updates = [moved(start(), (1, ord(name)))["head"] for name in "abc"]
    found = model_of(tmp_path)["head"]
    assert np.all(found >= np.min(updates, axis=0)) and np.all(found <= np.max(updates, axis=0))
    assert reports(tmp_path)[0]["spare_faults"] == 1


def test_a_node_of_low_quality_has_no_part_until_it_is_good_again(tmp_path):
    def learner(exchange, round_, name, model):
        send(exchange, round_, name, start() if model is None else moved(model, 9), loss=3.0 if round_ < 2 else 1.0)

    config = coordinator(tmp_path, num_nodes=4, rounds=3, quality_threshold=0.9)
    config.run(check=Play(tmp_path, three(d=learner)))
    first, *later = reports(tmp_path)
    assert first["without"]["d"] == "its quality 0.14 is below 0.9" and first["score"] == 0.75
    assert all("d" in report["accepted"] for report in later)


def test_a_node_that_is_gone_is_waited_for_once_and_comes_back(tmp_path):
    def away(exchange, round_, name, model):
        if round_ != 2 and round_ != 3:
            honest(exchange, round_, name, model)

    config = coordinator(tmp_path, num_nodes=4, rounds=5, grace_s=1.5, consensus_timeout_s=30.0)
    config.run(check=Play(tmp_path, three(d=away)))
    found = reports(tmp_path)
    assert "it sent nothing within" in found[1]["without"]["d"] and found[1]["seconds"] >= 1.5
    assert found[2]["seconds"] < 1.5 and "d" in found[2]["without"]  # nobody waits for it any more
    assert found[1]["score"] == 0.75 and found[2]["score"] == 1.0
    assert any("d" in report["accepted"] for report in found[3:])


def test_too_few_updates_fail_the_round_and_too_many_such_rounds_end_the_group(tmp_path):
    def leaves(exchange, round_, name, model):
        if round_ < 2:
            honest(exchange, round_, name, model)

    nodes = {"a": honest, "b": leaves, "c": leaves}
    config = coordinator(tmp_path, max_retries=1)
    with pytest.raises(UserError, match="2 rounds in a row failed.*1 nodes have sent.*quorum.*b has no part: it sent"):
        config.run(check=Play(tmp_path, nodes))
    found = reports(tmp_path)
    assert [report["succeeded"] for report in found] == [True, False, False]
    agreed = Exchange(str(tmp_path)).agreed()
    assert agreed.status.startswith("2 rounds in a row failed") and agreed.model == "rounds/000001/model.safetensors"
    # Once they are back the coordinator goes on from the last agreed model.
    config.run(check=Play(tmp_path, three()))
    assert Exchange(str(tmp_path)).agreed().status == "finished"


class Stopped(Exception):
    pass


@pytest.mark.parametrize("outer", [OuterSgd(learning_rate=0.7, momentum=0.9), FedAdam()], ids=["momentum", "adam"])
def test_a_coordinator_that_is_stopped_anywhere_resumes_bit_for_bit(tmp_path, monkeypatch, outer):
    whole = tmp_path / "whole"
    coordinator(whole, outer=outer).run(check=Play(whole, three()))
    for stop_at in range(1, 12):
        folder, writes = tmp_path / str(stop_at), [0]
        write = Exchange.write

        def counted(self, name, data):
            if "updates/" not in name:
                writes[0] += 1
                if writes[0] == stop_at:
                    raise Stopped
            write(self, name, data)

        with monkeypatch.context() as patched:
            patched.setattr(Exchange, "write", counted)
            with pytest.raises(Stopped):
                coordinator(folder, outer=outer).run(check=Play(folder, three()))
        coordinator(folder, outer=outer).run(check=Play(folder, three()))
        for name, found in model_of(folder).items():
            np.testing.assert_array_equal(found, model_of(whole)[name])
        assert [one["accepted"] for one in reports(folder)] == [one["accepted"] for one in reports(whole)]


def test_few_bits_are_sent_and_decoded(tmp_path):
    compression = Compression(bits=8)

    def node(exchange, round_, name, model):
        if model is None:
            return honest(exchange, round_, name, model)
        own = moved(model, (round_, ord(name)))
        gradient = {key: model[key] - own[key] for key in model}
        packed, lost = arrays.compressed(compression, gradient, {key: np.zeros_like(x) for key, x in gradient.items()})
        assert max(np.abs(x).max() for x in lost.values()) > 0
        return send(exchange, round_, name, {}, data=arrays.to_bytes(packed.arrays), bits=8, block=packed.block)

    coordinator(tmp_path, rounds=1).run(check=Play(tmp_path, dict.fromkeys("abc", node)))
    for name, found in model_of(tmp_path).items():
        want = np.mean([moved(start(), (1, ord(node)))[name] for node in "abc"], axis=0)
        np.testing.assert_allclose(found, want, atol=0.3 / 127, rtol=0)
        assert np.any(found != want)


def test_a_privacy_budget_stops_the_group_before_it_is_exceeded(tmp_path):
    privacy = Privacy(clip_norm=0.01, noise_multiplier=8.0, budget=1.0, accounting="rdp")
    lines = []
    config = coordinator(tmp_path, rounds=50, privacy=privacy)
    said = config.run(lines.append, Play(tmp_path, three()))
    most = privacy.releases_within()
    assert 1 < most < 50 and privacy.epsilon(most) <= 1.0 < privacy.epsilon(most + 1)
    found = [report["epsilon"] for report in reports(tmp_path)]
    assert found == [privacy.epsilon(number) for number in range(1, most + 1)]
    assert said.startswith(
        f"the privacy budget is spent: epsilon {found[-1]:.3g} after {most} rounds, of Privacy.budget 1"
    )
    assert Exchange(str(tmp_path)).agreed().status.startswith("its privacy budget is spent")
    assert lines[1].startswith("warning: the noise of a round has the norm") and "epsilon" in lines[2]
    # Each round moves by the noise and by no more than the clipped updates.
    moves = [np.abs(x - start()[name]).max() for name, x in model_of(tmp_path).items()]
    assert 0 < max(moves) < most * (0.01 + 6 * 8 * 0.01 / 3)
    again = coordinator(tmp_path, rounds=50, privacy=privacy)
    assert again.run(check=Play(tmp_path, three())) == said  # nothing more is released
    assert len(reports(tmp_path)) == most


def test_privacy_needs_a_mean_and_a_budget_for_one_round(tmp_path):
    privacy = Privacy(clip_norm=1.0, noise_multiplier=0.1, budget=1.0, accounting="rdp")
    with pytest.raises(UserError, match="Coordinator.privacy needs a mean"):
        coordinator(tmp_path, privacy=privacy, aggregation=Aggregation(rule=CoordinateMedian()))
    with pytest.raises(UserError, match="quality_threshold reveals"):
        coordinator(tmp_path, privacy=privacy, quality_threshold=0.5)
    with pytest.raises(UserError, match="the first round costs epsilon"):
        coordinator(tmp_path, privacy=privacy).run(check=Play(tmp_path, three()))
    assert not reports(tmp_path)


def test_nodes_that_begin_with_other_weights_are_named(tmp_path):
    def other(exchange, round_, name, model):
        send(exchange, round_, name, moved(start(), 7) if model is None else moved(model, 8))

    lines = []
    coordinator(tmp_path, rounds=1).run(lines.append, Play(tmp_path, {"a": honest, "b": other, "c": honest}))
    assert (
        lines[0] == "2 nodes begin: a, c; b has no part: it begins with other weights, or has another GroupNode.every"
    )
    assert "agreed by 3 nodes" in lines[1]  # it has gone on from the agreed ones
    folder = tmp_path / "more"
    with pytest.raises(UserError, match="1 nodes begin with the same weights, must be at least the quorum"):
        coordinator(folder).run(check=Play(folder, {"a": honest, "b": other}))


def test_a_quorum_counts_nodes_that_have_a_part(tmp_path):
    nodes = {"a": honest, "b": honest, "c": garbage("nan")}
    with pytest.raises(
        UserError, match=r"2 nodes have a part, must be at least the quorum \(3\).*c has no part: its param"
    ):
        coordinator(tmp_path, quorum=3, max_retries=0).run(check=Play(tmp_path, nodes))


def test_a_stranger_has_no_part(tmp_path):
    config = coordinator(tmp_path, nodes=("a", "b", "c"), rounds=1)
    config.run(check=Play(tmp_path, three(eve=honest)))
    (report,) = reports(tmp_path)
    assert report["without"] == {"eve": "it is none of the group's nodes (a, b, c)"}


def test_a_restart_admits_no_stranger(tmp_path):
    for rounds in (1, 2):
        coordinator(tmp_path, nodes=("a", "b", "c"), rounds=rounds).run(check=Play(tmp_path, three(eve=honest)))
    assert all("none of the group's nodes" in report["without"]["eve"] for report in reports(tmp_path))


def test_what_lies_about_its_numbers_or_links_to_itself_is_rejected(tmp_path):
    def long(exchange, round_, name, model):
        honest(exchange, round_, name, model)
        path = tmp_path / f"rounds/{round_:06d}/updates/{name}.json"
        path.write_text(path.read_text().replace("100.0", "1" + "0" * 350))
        (path.parent / "x.json").symlink_to("x.json")

    coordinator(tmp_path, num_nodes=4, rounds=1).run(check=Play(tmp_path, three(d=long)))
    assert "its note is not one" in reports(tmp_path)[0]["without"]["d"]


def test_a_file_that_is_being_replaced_is_read_again(tmp_path):
    """The new update stands beside the old note for one look."""

    def replaced(exchange, round_, name, model):
        honest(exchange, round_, name, model)
        if round_ == 1:
            path = tmp_path / f"rounds/{round_:06d}/updates/{name}.json"
            right.append(path.read_bytes())
            path.write_bytes(right[0].replace(b'"digest": "', b'"digest": "0'))
            later.append(path)

    later, right = [], []
    play = Play(tmp_path, three(d=replaced))

    def check():
        if later:  # after one look
            later.pop().write_bytes(right[0])
        play()

    coordinator(tmp_path, num_nodes=4, rounds=1, grace_s=5.0).run(check=check)
    assert reports(tmp_path)[0]["accepted"].keys() == set("abcd")


def test_a_late_node_that_has_gone_on_from_the_agreed_model_is_waited_for(tmp_path):
    """It has no part in round 1, for which it is late; in round 2 it sends after the others, within their grace."""
    exchange = Exchange(str(tmp_path))
    sent_s: dict[int, float] = {}

    def late(exchange, round_, name, model):
        if round_ == 0:
            honest(exchange, round_, name, model)
        elif round_ == 2:
            exchange.arrive(name, Presence(1, "run"))
            sent_s[2] = time.monotonic()

    play = Play(tmp_path, three(d=late))

    def check():
        play()
        if 2 in sent_s and time.monotonic() - sent_s[2] > 0.3 and ("d", 2) not in done:
            done.add(("d", 2))
            honest(exchange, 2, "d", arrays.from_bytes(exchange.read_model(exchange.agreed())))

    done: set = set()
    coordinator(tmp_path, num_nodes=4, rounds=2, grace_s=2.0, consensus_timeout_s=30.0).run(check=check)
    first, second = reports(tmp_path)
    assert "d" in first["without"] and "d" in second["accepted"]


def test_a_group_without_its_record_is_not_begun_again(tmp_path):
    coordinator(tmp_path, rounds=1).run(check=Play(tmp_path, three()))
    (tmp_path / "agreed.json").unlink()
    with pytest.raises(UserError, match="has reports of rounds and no agreed.json: restore it"):
        coordinator(tmp_path, rounds=2).run(check=Play(tmp_path, three()))


def test_another_outer_optimizer_or_a_corrupted_state_is_one_line(tmp_path):
    coordinator(tmp_path, rounds=1).run(check=Play(tmp_path, three()))
    with pytest.raises(UserError, match="is that of another Coordinator.outer than FedAdam"):
        coordinator(tmp_path, rounds=2, outer=FedAdam()).run(check=Play(tmp_path, three()))
    (tmp_path / "rounds/000001/outer.safetensors").write_bytes(b"\0" * 99)
    (tmp_path / "rounds/000001/report.json").write_text("{")
    with pytest.raises(UserError, match=r"outer\.safetensors is corrupted"):
        coordinator(tmp_path, rounds=2).run(check=Play(tmp_path, three()))


def test_an_exchange_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="the exchange .* cannot be used"):
        coordinator(tmp_path / "x").run()


def test_a_node_with_other_rounds_is_rejected(tmp_path):
    def other(exchange, round_, name, model):
        send(exchange, round_, name, start() if model is None else moved(model, 1), every=2)

    def four(exchange, round_, name, model):
        send(exchange, round_, name, start() if model is None else moved(model, 1), every=4)

    coordinator(tmp_path, rounds=1).run(check=Play(tmp_path, {"a": four, "b": other, "c": four}))
    assert reports(tmp_path)[0]["without"]["b"] == "its rounds have 2 steps, the group's 4: set GroupNode.every"


def test_a_node_whose_loss_is_not_known_has_a_part(tmp_path):
    def restarted(exchange, round_, name, model):
        send(exchange, round_, name, start() if model is None else moved(model, 1), loss=float("nan"), tokens=1.0)

    config = coordinator(tmp_path, rounds=1, quality_threshold=0.9)
    config.run(check=Play(tmp_path, {"a": honest, "b": honest, "c": restarted}))
    assert reports(tmp_path)[0]["accepted"]["c"] | {"norm": 0, "distance": 0} == {
        "distance": 0, "quality": 1.0, "loss": None, "tokens": 1.0, "norm": 0, "bytes": len(arrays.to_bytes(start())),
    }  # fmt: skip


def test_old_rounds_are_removed_and_their_reports_kept(tmp_path):
    coordinator(tmp_path, rounds=5).run(check=Play(tmp_path, three()))
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors"))
    assert {name.split("/")[1] for name in kept} == {"000004", "000005"}
    assert [report["round"] for report in reports(tmp_path)] == [1, 2, 3, 4, 5]
    assert not (tmp_path / "lease.json").exists()


def test_two_coordinators_do_not_write_to_one_exchange(tmp_path):
    def second():
        with pytest.raises(UserError, match="another coordinator has .*process "):
            coordinator(tmp_path).run()
        raise Stopped

    with pytest.raises(Stopped):
        coordinator(tmp_path).run(check=second)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is no record of a group"),
        (b'{"round_": -1, "model": "rounds/000001/model.safetensors", "digest": "", "size": 1}', "round or model"),
        (b'{"round_": 1, "model": "../../etc/passwd", "digest": "", "size": 1}', "round or model"),
        (b'{"round_": 1, "model": "rounds/000001/model.safetensors", "digest": "", "size": 1}', "cannot be read"),
        (b'{"round_": true, "model": "x", "digest": "", "size": 1}', "round_ is True"),
        (b'{"round_": 1}', "model is missing"),
        (b'{"round_": 1, "more": 1}', "other fields"),
    ],
)
def test_a_record_that_lies_is_one_line(tmp_path, content, said):
    (tmp_path / "agreed.json").write_bytes(content)
    with pytest.raises(UserError, match=said):
        coordinator(tmp_path).run()


def test_a_corrupted_model_is_refused(tmp_path):
    coordinator(tmp_path, rounds=1).run(check=Play(tmp_path, three()))
    path = tmp_path / "rounds/000001/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"model\.safetensors is corrupted"):
        coordinator(tmp_path).run()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_nodes": 0}, "num_nodes is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"quorum": 4}, "quorum is 4, must be from 1 to num_nodes"),
        ({"quorum": 0}, "quorum is 0"),
        ({"nodes": ("a", "b")}, "nodes has 2 names, must be num_nodes"),
        ({"nodes": ("a", "b", "../c")}, "a name in Coordinator.nodes is '../c'"),
        ({"grace_s": 0.0}, "grace_s is 0.0"),
        ({"consensus_timeout_s": float("inf")}, "consensus_timeout_s is inf"),
        ({"norm_limit": 1.0}, "norm_limit is 1.0"),
        ({"consensus_threshold": 0.0}, "Coordinator.consensus_threshold is 0.0"),
        ({"exchange": " "}, "exchange is empty"),
        (
            {"aggregation": Aggregation(rule=CoordinateMedian(), faults=1), "quorum": 2},
            "at most 0 of the 2 nodes of the quo",
        ),
        ({"aggregation": Aggregation(rule=TrimmedMean(), faults=2)}, "faults is 2, must be at most 1 of 3"),
        ({"aggregation": Aggregation(rule=Monna(pivot=2))}, "rule is Monna, whose pivot may be missing"),
    ],
)
def test_bad_options_are_one_line(tmp_path, fields, said):
    with pytest.raises(UserError, match=said) as caught:
        Coordinator(**{"exchange": str(tmp_path), "num_nodes": 3, "rounds": 3, **fields})
    assert "\n" not in str(caught.value)


def test_a_report_is_json_with_what_each_node_sent(tmp_path):
    coordinator(tmp_path, rounds=1, aggregation=Aggregation(rule=Mean())).run(check=Play(tmp_path, three()))
    report = json.loads((tmp_path / "rounds/000001/report.json").read_text())
    about = report["accepted"]["a"]
    want = np.sqrt(sum(np.sum((moved(start(), (1, 97))[name] - x) ** 2) for name, x in start().items()))
    assert about["norm"] == pytest.approx(want, rel=1e-4)
    assert (about["loss"], about["tokens"], about["quality"]) == (1.0, 100.0, 1.0)
    assert dataclasses.is_dataclass(Note) and report["succeeded"] is True
