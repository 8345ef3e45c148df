"""A run that is a node of a group: it goes on from the agreed model, is interrupted, resumes, and comes late."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading

import jax
import numpy as np
import optax
import pytest

from capibara.checkpoints.manager import Checkpointing
from capibara.consensus.compression import Compression
from capibara.consensus.outer import OuterSgd
from capibara.consensus.voting import Ballot
from capibara.core import tree
from capibara.core.types import UserError
from capibara.models.api import Lora
from capibara.objectives.batches import Reporter
from capibara.sharding import Plan
from capibara.storage import hashing
from capibara.strategies.consensus import ConsensusConfig
from capibara.strategies.group import arrays
from capibara.strategies.group.coordinator import Coordinator
from capibara.strategies.group.exchange import Exchange, Note, Presence, as_json
from capibara.strategies.group.member import GroupNode
from capibara.training.base.adopted import Adopted
from capibara.training.base.options import Evaluation, InitWith
from capibara.training.methods.grouped import Grouped
from capibara.training.stability.anomalies import Anomalies


class Ended(Exception):
    pass


@contextlib.contextmanager
def coordinated(folder, check=lambda: None, **fields):
    """A coordinator of the group, in a thread."""
    config = Coordinator(exchange=str(folder), **{"num_nodes": 1, "rounds": 2, "poll_s": 0.01} | fields)
    ended = threading.Event()

    def checked():
        if ended.is_set():
            raise Ended
        check()

    def run():
        with contextlib.suppress(Ended, UserError):
            config.run(check=checked)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)
        assert not thread.is_alive()


def in_group(make_trainer, folder, **changes):
    own = {name: changes.pop(name) for name in ("compression", "timeout_s", "every") if name in changes}
    node = GroupNode(exchange=str(folder), name="a", **{"every": 4, "poll_s": 0.01} | own)
    return make_trainer(**{"steps": 8, "group": node, "plan": Plan(batch_size=8, fsdp=4, tensor=2)} | changes)


def named(params):
    return dict(zip(tree.path_names(params), jax.tree.leaves(params), strict=True))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_group_of_one_node_trains_as_the_run_alone(make_trainer, train, tmp_path):
    alone = train(make_trainer(steps=8, model_dir=str(tmp_path / "alone")))
    with coordinated(tmp_path / "x"):
        seen = train(in_group(make_trainer, tmp_path / "x"))
    assert seen.batches == alone.batches
    np.testing.assert_allclose([*seen.losses.values()], [*alone.losses.values()], rtol=1e-6)
    for one, other in zip(jax.tree.leaves(seen.state.opt_state), jax.tree.leaves(alone.state.opt_state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)
    lines = [line for line in seen.statuses if line.startswith("step")]
    assert lines[0] == "step 0: 1 nodes begin: a"
    assert [line.split(",")[0] for line in lines[1:]] == [
        "step 4: round 1 of 2: agreed by 1 nodes (a)",
        "step 8: round 2 of 2: agreed by 1 nodes (a)",
    ]
    (first, _) = Exchange(str(tmp_path / "x")).reports()
    about, tokens = first["accepted"]["a"], sum(seen.metrics[step]["tokens"] for step in range(1, 5))
    loss = sum(seen.losses[step] * seen.metrics[step]["tokens"] for step in range(1, 5)) / tokens
    assert about["tokens"] == tokens and about["loss"] == pytest.approx(loss, rel=1e-5)


def test_it_goes_on_from_the_agreed_model_with_its_own_moments(make_trainer, train, tmp_path):
    """A second node doubles what the first one does; what comes of both is the model of the next step."""
    exchange = Exchange(str(tmp_path / "x"))

    def other():
        agreed = exchange.agreed()
        number = 0 if agreed is None else agreed.round_ + 1
        if exchange.senders(number) == ["a"]:
            own = arrays.from_bytes(exchange.update(number, "a", exchange.note(number, "a"), 10**9))
            if agreed is not None:
                start = arrays.from_bytes(exchange.read_model(agreed))
                own = {name: x + (x - start[name]) for name, x in own.items()}
            data = arrays.to_bytes(own)
            exchange.send(number, "b", data, Note(hashing.hash_of(data), len(data), 1.0, 1.0, 4))

    with coordinated(tmp_path / "x", other, num_nodes=2, rounds=1, outer=OuterSgd(learning_rate=0.5)):
        trainer = in_group(make_trainer, tmp_path / "x", steps=4, checkpointing=Checkpointing(every=4))
        seen = train(trainer)
    agreed = arrays.from_bytes(exchange.read_model(exchange.agreed()))
    last, begun = named(seen.state.params), named(seen.started.params)
    for name, own in last.items():  # half of 1.5 times its way
        np.testing.assert_allclose(agreed[name], begun[name] + 0.75 * (own - begun[name]), atol=1e-6)
    again = train(dataclasses.replace(trainer, steps=4))  # restores what was saved after the round
    assert_equal(named(again.started.params), agreed)
    assert_equal(again.started.opt_state, seen.state.opt_state)


def test_interrupted_while_it_waits_it_resumes_bit_for_bit(make_trainer, train, tmp_path):
    momentum = dict(outer=OuterSgd(learning_rate=0.7, momentum=0.9))
    with coordinated(tmp_path / "y", **momentum):
        whole = train(in_group(make_trainer, tmp_path / "y", model_dir=str(tmp_path / "whole")))
    trainer = in_group(make_trainer, tmp_path / "x")
    exchange = Exchange(str(tmp_path / "x"))

    def dies():
        if (agreed := exchange.agreed()) is not None and agreed.round_ == 1:
            raise Ended

    with coordinated(tmp_path / "x", dies, **momentum):
        first = train(trainer, signal_at="round 2: waiting for the others, 0 s")  # the coordinator has ended
    assert (first.outcome.reason, first.outcome.step) == ("interrupted", 8)
    before = exchange.note(2, "a")
    assert before.loss == pytest.approx(np.mean([first.losses[step] for step in range(5, 9)]), rel=0.05)
    with coordinated(tmp_path / "x", **momentum, quality_threshold=0.5):
        second = train(trainer)
    assert exchange.note(2, "a") == before  # it was not sent again, without a loss
    assert second.start_step == 8 and not second.losses and second.outcome.reason == "finished"
    assert first.losses == whole.losses
    models = [arrays.from_bytes(e.read_model(e.agreed())) for e in (Exchange(str(tmp_path / n)) for n in "xy")]
    assert_equal(*models)


@pytest.mark.heavy
def test_who_comes_late_begins_with_the_agreed_model_at_its_step(make_trainer, train, tmp_path):
    with coordinated(tmp_path / "x", rounds=2):
        train(in_group(make_trainer, tmp_path / "x", model_dir=str(tmp_path / "early")))
    exchange = Exchange(str(tmp_path / "x"))
    with coordinated(tmp_path / "x", rounds=3):
        late = train(in_group(make_trainer, tmp_path / "x", seed=5, steps=12))
    assert sorted(late.losses) == [9, 10, 11, 12] and int(late.state.step) == 12
    assert any(line.startswith("step 8: ") and line.endswith("this node was at step 0") for line in late.statuses)
    first = late.losses[9]
    assert first < 0.8 * np.log(384)  # it is trained
    assert exchange.agreed().round_ == 3


def test_who_comes_late_saves_and_has_the_schedule_of_its_step(make_trainer, train, tmp_path):
    """A save is due where it comes in, before its first step."""
    with coordinated(tmp_path / "x", rounds=2):
        train(in_group(make_trainer, tmp_path / "x", model_dir=str(tmp_path / "early")))
    changes = dict(seed=5, ema_decay=0.9, checkpointing=Checkpointing(every=4))
    with coordinated(tmp_path / "x", rounds=3):
        late = train(in_group(make_trainer, tmp_path / "x", **changes, steps=12))
    assert late.checkpoints == [8, 12] and sorted(late.losses) == [9, 10, 11, 12]
    counts = [int(x.count) for x in jax.tree.leaves(late.state.opt_state, is_leaf=is_schedule) if is_schedule(x)]
    assert counts == [12]
    agreed = arrays.from_bytes(exchange_of(tmp_path).read_model(exchange_of(tmp_path).agreed()))
    for name, own in named(late.state.ema).items():  # near the agreed models, not the random beginning
        assert np.abs(own - agreed[name]).max() < 0.2
    # A finished group has nothing more for a new run, which ends at once with its model.
    done = train(in_group(make_trainer, tmp_path / "x", model_dir=str(tmp_path / "new"), steps=12, seed=6))
    assert not done.losses and done.outcome.step == 12


def is_schedule(x):
    return isinstance(x, optax.ScaleByScheduleState)


def exchange_of(folder):
    return Exchange(str(folder / "x"))


def test_a_group_that_has_ended_goes_on_with_a_new_coordinator(make_trainer, train, tmp_path):
    trainer = in_group(make_trainer, tmp_path / "x")
    config = Coordinator(exchange=str(tmp_path / "x"), num_nodes=1, rounds=2, poll_s=0.01)
    with coordinated(tmp_path / "x", rounds=1):
        train(dataclasses.replace(trainer, steps=4))
    exchange = exchange_of(tmp_path)
    exchange.publish(dataclasses.replace(exchange.agreed(), status="4 rounds in a row failed"))
    with pytest.raises(UserError, match="has ended: 4 rounds"):
        train(trainer)
    with coordinated(tmp_path / "x"):
        while exchange.agreed().status != "running":
            threading.Event().wait(0.01)
        assert train(trainer).outcome.reason == "finished"
    assert config.rounds == exchange.agreed().round_ == 2


def test_a_round_that_does_not_end_leaves_a_checkpoint(make_trainer, train, tmp_path):
    exchange = exchange_of(tmp_path)

    def dies():
        if (agreed := exchange.agreed()) is not None and agreed.round_ == 1:
            raise Ended

    trainer = in_group(make_trainer, tmp_path / "x", timeout_s=0.2)
    with coordinated(tmp_path / "x", dies), pytest.raises(UserError, match="round 2 did not end within"):
        train(trainer)
    with coordinated(tmp_path / "x"):
        second = train(trainer)
    assert second.start_step == 8 and not second.losses and second.outcome.reason == "finished"


@pytest.mark.heavy
def test_a_run_and_a_group_that_do_not_fit_say_so_at_once(make_trainer, train, tmp_path):
    with coordinated(tmp_path / "x", rounds=1):
        train(in_group(make_trainer, tmp_path / "x", steps=4))
    with pytest.raises(UserError, match=r"has finished after 1 rounds.*set Trainer.steps = 4"):
        train(in_group(make_trainer, tmp_path / "x"))
    with pytest.raises(UserError, match=r"GroupNode.every is 2, must be that of the group in .*: set 4"):
        train(in_group(make_trainer, tmp_path / "x", every=2, model_dir=str(tmp_path / "two")))
    with pytest.raises(
        UserError, match="this run is at the end of round 2, and the group in .* at round 0: name the exch"
    ):
        train(in_group(make_trainer, tmp_path / "empty"))


@pytest.mark.heavy
def test_two_runs_of_one_name_are_told(make_trainer, train, tmp_path):
    exchange = exchange_of(tmp_path)

    def other():
        if (agreed := exchange.agreed()) is not None and agreed.round_ == 0:
            exchange.arrive("a", Presence(0, "another"))

    with (
        coordinated(tmp_path / "x", other),
        pytest.raises(UserError, match="GroupNode.name is 'a', and another run has"),
    ):
        train(in_group(make_trainer, tmp_path / "x"))


def test_adapters_alone_are_sent(make_trainer, train, tmp_path):
    model = dataclasses.replace(make_trainer().model, lora=Lora(rank=2))
    train(make_trainer(steps=4, model_dir=str(tmp_path / "base"), checkpointing=Checkpointing(every=4)))
    with coordinated(tmp_path / "x", rounds=1):
        changes = dict(model=model, init_from=str(tmp_path / "base"), steps=4)
        train(in_group(make_trainer, tmp_path / "x", **changes))
    exchange = Exchange(str(tmp_path / "x"))
    sent = arrays.from_bytes(exchange.read_model(exchange.agreed()))
    assert sent and all("lora" in name for name in sent)


@pytest.mark.heavy
def test_few_bits_train_and_what_they_lose_is_sent_later(make_trainer, train, tmp_path):
    sizes, losses = {}, {}
    for bits in (32, 8):
        folder = tmp_path / str(bits)
        compression = None if bits == 32 else Compression(bits=bits)
        with coordinated(folder / "x", rounds=3):
            trainer = in_group(make_trainer, folder / "x", compression=compression, steps=12)
            losses[bits] = train(dataclasses.replace(trainer, model_dir=str(folder / "run"))).losses
        sizes[bits] = [report["bytes_received"] for report in Exchange(str(folder / "x")).reports()]
    assert sizes[8][2] < 0.3 * sizes[32][2]
    assert losses[8][12] == pytest.approx(losses[32][12], rel=0.02) and losses[8] != losses[32]


def record(folder, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    own = {"round_": 0, "model": "rounds/000000/model.safetensors", "digest": "", "size": 1, "status": "running"}
    (folder / "agreed.json").write_text(json.dumps(own | fields))


def test_what_is_wrong_with_a_group_is_one_line(make_trainer, train, tmp_path):
    folder = tmp_path / "x"
    with pytest.raises(UserError, match=r"round 0 did not end within GroupNode.timeout_s \(0.05\): is the coordinator"):
        train(in_group(make_trainer, folder, timeout_s=0.05))
    record(folder, status="2 rounds in a row failed")
    with pytest.raises(UserError, match="has ended: 2 rounds in a row failed"):
        train(in_group(make_trainer, folder))
    record(folder, size=10**12)
    with pytest.raises(UserError, match="has 1000000000000 bytes, must be at most"):
        train(in_group(make_trainer, folder))
    record(folder)
    with pytest.raises(UserError, match="cannot be read"):
        train(in_group(make_trainer, folder))
    data = arrays.to_bytes({"head": np.zeros((2, 2), np.float32)})
    exchange = Exchange(str(folder))
    exchange.publish(exchange.write_model(0, data))
    with pytest.raises(
        UserError, match="the model of round 0 in .*: its parameters are not the group's: .* is missing"
    ):
        train(in_group(make_trainer, folder))


class Ahead:
    """A group that is at some step already."""

    round_steps = 4

    def __init__(self, step):
        self.step = step

    def join(self, params, reporter):
        return self

    def meet(self, step, params, score):
        return Adopted(self.step, params, "they are ahead")


@pytest.mark.parametrize("step", [8, 9, 12])
def test_a_group_that_is_beyond_the_end_of_a_run_is_told(make_trainer, step):
    hooks = Grouped(Ahead(step)).hooks(make_trainer(steps=8), {}, print)
    hooks.begin({}, Reporter(print, print, print, print))
    assert [at for at in range(1, 9) if hooks.is_due(at, is_first=False)] == [4, 8] and hooks.is_due(1, is_first=True)
    if step == 8:
        assert hooks.adopt(4, {}, None).step == 8
        return
    with pytest.raises(UserError, match=rf"^the group is at step {step}, beyond Trainer.steps \(8\): raise it$"):
        hooks.adopt(4, {}, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 9}, r"Trainer.steps \(9\) must be a multiple of the 4 steps of a round \(@GroupNode\(\)\).*try 8"),
        ({"strategy": ConsensusConfig(every=4), "plan": Plan(batch_size=8, node=2)}, "Trainer.strategy is not supported"),
        ({"init_from": "x", "init_with": InitWith.STATE}, "init_with = 'state' is not supported with Trainer.group"),
        ({"anomalies": Anomalies(on_spike="roll_back"), "checkpointing": Checkpointing(every=2)}, "on_spike = 'roll_back'"),
    ],
)  # fmt: skip
def test_what_a_group_does_not_support_is_one_line(make_trainer, tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        in_group(make_trainer, tmp_path, **changes)


@pytest.mark.parametrize("fields", [{"name": "../b"}, {"name": ""}, {"every": 0}, {"poll_s": 0.0}, {"exchange": ""}])
def test_bad_options_of_a_node_are_one_line(fields):
    (name,) = fields
    with pytest.raises(UserError, match=f"GroupNode.{name} is"):
        GroupNode(**{"exchange": "x", "name": "a"} | fields)


class Others:
    """Nodes b, c and d, which send what a sends; some of them cast ballots."""

    def __init__(self, folder, scores):
        self.exchange, self.scores, self.seen = Exchange(str(folder)), scores, set()

    def __call__(self):
        agreed = self.exchange.agreed()
        number = 0 if agreed is None else agreed.round_ + 1
        if number not in self.seen and self.exchange.has_sent(number, "a"):
            self.seen.add(number)
            note = self.exchange.note(number, "a")
            for name in "bcd":
                self.exchange.send(number, name, self.exchange.update(number, "a", note, 10**9), note)
        proposal = self.exchange.record(f"rounds/{number:06d}/proposal.json")
        if proposal is not None and proposal.digest not in self.seen:
            self.seen.add(proposal.digest)
            for name, score in self.scores.items():
                ballot = as_json(Ballot(digest=proposal.digest, score=score))
                self.exchange.write(f"rounds/{number:06d}/ballots/{name}.json", ballot)


VOTES = {"num_nodes": 4, "voting_strategy": "byzantine", "quality_threshold": 0.5, "consensus_timeout_s": 60.0}


@pytest.mark.parametrize("lora", [False, True], ids=["all", "adapters"])
def test_a_node_votes_by_its_validation_loss(make_trainer, train, tmp_path, lora):
    """Two of the other three approve, so that the third vote is this node's."""
    changes = {"evaluation": Evaluation(every=100, max_batches=2)}
    if lora:
        train(make_trainer(steps=4, model_dir=str(tmp_path / "base"), checkpointing=Checkpointing(every=4)))
        model = dataclasses.replace(make_trainer().model, lora=Lora(rank=2))
        changes |= {"model": model, "init_from": str(tmp_path / "base")}
    with coordinated(tmp_path / "x", Others(tmp_path / "x", {"b": 1.0, "c": 1.0}), **VOTES):
        seen = train(in_group(make_trainer, tmp_path / "x", **changes))
    found = Exchange(str(tmp_path / "x")).reports()
    assert [report["vote"]["approve"] for report in found] == 2 * [["a", "b", "c"]]
    scores = [float(line.rpartition(" ")[2]) for line in seen.statuses if "the proposed model has the score" in line]
    assert len(scores) == 2 and all(0.5 <= score <= 1.0 for score in scores)


def test_a_node_that_resumes_votes_in_the_round_that_is_open(make_trainer, train, tmp_path):
    exchange, others = Exchange(str(tmp_path / "x")), Others(tmp_path / "x", {"b": 1.0, "c": 1.0})

    def ends():
        others()
        if (agreed := exchange.agreed()) is not None and agreed.round_ == 1:
            raise Ended

    trainer = in_group(make_trainer, tmp_path / "x", evaluation=Evaluation(every=100, max_batches=2))
    with coordinated(tmp_path / "x", ends, **VOTES):
        assert train(trainer, signal_at="round 2: waiting for the others, 0 s").outcome.reason == "interrupted"
    with coordinated(tmp_path / "x", others, **VOTES):
        assert train(trainer).outcome.step == 8
    assert [report["vote"]["approve"] for report in exchange.reports()] == 2 * [["a", "b", "c"]]
