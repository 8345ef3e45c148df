"""`python -m capibara.serve` as a process: requests, shutdown, and one-line errors."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import openai
import pytest

from capibara.cli import infer, serve
from capibara.cli.composition import models
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server import server
from capibara.inference.server.service.service import Service, State
from capibara.multihost import exits

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
F32 = "--gin.DecoderConfig.dtype=float32"
QUICK = ("--port=0", "--gin.ServerConfig.warm_up=False", "--gin.EngineConfig.slots=1")


def test_a_process_ends_its_texts_after_a_signal(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "capibara.serve", f"--model={folder}", "--name=mine", *QUICK],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT), "CAPIBARA_API_KEY": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        name, _, _, url = process.stdout.readline().split()
        assert name == "mine" and url.startswith("http://127.0.0.1:")
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="guessed", max_retries=0).models.list()
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=60)
        long = dict(model="mine", prompt="The river", temperature=0, max_tokens=150, n=5, stream=True)
        stream = client.completions.create(**long)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        ended = {chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason in ("stop", "length")}
        assert ended == {*range(5)}
        assert process.wait(60) == 0
        assert process.stdout.read() == "" and process.stderr.read().startswith("note: texts begin with")
    finally:
        process.kill()


FAILING = """
import sys
from capibara.cli import serve
from capibara.multihost import exits as cli
from capibara.inference.engine.scheduler import Scheduler

receive, left = Scheduler.receive, [12]

def failing(self, count):
    left[0] -= 1
    if left[0] > 0:
        return receive(self, count)
    raise FloatingPointError("planted")

Scheduler.receive = failing
sys.exit(cli.run_verb(serve.main, sys.argv[1:]))
"""


def test_a_process_whose_engine_fails_tells_all_and_ends(folder):
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            FAILING,
            f"--model={folder}",
            "--name=mine",
            *QUICK,
            "--gin.EngineConfig.decode_steps=4",
        ],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().split()[-1]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        asked = dict(model="mine", prompt="The river", temperature=0, max_tokens=200)
        stream = client.completions.create(**asked, stream=True)
        with ThreadPoolExecutor(3) as pool:  # one slot: the others wait for it
            waiting = [pool.submit(client.completions.create, **asked) for _ in range(3)]
            with pytest.raises(openai.APIError, match="FloatingPointError"):
                list(stream)
            for one in waiting:
                with pytest.raises(openai.InternalServerError):
                    one.result()
        with pytest.raises(urllib.error.HTTPError, match="503") as health:
            urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=60)
        assert health.value.read() == b'{"status":"failed"}'
        assert process.wait(60) == 1
        assert "FloatingPointError: planted" in process.stderr.read()
    finally:
        process.kill()


def test_a_second_signal_ends_it_at_once(monkeypatch):
    codes = []
    monkeypatch.setattr(server.os, "_exit", codes.append)
    service = Service(None)
    one = server.Server(None, service)
    one.handle_exit(signal.SIGINT, None)
    assert service.state is State.DRAINING and codes == []
    one.handle_exit(signal.SIGTERM, None)
    assert codes == [130]


def mistake(capfd, main, *argv):
    capfd.readouterr()
    code = exits.run_verb(main, list(argv))
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "), (code, out, err)
    return err


def test_mistakes_are_one_line(capfd, folder, tmp_path, monkeypatch):
    monkeypatch.delenv("CAPIBARA_API_KEY", raising=False)
    model = f"--model={folder}"
    assert "one of --model_dir and --model" in mistake(capfd, serve.main)
    assert "one of --model_dir and --model" in mistake(capfd, serve.main, model, "--model_dir=x")
    assert "is open to other machines: set CAPIBARA_API_KEY" in mistake(
        capfd, serve.main, model, "--host=0.0.0.0", *QUICK
    )
    assert "--port=70000" in mistake(capfd, serve.main, model, "--port=70000")
    assert "cannot be listened on" in mistake(capfd, serve.main, model, "--host=no.such.host.invalid", *QUICK)
    assert "cannot be listened on" in mistake(capfd, serve.main, model, "--host=" + "a" * 64, *QUICK)
    with server.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert "cannot be listened on" in mistake(capfd, serve.main, model, f"--port={port}")
    assert "--api_key_file=/none cannot be read" in mistake(capfd, serve.main, model, "--api_key_file=/none", *QUICK)
    # Errors of the model are found while the server listens already.
    assert "does not exist: name a run folder, a Hugging Face folder" in mistake(
        capfd, serve.main, "--model=/none", *QUICK
    )
    assert "ServerConfig.queue is -1" in mistake(capfd, serve.main, model, "--gin.ServerConfig.queue=-1", *QUICK)
    assert "did you mean queue?" in mistake(capfd, serve.main, model, "--gin.ServerConfig.quue=1", *QUICK)
    assert "leave one out" in mistake(capfd, infer.main, model, "--model_dir=x", "--prompt=a")


@pytest.fixture
def loaded(monkeypatch):
    """The parameters of every loaded model."""
    load, found = models.load_with_run, []

    def noted(*args, **options):
        run, opened = load(*args, **options)
        found.extend(jax.tree.leaves(opened.params))
        return run, opened

    monkeypatch.setattr(models, "load_with_run", noted)
    return found


def test_an_engine_takes_the_memory_of_what_was_loaded(capfd, folder, loaded, monkeypatch):
    seen = {}

    def run(listening, keys, load, *_):
        seen["engine"] = load()[0].engine
        listening.close()
        return 0

    monkeypatch.setattr(server, "run", run)
    assert exits.run_verb(serve.main, [f"--model={folder}", *QUICK]) == 0
    assert loaded and all(one.is_deleted() for one in loaded)
    assert seen["engine"].submit([1], Sampling(max_new_tokens=1)).result()


def test_infer_takes_a_foreign_model(capfd, folder, served, loaded):
    asked = [f"--model={folder}", F32, "--gin.Sampling.temperature=0", "--gin.Sampling.max_new_tokens=12"]
    assert exits.run_verb(infer.main, [*asked, "--prompt=The river"]) == 0
    assert loaded and all(one.is_deleted() for one in loaded)  # by the engine, for its own

    greedy = Sampling(temperature=0.0, max_new_tokens=12)
    assert capfd.readouterr().out == "The river" + served.engine.submit("The river", greedy).result().text + "\n"
    assert exits.run_verb(infer.main, [*asked, "--prompt=Hello", "--chat"]) == 0
    want = served.engine.submit(served.chat.ids("Hello"), greedy, ends=served.chat.ends).result().text
    assert capfd.readouterr().out == want + "\n"


def test_a_gguf_file_is_loaded(folder, tmp_path, capfd):
    from capibara.cli import convert

    path = tmp_path / "tiny.gguf"
    assert exits.run_verb(convert.main, [f"--from={folder}", f"--to={path}", "--dtype=f32"]) == 0
    capfd.readouterr()
    asked = [F32, "--gin.Sampling.temperature=0", "--gin.Sampling.max_new_tokens=12", "--prompt=Hello", "--chat"]
    texts = []
    for model in (folder, path):
        assert exits.run_verb(infer.main, [f"--model={model}", *asked]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1]
