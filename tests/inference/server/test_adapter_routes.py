"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: what they load, and what they refuse while others are served."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import threading

import jax
import openai
import pytest

import capibara as cb
from capibara import config
from capibara.cli import serve
from capibara.core.types import UserError
from capibara.inference.server import server
from capibara.interop.peft import folder as peft
from capibara.models import api
from capibara.models.api import Lora
from capibara.multihost import exits

sys.path.insert(0, os.path.dirname(__file__))
from test_serve_adapters import F32, QUICK, adapted, paths, want  # noqa: E402, F401
from test_server import Running, until  # noqa: E402

HOW = dict(prompt="The river", temperature=0, max_tokens=12)
FURTHER = "--gin.Adapters.slots=2", "--gin.Adapters.rank=3"


@pytest.fixture(scope="module")
def allowed(paths, tmp_path_factory):  # noqa: F811
    """A folder with adapters that clients may load."""
    root = tmp_path_factory.mktemp("allowed")
    for name in ("poet", "coder"):
        shutil.copytree(paths / name, root / name)
    return root


@pytest.fixture(scope="module")
def running(folder, allowed):
    with started(folder, f"--adapter_folder={allowed}", *FURTHER) as one:
        yield one


class started:
    """A server of the command line, in a thread."""

    def __init__(self, folder, *flags, keys=()):
        seen, run = {}, server.run
        server.run = lambda listening, keys, load, *_: seen.update(of=load()) or 0
        config.reset()
        try:
            code = exits.run_verb(serve.main, [f"--model={folder}", F32, "--name=base", *QUICK, *flags])
        finally:
            server.run = run
        assert code == 0
        self._served, takes = seen["of"]
        self._running = Running(self._served, takes, keys)

    def __enter__(self):
        self._served.engine.start()
        return self._running.__enter__()

    def __exit__(self, *of):
        self._running.__exit__(*of)
        self._served.engine.close()


@pytest.fixture(autouse=True)
def without_adapters(running):
    yield
    for name in listed(running)[1:]:
        assert post(running, "unload", lora_name=name)[0] == 200


def post(running, what, headers=None, **body):
    status, text, _ = running.http("POST", f"/v1/{what}_lora_adapter", json.dumps(body), headers)
    return status, text.decode()


def refused(running, what="load", headers=None, **body):
    status, text = post(running, what, headers, **body)
    error = json.loads(text)["error"]
    assert "\n" not in error["message"]
    return status, error["code"], error["param"], error["message"]


def listed(running):
    return [one.id for one in running.client().models.list()]


def text_of(running, name):
    return running.client().completions.create(model=name, **HOW).choices[0].text


def test_clients_load_and_unload_adapters(running, allowed, want):  # noqa: F811
    client = running.client()
    for name, path in (("poet", allowed / "poet"), ("coder", "coder")):
        answer = client.post("/load_lora_adapter", cast_to=str, body={"lora_name": name, "lora_path": str(path)})
        assert answer == f"Success: LoRA adapter '{name}' added successfully."
    assert {one.id: getattr(one, "parent", None) for one in client.models.list()} == {
        "base": None,
        "poet": "base",
        "coder": "base",
    }
    assert client.models.retrieve("coder").id == "coder" and running.metrics()["capibara_adapters",] == 2
    for name in ("coder", "base", "poet"):
        assert text_of(running, name) == want[None if name == "base" else name]
    answer = client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "coder", "lora_int_id": 2})
    assert answer == "Success: LoRA adapter 'coder' removed successfully."
    assert listed(running) == ["base", "poet"]
    for ask in (client.completions.create, lambda model, **_: client.embeddings.create(model=model, input="The river")):
        with pytest.raises(openai.NotFoundError, match="model is 'coder', the models here are 'base', 'poet'"):
            ask(model="coder", **HOW)
    assert text_of(running, "poet") == want["poet"]


