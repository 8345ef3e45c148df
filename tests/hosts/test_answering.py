"""Answers of several processes are those of one: rollouts, samples, DPO's reference, evaluation, the harness."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import socket
import sys
import time

import jax
import numpy as np
import pytest

from capibara.interop import gin_of
from capibara.models import api
from capibara.training import run_folder

hosts = sys.modules["of_hosts_conftest"]
SCRIPT = hosts.HERE / "answering.py"


def _load():
    spec = importlib.util.spec_from_file_location("of_hosts_answering", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


answering = _load()
SHORT = ("rollouts", "readings", "evaluated")
# Only the first looks whether its files can be written; all watch each other.
ONLY_THE_FIRST_LOOKS = [{"code": 0, "watched": 1, "checks": 2}, {"code": 0, "watched": 1, "checks": 0}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy_tokenizer):
    """Data, and a run with large weights, so that one token stands out."""
    folder = tmp_path_factory.mktemp("answering")
    shutil.copytree(toy_tokenizer, folder / "tokenizer")
    answering.write_data(folder)
    (folder / "run").mkdir()
    params = jax.tree.map(lambda x: x * 3, jax.jit(api.build(answering.MODEL).init)(jax.random.key(1)))
    run_folder.save(str(folder / "run"), params, gin_of.run(answering.MODEL, str(folder / "run"), {}))
    return folder


@pytest.fixture(scope="module")
def pair(folder, nursery):
    """(name, parts, devices=1) -> what two processes find, by part: {part: [of process 0, of process 1]}."""

    def run(name, *parts, devices=1):
        two = hosts.Named(folder, 2, nursery)
        done = two.run(str(SCRIPT), str(devices), str(folder), name, *parts)
        assert [one.code for one in done] == [0, 0], [one.err[-3000:] for one in done]
        files = {part: [folder / f"{name}.{part}.{index}.json" for index in range(2)] for part in parts}
        return {part: [json.loads(path.read_text()) for path in paths] for part, paths in files.items()}

    return run


@pytest.fixture(scope="module")
def two(pair):
    return pair("two", *SHORT)


@pytest.fixture(scope="module")
def spoken(pair):
    return pair("spoken", "dialogues", "joint_dialogues", "wrong_dialogues")


@pytest.fixture
def alone(folder, monkeypatch):
    """Name of a part -> what this process finds."""
    monkeypatch.setattr(answering.joining, "join", lambda *_, **__: None)
    by_name = {part.__name__: part for part in answering.PARTS}
    return lambda part: json.loads(json.dumps(by_name[part](folder, "alone")))


def same_run(found, want):
    for kind in ("steps", "evaluations"):
        assert found[kind].keys() == want[kind].keys()
        for step, metrics in want[kind].items():
            for name in set(metrics) - {"step_s", "tokens_per_s", "data_wait_s", "rollout_s", "evaluate_s", "save_s"}:
                assert found[kind][step][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-5), (kind, step, name)
    assert found["samples"] == want["samples"]


def asked_once(found, want):
    """Every prompt was given to one engine, as often as a process alone gives it to its own."""
    counts = [sorted(map(tuple, one["asked"])) for one in found]
    assert sorted(itertools.chain(*counts)) == sorted(map(tuple, want["asked"]))
    assert all(len(one) > len(want["asked"]) // 3 for one in counts)  # each has its part of the work


def test_two_processes_answer_each_prompt_once_and_learn_as_one(two, alone):
    found, want = two["rollouts"], alone("rollouts")
    assert found[0]["tokens"] == found[1]["tokens"] == want["tokens"] and found[0]["answers"] == found[1]["answers"]
    same_run(found[0], want)
    assert list(want["steps"]) == ["1", "2"] and any(text for _, _, text in want["samples"])
    samples = [one for one in want["asked"] if isinstance(one, str)]
    for one in (*found, want):
        one["asked"] = [prompt for prompt in one["asked"] if not isinstance(prompt, str)]
    assert len(samples) == 2
    asked_once(found, want)


def test_two_processes_read_their_parts_of_the_documents_and_learn_as_one(two, alone):
    found, want = two["readings"], alone("readings")
    assert found[0]["tokens"] == found[1]["tokens"] == want["tokens"] and found[0]["answers"] == found[1]["answers"]
    same_run(found[0], want)
    asked_once(found, want)


@pytest.mark.heavy
@pytest.mark.parametrize("part", ["dialogues", "joint_dialogues"])
def test_two_processes_speak_with_an_environment_as_one(spoken, alone, part):
    found, want = spoken[part], alone(part)
    assert found[0]["tokens"] == found[1]["tokens"] == want["tokens"] and found[0]["answers"] == found[1]["answers"]
    same_run(found[0], want)
    assert (
        len({len(prompt) for prompt in want["asked"]}) > 8 and 0 < want["steps"]["1"]["reward"] < 3
    )  # of several turns
    assert sorted(found[0]["stepped"] + found[1]["stepped"]) == sorted(want["stepped"])
    assert all(len(one["stepped"]) > len(want["stepped"]) // 4 for one in found)
    if part == "dialogues":
        asked_once(found, want)


@pytest.mark.heavy
def test_an_environment_that_fails_in_one_process_ends_both_with_its_line(spoken):
    found = spoken["wrong_dialogues"]
    assert found[0] == found[1] and len(found[0]["errors"]) == 2
    assert "@Counting() answered 'text', must answer messages with the role" in found[0]["errors"][0]
    assert "must answer JSON values: Object of type set is not JSON serializable" in found[0]["errors"][1]


BROKEN = """
import dataclasses

