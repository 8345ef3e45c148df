"""Models by their names on the Hub: a small one of its kind on this machine."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types

import pytest

from capibara.core.types import UserError
from capibara.interop import hub
from tests import hub_server

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# A model",
    "run.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "onnx/config.json": b"another form",
    "original/model.safetensors": b"another form",
    "consolidated.safetensors": b"the same weights in one file",
    "additional_chat_templates/rag.jinja": b"{{ documents }}",
}


READ = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
    "README.md",
    "additional_chat_templates/rag.jinja",
}


@pytest.fixture(scope="module")
def endpoint():
    with hub_server.running("models", FILES) as address:
        yield address


def found(name: str, endpoint: str, home: pathlib.Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`hub.local_path` in a process of its own: its library reads the environment when it is loaded."""
    code = (
        "import sys\nfrom capibara.core.types import UserError\nfrom capibara.interop import hub\n"
        "try: print(hub.local_path(sys.argv[1]))\nexcept UserError as error: sys.exit(f'error: {error}')"
    )
    own = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": os.getcwd(),
    }
    command = [sys.executable, "-c", code, name]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | own | environment, check=False)


def test_a_model_is_downloaded_once_without_code_and_pickles(endpoint, tmp_path):
    done = found("me/small", endpoint, tmp_path)
    folder = pathlib.Path(done.stdout.strip().splitlines()[-1])
    wanted = {name: content for name, content in FILES.items() if name in READ}
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == wanted
    assert done.stderr.strip() == "note: me/small is no folder here: it is read from the Hugging Face Hub"
    again = found("me/small", endpoint, tmp_path, HF_HUB_OFFLINE="1")  # it is on this machine
    assert again.stdout.strip() == str(folder)


def test_what_cannot_be_had_is_one_line(endpoint, tmp_path):
    missing = found("me/none", endpoint, tmp_path)
    assert missing.returncode == 1 and "\n" not in missing.stderr.strip().splitlines()[-1]
    assert (
        missing.stderr.strip()
        .splitlines()[-1]
        .startswith("error: me/none is no folder here, and cannot be read from the Hugging Face Hub (")
    )
    away = found("me/small", "http://127.0.0.1:9", tmp_path / "other")
    assert away.stderr.strip().splitlines()[-1].startswith("error: me/small is no folder here, and cannot be read")


def test_a_path_that_is_here_or_could_not_be_a_name_stays_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs", "runs/mine", "/a/b", "./a/b", "a/b/c", "model.gguf", "gs://bucket/a", "~/model"):
        assert hub.local_path(path) == path  # runs/mine: a mistyped folder is not looked for elsewhere


def test_a_model_is_pushed_as_private_as_it_is_asked(monkeypatch, tmp_path):
    made, uploaded = [], []

    def create_repo(name, **options):
        made.append((name, options))
        return f"https://hub/{name}"

    def upload_folder(**options):
        uploaded.append((options["repo_id"], options["folder_path"]))
        if len(uploaded) > 2:
            raise OSError("no space\nleft")

    library = types.SimpleNamespace(create_repo=create_repo, upload_folder=upload_folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    assert hub.push(str(tmp_path), "me/small") == "https://hub/me/small"
    hub.push(str(tmp_path), "me/small", private=False)
    assert made == [("me/small", {"private": is_private, "exist_ok": True}) for is_private in (True, False)]
    assert uploaded == 2 * [("me/small", str(tmp_path))]
    with pytest.raises(UserError, match=r"^me/small cannot be pushed to the Hugging Face Hub \(.*no space.*\)$"):
        hub.push(str(tmp_path), "me/small")


def test_what_is_pushed_arrives(tmp_path):
    """By the Hub's own library, which the answers of a server satisfy."""
    files = {
        "config.json": b"{}",
        "model.safetensors": bytes(range(256)) * 9,
        "README.md": b"---\nlicense: mit\n---\n# A",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    arrived: dict[str, bytes] = {}
    with hub_server.running("models", arrived) as address:
        code = "import sys\nfrom capibara.interop import hub\nprint(hub.push(sys.argv[1], 'me/small'))"
        own = {
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_none",
            "PYTHONPATH": os.getcwd(),
        }
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{address}/me/small"
    assert {name: content for name, content in arrived.items() if not name.startswith("home/")} == files


def test_without_the_library_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"huggingface_hub is not installed \(needed for me/small.*\[hf\]"):
        hub.local_path("me/small")