def test_an_adapter_is_replaced_where_that_is_said(running, want):  # noqa: F811
    assert post(running, "load", lora_name="mine", lora_path="poet")[0] == 200
    assert text_of(running, "mine") == want["poet"]
    assert refused(running, lora_name="mine", lora_path="coder") == (
        400,
        "name_taken",
        "lora_name",
        "'mine' has already been loaded: unload it first, or set load_inplace to true",
    )
    assert text_of(running, "mine") == want["poet"]
    assert post(running, "load", lora_name="mine", lora_path="coder", load_inplace=True)[0] == 200
    assert text_of(running, "mine") == want["coder"] and listed(running) == ["base", "mine"]


def test_texts_of_an_unloaded_adapter_end(running, want):  # noqa: F811
    assert post(running, "load", lora_name="poet", lora_path="poet")[0] == 200
    how = dict(model="poet", prompt="The river", temperature=0, stream=True)
    stream = iter(running.client().completions.create(**how, max_tokens=200))
    pieces = [next(stream).choices[0].text]
    assert post(running, "unload", lora_name="poet")[0] == 200
    assert refused(running, "unload", lora_name="poet")[:3] == (404, "adapter_not_found", "lora_name")
    for name in ("a", "b"):  # in the other slots
        assert post(running, "load", lora_name=name, lora_path="coder")[0] == 200
    pieces += [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(pieces).startswith(want["poet"])
    assert refused(running, lora_name="c", lora_path="poet")[0] == 400  # there are two slots
    until(lambda: post(running, "load", lora_name="a", lora_path="poet", load_inplace=True)[0] == 200)
    assert text_of(running, "a") == want["poet"]


def test_names_and_bodies_are_checked(running):
    cases = [
        ({"lora_name": "poet"}, 400, "missing_required_parameter", "lora_path"),
        ({"lora_path": "poet"}, 400, "missing_required_parameter", "lora_name"),
        ({"lora_name": "", "lora_path": "poet"}, 400, "invalid_value", "lora_name"),
        ({"lora_name": "base", "lora_path": "poet"}, 400, "name_taken", "lora_name"),
        ({"lora_name": "base", "lora_path": "poet", "load_inplace": True}, 400, "name_taken", "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "poet"}, 400, "invalid_value", "lora_name"),
        ({"lora_name": "a" * 129, "lora_path": "poet"}, 400, "invalid_value", "lora_name"),
        ({"lora_name": 5, "lora_path": "poet"}, 400, "invalid_value", "lora_name"),
        ({"lora_name": "a", "lora_path": "poet", "load_inplace": "yes"}, 400, "invalid_value", "load_inplace"),
        ({"lora_name": "a", "lora_path": "poet", "is_3d_lora_weight": True}, 400, "unsupported_parameter", None),
        ({"lora_name": "a", "lora_path": "poet", "load_in_place": True}, 400, "unknown_parameter", "load_in_place"),
    ]
    for body, status, code, param in cases:
        seen = refused(running, **body)
        assert seen[:2] == (status, code) and param in (None, seen[2]), (body, seen)
    assert refused(running, "unload", lora_name="nobody")[:3] == (404, "adapter_not_found", "lora_name")
    assert listed(running) == ["base"]


def test_paths_are_those_of_the_folders(running, allowed, paths, tmp_path):  # noqa: F811
    os.symlink(paths / "poet", allowed / "link")
    (allowed / "linked_file").mkdir()
    os.symlink("/etc/passwd", allowed / "linked_file" / peft.CONFIG)
    (allowed / "linked_run").mkdir()
    shutil.copytree(allowed / "coder", allowed / "linked_run", dirs_exist_ok=True)
    next(path for path in (allowed / "linked_run").rglob("*") if path.is_file() and path.suffix != ".gin").unlink()
    os.symlink("/etc/passwd", allowed / "linked_run" / "more")
    outside = [
        paths / "poet",
        "/etc",
        "/",
        "../poet",
        f"{allowed}/../{paths.name}/poet",
        f"{allowed}x",
        allowed / "link",
    ]
    for path in outside:
        status, code, param, message = refused(running, lora_name="a", lora_path=str(path))
        assert (status, code, param) == (403, "folder_not_allowed", "lora_path"), path
        assert "is not in a folder that adapters may be loaded from (Adapters.folders)" in message
    for path, status in (("none", 404), ("poet/adapter_config.json", 404), ("", 400), ("a" * 5000, 400), ("\0", 400)):
        assert refused(running, lora_name="a", lora_path=path)[0] == status, path
    for path in ("linked_file", "linked_run"):
        status, _, _, message = refused(running, lora_name="a", lora_path=path)
        assert status == 400 and "is a link to another folder: put a copy in its place" in message
        assert str(allowed) not in message
    (allowed / "inside").mkdir()
    for name in (peft.CONFIG, peft.WEIGHTS):  # links within are resolved, as the Hub's cache has them
        os.symlink(allowed / "poet" / name, allowed / "inside" / name)
    os.symlink(allowed / "inside", allowed / "again")
    assert post(running, "load", lora_name="a", lora_path="again")[0] == 200


def of_folder(run, lora, path, **changes):
    model, params = adapted(run, lora, 5)
    peft.write_peft(str(path), params, model, "llama", base="base")
    about = json.loads((path / peft.CONFIG).read_text())
    (path / peft.CONFIG).write_text(json.dumps(about | changes))


def test_broken_folders_are_refused_and_others_are_served(running, run, allowed, want):  # noqa: F811
    poet = allowed / "poet"

    def copied(name):
        return shutil.copytree(poet, allowed / name)

    (copied("no_json") / peft.CONFIG).write_text("this is not json")
    (copied("no_weights") / peft.WEIGHTS).unlink()
    with open(copied("cut") / peft.WEIGHTS, "rb+") as file:
        file.truncate(os.path.getsize(file.name) // 2)
    (copied("empty") / peft.WEIGHTS).write_bytes(b"")
    (copied("pipe") / peft.WEIGHTS).unlink()
    os.mkfifo(allowed / "pipe" / peft.WEIGHTS)
    (allowed / "nothing").mkdir()
    of_folder(run, Lora(rank=4, targets=("query",)), allowed / "large")
    of_folder(run, Lora(rank=2, modules_to_save=("final_norm/scale",)), allowed / "saved")
    of_folder(run, Lora(rank=2, dora=True), allowed / "dora")
    of_folder(run, Lora(rank=2), allowed / "pissa", init_lora_weights="pissa")
    of_folder(run, Lora(rank=2), allowed / "kind", peft_type="IA3")
    other = dataclasses.replace(run, model=api.build(dataclasses.replace(run.model.config, mlp_dim=48)))
    other = dataclasses.replace(other, params=other.model.init(jax.random.key(0)))
    of_folder(other, Lora(rank=2, targets=("down",)), allowed / "other")
    with open(copied("huge") / "tokenizer.json", "wb") as file:
        file.truncate(2**32)
    shutil.copytree(allowed / "coder", allowed / "cut_run")
    for path in (allowed / "cut_run").rglob("*"):
        if path.is_file() and path.stat().st_size > 5000:
            os.truncate(path, 3000)
    cases = {
        "no_json": "adapter_config.json",
        "no_weights": "adapter_model.safetensors cannot be read",
        "cut": "adapter_model.safetensors cannot be read",
        "empty": "adapter_model.safetensors",
        "pipe": "is a pipe, must be a regular file",
        "nothing": "it is neither a PEFT folder (adapter_config.json) nor a run folder",
        "large": "has rank 4, must have at most 3: raise Adapters.rank, and start again",
        "saved": "is trained in full (Lora.modules_to_save)",
        "dora": "has magnitudes (DoRA)",
        "pissa": "init_lora_weights = 'pissa'",
        "kind": "peft_type",
        "other": "must be [",
        "huge": "bytes, must have at most",
        "cut_run": "",
    }
    for name, message in cases.items():
        status, _, _, seen = refused(running, lora_name="a", lora_path=name)
        assert status == 400 and message in seen and str(allowed) not in seen, (name, status, seen)
        assert text_of(running, "base") == want[None]
    assert listed(running) == ["base"]
    assert post(running, "load", lora_name="a", lora_path="poet")[0] == 200
    assert text_of(running, "a") == want["poet"]


def test_many_loads_at_once(running, want):  # noqa: F811
    """Each is answered, and the texts of others are the same."""
    statuses, texts = [], []

    def load(name):
        statuses.append(post(running, "load", lora_name=name, lora_path="poet", load_inplace=True)[0])

    threads = [threading.Thread(target=load, args=(f"of {number % 3}",)) for number in range(9)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        texts.append(text_of(running, "base"))
    for thread in threads:
        thread.join(60)
    assert len(statuses) == 9 and {200, 400} == set(statuses) and set(texts) == {want[None]}
    assert len(listed(running)) == 3 and text_of(running, listed(running)[1]) == want["poet"]


def test_it_is_off_unless_a_folder_is_named(folder, running):
    with started(folder, "--gin.Adapters.slots=3") as without:
        for what in ("load", "unload"):
            status, code, _, message = refused(
                without, what, lora_name="a", **({"lora_path": "/"} if what == "load" else {})
            )
            assert (status, code) == (404, "no_such_url") and "--adapter_folder=DIR" in message
        assert not without.service.served.engine.adapters.of([])


def test_keys_hosts_and_origins_are_checked(folder, allowed):
    with started(folder, f"--adapter_folder={allowed}", *FURTHER, keys=["secret"]) as one:
        body = {"lora_name": "a", "lora_path": "poet"}
        assert refused(one, **body)[:2] == (401, "invalid_api_key")
        key = {"Authorization": "Bearer secret"}
        assert refused(one, headers=key | {"Origin": "https://other.example"}, **body)[0] == 403
        assert refused(one, headers=key | {"Content-Type": "text/plain"}, **body)[0] == 415
        assert refused(one, "unload", lora_name="a")[0] == 401
        assert post(one, "load", headers=key, **body)[0] == 200


def mistake(capfd, *argv):
    config.reset()
    capfd.readouterr()
    code = exits.run_verb(serve.main, [*argv, *QUICK])
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
    return err


def test_a_setting_that_does_not_fit_is_one_line(folder, allowed, capfd):
    model = f"--model={folder}"
    assert "Adapters.folders has '/none', must be folders" in mistake(capfd, model, F32, "--adapter_folder=/none")
    for field in ("slots", "rank", "max_mib"):
        assert f"Adapters.{field} is 0, must be at least 1" in mistake(capfd, model, f"--gin.Adapters.{field}=0")
    assert "Adapters.targets is ('quary',)" in mistake(
        capfd, model, F32, f"--adapter_folder={allowed}", "--gin.Adapters.targets=('quary',)"
    )


def test_python_loads_them_too(folder, allowed, want):  # noqa: F811
    settings = cb.Adapters(paths=(("coder", str(allowed / "coder")),), folders=(str(allowed),), slots=1, rank=2)
    model = cb.load(folder, dtype="float32", adapters=settings)
    assert model.engine.adapters.names == ("coder",)
    how = dict(temperature=0.0, max_tokens=12)
    assert model.generate("The river", adapter="coder", **how) == want["coder"]
    model.load_adapter("poet", "poet")
    assert model.generate("The river", adapter="poet", **how) == want["poet"]
    with pytest.raises(UserError, match="is not in a folder that adapters may be loaded from"):
        model.load_adapter("etc", "/etc")
    with pytest.raises(UserError, match="'none' is not here: name a PEFT folder"):
        model.load_adapter("none", "none")
    model.unload_adapter("poet")
    with pytest.raises(UserError, match="adapter is 'poet', must be one of coder"):
        model.generate("The river", adapter="poet", **how)
    plain = cb.load(folder, dtype="float32")
    with pytest.raises(UserError, match="name its folder, cb.load"):
        plain.load_adapter("poet", "poet")
    assert plain.engine.core.adapters.of([]) is None


def test_a_request_whose_adapter_is_unloaded_while_it_is_prepared_gets_404(running, monkeypatch):
    assert post(running, "load", lora_name="poet", lora_path="poet")[0] == 200
    engine = running.service.served.engine
    submit = engine.submit

    def unloaded_before(*args, **options):
        if "poet" in engine.adapters.names:
            engine.adapters.unload("poet")
        return submit(*args, **options)

    monkeypatch.setattr(engine, "submit", unloaded_before)
    with pytest.raises(openai.NotFoundError, match="model is 'poet', the model here is 'base'") as error:
        text_of(running, "poet")
    assert error.value.code == "model_not_found" and error.value.param == "model"
