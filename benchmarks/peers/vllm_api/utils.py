"""In the place of vLLM's tests/utils.py: the server that its API tests start is capibara's, with a stand-in model.

VLLM_API_SERVER holds the command of the server, VLLM_API_MODEL the stand-in, VLLM_API_ADAPTER an adapter of it, as
benchmarks/vllm_api_tests.py sets them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

import anthropic
import openai
import pytest
import requests

VLLM_PATH = pathlib.Path(os.environ["VLLM_API_SOURCE"])
ROCM_ENV_OVERRIDES: dict[str, str] = {}
ROCM_EXTRA_ARGS: list[str] = []
_READY_S = 300.0


class RemoteOpenAIServer:
    """A server of the stand-in under the name of the model that a test asks for."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, **_: object):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.host = "localhost"
        values = _values(vllm_serve_args)
        command = [*shlex.split(os.environ["VLLM_API_SERVER"]), f"--port={self.port}"]
        command += [f"--name={values.get('--served-model-name', [model])[0]}"]
        if "--max-model-len" in values:
            command.append(f"--gin.Dataset.length={values['--max-model-len'][0]}")
        for text in values.get("--lora-modules", []):
            name = json.loads(text)["name"] if text.startswith("{") else text.partition("=")[0]
            command.append(f"--adapter={name}={os.environ['VLLM_API_ADAPTER']}")
        if (env_dict or {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            command += ["--adapter_folder=/", "--gin.Adapters.slots=24"]  # vLLM takes any path
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        keys = [*values.get("--api-key", []), (env_dict or {}).get("VLLM_API_KEY")]
        if key := next(filter(None, keys), None):
            environment["CAPIBARA_API_KEY"] = key
        self._log = tempfile.TemporaryFile()
        self.proc = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + _READY_S
        while time.monotonic() < until and self.proc.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.url_for("ready"), timeout=5).status_code == 200:
                    return
            time.sleep(0.3)
        self._log.seek(0)
        raise RuntimeError(f"the server is not ready: {self._log.read()[-2000:].decode(errors='replace')}")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.proc.send_signal(signal.SIGTERM)
        try:
            self.proc.wait(30)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(**self._options("v1") | options)

    def get_async_client(self, **options: object) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options("v1") | options)

    def get_client_anthropic(self, **options: object) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options() | options)

    def get_async_client_anthropic(self, **options: object) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options() | options)

    def _options(self, *parts: str) -> dict[str, object]:
        return {"base_url": self.url_for(*parts), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600}


RemoteVLLMServer = RemoteOpenAIServerCustom = RemoteLaunchRenderServer = RemoteOpenAIServer


def _values(arguments: list[str]) -> dict[str, list[str]]:
    """Flag -> its values."""
    values: dict[str, list[str]] = {}
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            values[flag] = [value] if equals else []
        else:
            values.setdefault(flag, []).append(argument)
    return values


def _skipped(*_: object, **__: object) -> pytest.MarkDecorator:
    return pytest.mark.skip(reason="needs a GPU")


multi_gpu_test = large_gpu_mark = large_gpu_test = _skipped


def create_new_process_for_each_test(
    *_: object, **__: object
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return lambda test: test


@contextlib.contextmanager
def override_cutlass_fp8_supported(*_: object) -> Iterator[None]:
    yield