import jax

from capibara.config import configurable
from capibara.strategies.environments.environment import Environment, Episode


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken(Environment):
    def begin(self, record):
        return {}[record["prompt"]] if jax.process_index() == 1 else Silent()


class Silent(Episode):
    def step(self, messages):
        return []


@configurable
def nothing(prompt, answer, record):
    return 0.0
"""


@pytest.mark.heavy
@pytest.mark.fault(65)
def test_a_fault_of_an_environment_in_one_process_ends_the_run_with_its_line(folder, nursery):
    (folder / "broken_tools.py").write_text(BROKEN)
    (folder / "broken.gin").write_text("import broken_tools\nGrpo.environment = @Broken()\n")
    files = ("models/tiny.gin", "tasks/prompts.gin", "runs/grpo.gin", f"{folder}/broken.gin")
    values = {"MODEL_DIR": f"'{folder}/broken'", "INIT_FROM": None, "TRAIN_STEPS": 2, "DecoderConfig.vocab_size": 384}
    values |= {"FILES": (f"{folder}/prompts.jsonl",), "TOKENIZER": f"'{folder}/tokenizer'", "REWARDS": "(@nothing,)"}
    values |= {"BATCH_SIZE": 16, "LENGTH": 64, "ANSWER_LENGTH": 32, "Evaluation.every": 0}
    flags = [*(f"--gin_file={name}" for name in files), *(f"--gin.{name}={value}" for name, value in values.items())]
    waiting, failed = hosts.Named(folder, 2, nursery).run("train", *flags, timeout_s=120)
    assert (waiting.code, failed.code) == (2, 2), (waiting, failed)
    for end in (waiting, failed):
        (line,) = (line for line in end.err.splitlines() if line.startswith("error: "))
        assert "broken_tools.py" in line and "KeyError" in line and "Traceback" not in end.err, end


@pytest.mark.heavy
def test_a_reward_that_differs_by_host_is_that_of_one_host(pair):
    found = pair("apart", "opinions")["opinions"]
    assert found[0]["tokens"] == found[1]["tokens"] and found[0]["answers"] == found[1]["answers"]


def test_predictions_of_two_processes_are_those_of_one_byte_by_byte(folder, two, alone):
    assert two["evaluated"] == ONLY_THE_FIRST_LOOKS and alone("evaluated") == ONLY_THE_FIRST_LOOKS[0]
    lines = (folder / "alone.jsonl").read_bytes()
    assert (folder / "two.jsonl").read_bytes() == lines and lines.count(b"\n") == 1 + 2 * 23 + 45
    found, want = (json.loads((folder / f"{name}.json").read_text()) for name in ("two", "alone"))
    for task in ("qa", "mc"):
        assert found["tasks"][task]["metrics"] == want["tasks"][task]["metrics"]


@pytest.mark.heavy
@pytest.mark.fault(33)
@pytest.mark.parametrize("killed", [1, 0])
def test_a_process_that_is_killed_ends_the_evaluation_with_a_line_that_names_it(folder, nursery, killed, tmp_path):
    lines = (folder / "qa.jsonl").read_text() * 400
    (tmp_path / "many.jsonl").write_text(lines)
    flags = ["--gin.Plan.batch_size=8", "--gin.Dataset.length=64", "--task=qa"]
    flags += [f"--model_dir={folder}/run", f"--gin_file={folder}/tasks.gin", f"--predictions={tmp_path}/answers.jsonl"]
    flags += [f"--gin.qa/EvalTask.files=('{tmp_path}/many.jsonl',)"]
    two = hosts.Named(tmp_path, 2, nursery)
    processes = [two.start(index, "evaluate", *flags) for index in range(2)]
    end_s = time.monotonic() + 100
    while not (answers := tmp_path / "answers.jsonl").exists() or answers.read_bytes().count(b"\n") < 9:
        assert time.monotonic() < end_s and processes[0].poll() is None, hosts.ends(processes, 5)
        time.sleep(0.02)
    processes[killed].kill()
    began_s = time.monotonic()
    left = hosts.ends(processes)[1 - killed]
    assert time.monotonic() - began_s < 30
    line = f"error: process {killed} on {socket.gethostname()} is gone: start the command again on every host\n"
    assert left.code == 75 and line in left.err and left.err.count("error: ") == 1, left


@pytest.mark.heavy
def test_what_is_left_of_a_file_of_predictions_is_answered_by_both(folder, pair, two):
    whole = (folder / "two.jsonl").read_bytes()
    for name, cut in (("text", whole[:700]), ("choice", whole[: whole.rindex(b'"mc", "example": 7')])):
        (folder / f"{name}.jsonl").write_bytes(cut)
        assert pair(name, "evaluated")["evaluated"] == ONLY_THE_FIRST_LOOKS
        assert (folder / f"{name}.jsonl").read_bytes() == whole


@pytest.mark.heavy
def test_the_reference_pass_and_the_harness_are_those_of_one(pair, alone):
    two = pair("more", "reference", "harness", "failure", "together")
    found, want = two["reference"], alone("reference")
    for split in ("train", "validation"):
        np.testing.assert_allclose(found[0][split], want[split], rtol=1e-5)
        assert np.isfinite(want[split]).all()
    same_run(found[0], want)
    assert two["harness"] == [alone("harness")] * 2 and two["harness"][0]["apart"]
    assert two["failure"][0] == two["failure"][1]
    assert "fails_on_one_host returned nan for an answer to" in two["failure"][0]["error"]
    found, want = two["together"], alone("together")
    assert found[0]["tokens"] == found[1]["tokens"] == want["tokens"]
    same_run(found[0], want)


@pytest.mark.heavy
def test_two_processes_learn_from_a_teacher_as_one(pair, alone):
    """From answers that the student and the teacher draw; each prompt is asked once."""
    found, want = pair("taught", "distilled")["distilled"], alone("distilled")
    same_run(found[0], want)
    assert {want["steps"][step]["on_policy"] for step in "1234"} == {0.0, 1.0}
    asked_once(found, want)


@pytest.mark.heavy
def test_two_processes_judge_the_tasks_of_a_mixture_as_one(pair, alone):
    """Each asks its share of the questions, and both have the metrics of all."""
    found, want = pair("judging", "judged")["judged"], alone("judged")
    same_run(found[0], want)
    assert {"lengths/length", "scores/score", "lengths/loss"} <= want["evaluations"]["2"].keys()
    assert sorted(map(tuple, found[0]["asked"] + found[1]["asked"])) == sorted(map(tuple, want["asked"]))
    assert len(want["asked"]) == 3 and {len(one["asked"]) for one in found} == {1, 2}


@pytest.mark.heavy
def test_each_process_generates_on_all_of_its_devices(pair, alone):
    two = pair("four", "meshes", "scores", devices=2)
    for of_process in two["scores"]:
        for kind, want in alone("scores").items():
            np.testing.assert_allclose(of_process[kind], want, rtol=1e-5)
    found, want = two["meshes"], alone("meshes")
    assert found[0]["tokens"] == found[1]["tokens"] == want["tokens"]
    same_run(found[0], want)
    asked_once(found, want)
