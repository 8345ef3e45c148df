"""Data at scale: what a restart of a run on 100 GB costs, and training texts in a bucket against those on the disk.

    python benchmarks/data_scale.py [--steps 100000] [--gigabytes 100] [--rounds 3] [--json data_scale.json]

The corpus of the first part has no bytes anywhere: a store makes JSON lines as they are asked for, the same at every time, and
counts what is read. A run really takes its `--steps` batches (8 rows of 1,024 bytes) from it, its state is saved, and
new processes go on from there: the time is from the call that opens the loader to its first batch, which must be the
one that the run would have had next. It goes on as 2 hosts and as 4, too, whose rows together must be that batch.

The second part reads the same files from the disk and from gs://, as the emulator of gcp-storage-emulator has it (a Python
server, on the cores that the loader is on), in turns: as fast as it can, and for a consumer that takes `--step_ms` a batch as training
does, whose time includes what it waited. Prefetch is on.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import fsspec
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

from capibara.core.types import Batch
from capibara.data.dataset import Dataset
from capibara.data.pipeline.loader import Loader, make_loader, merge_states
from capibara.data.shards.source import ShardedSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary

ROWS, LENGTH = 8, 1024
_LINE = 2048  # bytes of a line of the corpus that is made
_SHARD = 256 << 20
_BLOCK = 1 << 20  # what any corpus of more than 1 GB has


class MadeStore(MemoryFileSystem):
    """A store of large files of JSON lines that are made when they are read."""

    protocol = "made"
    cachable = False
    shards = 0
    read, requests = 0, 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("made://", "memory://"))

    def glob(self, path: str, detail: bool = False, **options) -> dict:
        names = [f"/corpus/part-{i:05}-of-{self.shards:05}.jsonl" for i in range(self.shards)]
        return {name: {"name": name, "size": _SHARD, "type": "file"} for name in names}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options) -> bytes:
        MadeStore.read += end - start
        MadeStore.requests += 1
        shard = int(path.split("-")[1])
        first, last = start // _LINE, -(-end // _LINE)
        content = b"".join(_line(shard, number) for number in range(first, last))
        return content[start - first * _LINE : end - first * _LINE]


def _line(shard: int, number: int) -> bytes:
    """A line of 2 KiB, of a length of text of its own."""
    size = 200 + (shard * 7919 + number * 104729) % 1800
    text = f"shard {shard} line {number} " + "words of a text that is long " * (size // 29)
    return (json.dumps({"text": text}) + " " * _LINE).encode()[: _LINE - 1] + b"\n"


def open_made(gigabytes: int, host: int = 0, hosts: int = 1) -> Loader:
    MadeStore.shards = gigabytes * 10**9 // _SHARD
    fsspec.register_implementation("made", MadeStore, clobber=True)
    return _loader("made://corpus/*.jsonl", host, hosts)


def _loader(files: str, host: int = 0, hosts: int = 1) -> Loader:
    dataset = Dataset(
        source=ShardedSource(files=(files,), block_bytes=_BLOCK), vocabulary=ByteVocabulary(), length=LENGTH, workers=0
    )
    return make_loader(dataset, batch_size=ROWS, shard_index=host, shard_count=hosts)


def digest_of(batches: list[Batch]) -> str:
    """Of the rows of all hosts' parts of a batch, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for key in sorted(batches[0]):
        digest.update(np.concatenate([batch[key] for batch in batches]).tobytes())
    return digest.hexdigest()


def restart_child(arguments: argparse.Namespace) -> None:
    """Goes on from a saved state as some hosts, one after the other; prints what it cost the slowest, as JSON."""
    with open(arguments.state, encoding="utf-8") as file:
        state = json.load(file)
    times_s, parts, states = [], [], []
    for host in range(arguments.hosts):
        begin_s = time.perf_counter()
        loader = open_made(arguments.gigabytes, host, arguments.hosts)
        loader.set_state(state)
        parts.append(next(loader))
        times_s.append(time.perf_counter() - begin_s)
        states.append(loader.get_state())
        loader.close()
    assert merge_states(states)["batches"] == state["batches"] + 1
    found = {
        "ready_s": max(times_s),
        "read": MadeStore.read,
        "requests": MadeStore.requests,
        "digest": digest_of(parts),
    }
    print(json.dumps(found))


