"""Two processes serve and infer as one device does: process 0 answers, the other follows it to its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from capibara.interop import gin_of
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.training import run_folder

hosts = sys.modules["of_hosts_conftest"]
MODEL = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
PROMPTS, TOKENS = ["def f", "import numpy", "class A", "x = 1"], 24
SMALL = ("--gin.Dataset.length=64", "--gin.EngineConfig.slots=2", "--gin.EngineConfig.prefix_cache_mib=0")
SERVE = (*SMALL, "--port=0", "--gin.ServerConfig.warm_up=False", "--gin.EngineConfig.decode_steps=1")
MESHES = ["data", "tensor"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with large weights, so that one token stands out, and the greedy texts of one device."""
    folder = tmp_path_factory.mktemp("following") / "run"
    folder.mkdir()
    model = api.build(MODEL)
    params = jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(1)))
    run_folder.save(str(folder), params, gin_of.run(MODEL, str(folder), {}))
    return folder, alone(Sampling(temperature=0.0, max_new_tokens=TOKENS))


def alone(sampling):
    """The texts of one device."""
    model = api.build(MODEL)
    params = jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(1)))
    engine = Engine(model, params, ByteVocabulary(), 64, EngineConfig(slots=2, prefix_cache_mib=0))
    streams = [engine.submit(prompt, sampling) for prompt in PROMPTS]
    return dict(zip(PROMPTS, [stream.result().text for stream in streams]))


class Pair:
    """A service of two processes of one device each."""

    def __init__(self, folder, nursery, mesh):
        two = hosts.Named(folder.parent, 2, nursery)
        args = (f"--model_dir={folder}", *SERVE, f"--gin.ServingMesh.{mesh}=2")
        self.processes = [two.start(index, "serve", *args) for index in range(2)]
        end_s = time.monotonic() + 120
        while " is at " not in self.processes[0].said():
            assert time.monotonic() < end_s and self.processes[0].poll() is None, hosts.ends(self.processes, 1)
            time.sleep(0.05)
        self.url = self.processes[0].said().split(" is at ")[1].strip()

    def ask(self, prompt, tokens=TOKENS, **more):
        """An open answer."""
        wanted = {"model": "run", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        head = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/completions", json.dumps(wanted).encode(), head)
        return urllib.request.urlopen(asked, timeout=60)

    def text(self, prompt):
        with self.ask(prompt) as answer:
            return json.load(answer)["choices"][0]["text"]

    def ends(self, timeout_s=60):
        return hosts.ends(self.processes, timeout_s)


@pytest.fixture
def pair(run, nursery):
    with contextlib.ExitStack() as stack:

        def start(mesh):
            made = Pair(run[0], nursery, mesh)
            for process in made.processes:
                stack.callback(process.kill)
            return made

        yield start


def answers_as_one_device(pair, texts):
    """Some at once, one that nobody waits for, and one after it."""
    with pair.ask("def f", 58, stream=True) as dropped:
        assert dropped.readline()
    with ThreadPoolExecutor(4) as pool:
        assert dict(zip(PROMPTS, pool.map(pair.text, PROMPTS))) == texts
    assert len(set(texts.values())) == len(PROMPTS)


def errors(end):
    return [line for line in end.err.splitlines() if not line.startswith("warning: no chat: ")]


def ended_well(ends):
    """And process 0 alone has said anything."""
    assert [(one.code, errors(one)) for one in ends] == [(0, [])] * 2, ends
    assert ends[1].err == "" and [line for line in ends[1].out.splitlines() if "[Gloo]" not in line] == []


def test_two_processes_answer_as_one_device(run, pair):
    two = pair("tensor")
    answers_as_one_device(two, run[1])
    two.processes[0].send_signal(signal.SIGTERM)
    ended_well(two.ends())


@pytest.mark.heavy
def test_rows_on_two_processes_are_those_of_one_device_and_any_of_them_is_signalled(run, pair):
    two = pair("data")
    answers_as_one_device(two, run[1])
    with two.ask("def f", 58, stream=True) as answer:
        answer.readline()
        two.processes[1].send_signal(signal.SIGTERM)
        assert b"[DONE]" in answer.read()  # it comes to its end
    ended_well(two.ends())


@pytest.mark.heavy
@pytest.mark.fault(33)
@pytest.mark.parametrize("killed", [1, 0])
def test_a_process_that_is_killed_ends_the_service_with_a_line_that_names_it(pair, killed):
    two = pair("tensor")
    with two.ask("def f", 58, stream=True) as answer:
        answer.readline()
        two.processes[killed].kill()
        began_s = time.monotonic()
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert b"another host is gone" in answer.read() and killed == 1
        assert time.monotonic() - began_s < 5
    ends = two.ends(40)
    left = ends[1 - killed]
    assert ends[killed].code == -signal.SIGKILL
    assert left.code == 75
    said = f"error: process {killed} on {socket.gethostname()} is gone: start the command again on every host"
    assert said in errors(left) and (killed == 0 or errors(left) == [said])


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", MESHES)
def test_two_processes_infer_as_one_device(run, nursery, mesh, tmp_path):
    folder, texts = run
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    greedy = ("--gin.Sampling.temperature=0.0", f"--gin.Sampling.max_new_tokens={TOKENS}")
    given = (f"--model_dir={folder}", *SMALL, *greedy, f"--gin.ServingMesh.{mesh}=2")
    files = (f"--prompts={tmp_path}/prompts.txt", f"--out={tmp_path}/texts.jsonl")
    for more in (files, ("--prompt=def f",)):
        done = hosts.Named(tmp_path, 2, nursery).run("infer", *given, *more)
        assert [one.code for one in done] == [0, 0], [one.err[-2000:] for one in done]
        assert [line for line in done[1].out.splitlines() if "[Gloo]" not in line] == []
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert {line["prompt"]: line["text"] for line in lines} == texts
    assert f"def f{texts['def f']}" in done[0].out


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", MESHES)
def test_two_processes_search_as_one_device(run, nursery, mesh, tmp_path):
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    beams = ("--gin.Sampling.beams=@BeamSearch()", "--gin.BeamSearch.num_decodes=3", "--gin.Sampling.max_new_tokens=8")
    files = (f"--prompts={tmp_path}/prompts.txt", f"--out={tmp_path}/texts.jsonl", f"--gin.ServingMesh.{mesh}=2")
    done = hosts.Named(tmp_path, 2, nursery).run("infer", f"--model_dir={run[0]}", *SMALL, *beams, *files)
    assert [one.code for one in done] == [0, 0], [one.err[-2000:] for one in done]
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    searched = alone(Sampling(max_new_tokens=8, beams=BeamSearch(num_decodes=3)))
    assert {line["prompt"]: line["text"] for line in lines} == searched
