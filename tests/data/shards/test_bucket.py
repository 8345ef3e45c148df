"""Shards in Google Cloud Storage, as its emulator has it, behind a proxy that fails as it is told."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from capibara.jobs.local import free_address

HERE = pathlib.Path(__file__).parent


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on; of reads of content the next ones fail as `faults` says: a status, or "cut" in the middle.

    Where it `denies`, nothing may be read or listed.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], target: str):
        super().__init__(address, _Handler)
        self.target, self.faults, self.denies, self.reads = target, [], False, 0
        self.lock = threading.Lock()

    def fault(self) -> int | str | None:
        with self.lock:
            self.reads += 1
            return self.faults.pop(0) if self.faults else None


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        fault = self.server.fault() if "alt=media" in self.path or "/download/" in self.path else None
        if self.server.denies:
            fault = 403
        if isinstance(fault, int):
            self._answer(fault, json.dumps({"error": {"code": fault, "message": "as told"}}).encode(), {})
            return
        host, _, port = self.server.target.partition(":")
        connection = http.client.HTTPConnection(host, int(port))
        connection.request("GET", self.path, headers={k: v for k, v in self.headers.items() if k.lower() != "host"})
        answer = connection.getresponse()
        content = answer.read()
        headers = {
            k: v for k, v in answer.getheaders() if k.lower().startswith(("content-type", "content-range", "x-goog"))
        }
        self._answer(answer.status, content, headers, cut=fault == "cut")
        connection.close()

    do_HEAD = do_GET

    def _answer(self, status: int, content: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.close_connection = True


@pytest.fixture(scope="module")
def proxy():
    """A proxy before an emulator; `environment` is of a program that reads through it."""
    server = pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    host, _, port = free_address().partition(":")
    running = server.create_server(host, int(port), in_memory=True, default_bucket="bucket")
    running.start()
    own_host, _, own_port = free_address().partition(":")
    made = Proxy((own_host, int(own_port)), f"{host}:{port}")
    threading.Thread(target=made.serve_forever, daemon=True).start()
    made.environment = {
        **os.environ,
        "STORAGE_EMULATOR_HOST": f"http://{own_host}:{own_port}",
        "EMULATOR": f"http://{host}:{port}",
        "GCE_METADATA_HOST": "127.0.0.1:1",  # nobody to ask for credentials
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "PYTHONPATH": str(HERE.parents[2]),
    }
    yield made
    made.shutdown()
    running.stop()


def run(proxy, folder: str, cache) -> subprocess.CompletedProcess:
    environment = {**proxy.environment, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, str(HERE / "bucket.py"), folder, "20"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "corpus"
    made.mkdir()
    for shard in range(3):
        lines = [json.dumps({"text": f"<{shard} {i}>" + "x" * 200}) for i in range(100)]
        (made / f"part-{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return str(made)


def test_a_bucket_gives_the_rows_of_a_disk_whatever_fails_in_between(proxy, folder, tmp_path):
    proxy.faults[:] = [503, "cut", 429, None, "cut"]
    done = run(proxy, folder, tmp_path / "cache")
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr[-2000:]
    assert not proxy.faults and proxy.reads > 10


@pytest.mark.heavy
def test_a_bucket_without_permission_is_one_line(proxy, tmp_path):
    proxy.denies = True
    done = run(proxy, "-", tmp_path / "cache")
    proxy.denies = False
    assert done.returncode == 2, done.stderr[-2000:]
    assert "gs://bucket/corpus/*.jsonl may not be read with this machine's credentials" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.heavy
def test_a_run_trains_from_a_bucket_and_resumes(proxy, folder, tmp_path):
    """The verb, with reads that fail; stopped and resumed, it has the losses of the run on the disk."""
    assert run(proxy, folder, tmp_path / "cache").returncode == 0  # uploads them
    losses = {}
    for name, files in (("disk", f"{folder}/*.jsonl"), ("bucket", "gs://bucket/corpus/*.jsonl")):
        for steps in (2, 4):
            proxy.faults[:] = [503, "cut"] if name == "bucket" else []
            gin = {
                "FILES": f"('{files}',)",
                "MODEL_DIR": f"'{tmp_path / name}'",
                "TRAIN_STEPS": steps,
                "Trainer.log_every": 1,
                "ShardedSource.block_bytes": 1024,
                "DecoderConfig.num_layers": 1,
                "DecoderConfig.embed_dim": 64,
            }
            command = [sys.executable, "-m", "capibara.train", "--emulate=2"]
            command += [f"--gin_file={part}.gin" for part in ("models/tiny", "tasks/shards", "runs/pretrain")]
            done = subprocess.run(
                [*command, *(f"--gin.{key}={value}" for key, value in gin.items())],
                env={**proxy.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0 and not proxy.faults, done.stderr[-2000:]
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
    assert len(losses["disk"]) == 4 and losses["bucket"] == losses["disk"]