def restart(arguments: argparse.Namespace, folder: str) -> dict:
    """The first part."""
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
    begin_s = time.perf_counter()
    loader = open_made(arguments.gigabytes)
    first_start_s, first_read = time.perf_counter() - begin_s, MadeStore.read
    for _ in range(arguments.steps):
        next(loader)
    run_s = time.perf_counter() - begin_s
    state = loader.get_state()
    expected = digest_of([next(loader)])
    loader.close()
    indexes = os.path.join(folder, "cache", "capibara", "indexes")
    result = {
        "steps": arguments.steps,
        "corpus_bytes": MadeStore.shards * _SHARD,
        "shards": MadeStore.shards,
        "index_bytes": sum(os.path.getsize(os.path.join(indexes, name)) for name in os.listdir(indexes)),
        "first_start_s": first_start_s,
        "first_start_read": first_read,
        "run_s": run_s,
        "run_read": MadeStore.read,
        "restarts": {},
    }
    path = os.path.join(folder, "state.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(state, file)
    for hosts in (1, 2, 4):
        command = [sys.executable, os.path.abspath(__file__), f"--gigabytes={arguments.gigabytes}", f"--hosts={hosts}"]
        done = subprocess.run([*command, f"--state={path}"], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        assert found.pop("digest") == expected, f"{hosts} hosts got other rows than the run that went on"
        result["restarts"][hosts] = found
    return result


def bucket_child(arguments: argparse.Namespace) -> None:
    """Reads the files of a folder and of the bucket in turns; prints seconds a batch, as JSON."""
    store = fsspec.filesystem("gs", token="anon")
    for name in os.listdir(arguments.folder):
        store.put_file(os.path.join(arguments.folder, name), f"bucket/corpus/{name}")
    places = {"disk": f"{arguments.folder}/*.jsonl", "bucket": "gs://bucket/corpus/*.jsonl"}
    times: dict[str, dict[str, list[float]]] = {"loader": {}, "training": {}}
    for _ in range(arguments.rounds):
        for place, files in places.items():
            for kind, pause_s in (("loader", 0.0), ("training", arguments.step_ms / 1e3)):
                times[kind].setdefault(place, []).append(_seconds_a_batch(files, arguments.batches, pause_s))
    print(json.dumps({kind: {p: statistics.median(t) for p, t in by.items()} for kind, by in times.items()}))


def _seconds_a_batch(files: str, batches: int, pause_s: float) -> float:
    loader = _loader(files)
    next(loader)
    begin_s = time.perf_counter()
    for _ in itertools.islice(loader, batches):
        time.sleep(pause_s)
    took_s = (time.perf_counter() - begin_s) / batches
    loader.close()
    return took_s


def bucket(arguments: argparse.Namespace, folder: str) -> dict | None:
    """The second part; None where the emulator is not installed."""
    try:
        from gcp_storage_emulator import server
    except ImportError:
        return None
    from capibara.jobs.local import free_address

    corpus = os.path.join(folder, "corpus")
    os.makedirs(corpus)
    for shard in range(8):
        with open(os.path.join(corpus, f"part-{shard:05}.jsonl"), "wb") as file:
            file.writelines(_line(shard, number) for number in range(arguments.shard_megabytes * 512))
    host, _, port = free_address().partition(":")
    running = server.create_server(host, int(port), in_memory=True, default_bucket="bucket")
    running.start()
    environment = {
        **os.environ,
        "STORAGE_EMULATOR_HOST": f"http://{host}:{port}",
        "GCE_METADATA_HOST": "127.0.0.1:1",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    command = [sys.executable, os.path.abspath(__file__), f"--folder={corpus}", f"--rounds={arguments.rounds}"]
    command += [f"--batches={arguments.batches}", f"--step_ms={arguments.step_ms}"]
    try:
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    finally:
        running.stop()
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--gigabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--step_ms", type=float, default=20.0)
    parser.add_argument("--shard_megabytes", type=int, default=16)
    parser.add_argument("--json")
    for name in ("--state", "--folder"):  # of the processes that this one starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.state or arguments.folder:
        (restart_child if arguments.state else bucket_child)(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {"restart": restart(arguments, folder), "bucket": bucket(arguments, folder)}
    one = found["restart"]
    print(f"{one['corpus_bytes'] / 1e9:.1f} GB in {one['shards']} shards, index {one['index_bytes'] / 1e6:.2f} MB")
    print(f"first start {one['first_start_s']:.2f} s, {one['first_start_read'] / 1e6:.1f} MB read")
    print(f"{one['steps']} steps in {one['run_s']:.0f} s, {one['run_read'] / 1e9:.2f} GB read")
    for hosts, cost in one["restarts"].items():
        read = f"{cost['read'] / 1e6:.1f} MB in {cost['requests']} requests of all hosts"
        print(f"restart at step {one['steps']} on {hosts} hosts: first batch after {cost['ready_s']:.2f} s, {read}")
    for kind, by in (found["bucket"] or {}).items():
        ratio = by["bucket"] / by["disk"]
        print(
            f"{kind}: {by['disk'] * 1e3:.2f} ms a batch from the disk, {by['bucket'] * 1e3:.2f} from the bucket, {ratio:.2f} x"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
