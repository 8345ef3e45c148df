"""What a restart costs on a cached SeqIO task, read in blocks and in SeqIO's own order.

    python benchmarks/cached_task.py [--examples 100000] [--steps 1500] [--rounds 3] [--json cached_task.json]

A cache is written as seqio_cache_tasks lays it out: 16 TFRecord files of examples of 64 to 960 token ids. A run really
takes `--steps` batches (16 rows of 1,024 tokens), its state is saved, and new processes go on from there, in turns: the time is
from the call that opens the loader to its first batch, with SeqIO imported before, and that batch must be the one that
the run would have had next. Bytes are those of all reads of the process in that time. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

from capibara.data.dataset import CachedOrder, Dataset
from capibara.data.pipeline.loader import Loader, make_loader
from capibara.data.tasks import tasks

_FILES, _ROWS, _LENGTH, _VOCABULARY = 16, 16, 1024, 32000


def write(folder: str, examples: int) -> int:
    """A cache of the task `cached` -> its bytes."""
    import tensorflow as tf

    seqio, rng = tasks.load(), np.random.default_rng(0)
    os.makedirs(os.path.join(folder, "cached"))
    place, size = os.path.join(folder, "cached"), 0
    for file in range(_FILES):
        name = f"{seqio.get_cached_tfrecord_prefix(place, 'train')}-{file:05}-of-{_FILES:05}"
        with tf.io.TFRecordWriter(name) as writer:
            for _ in range(file, examples, _FILES):
                ids = rng.integers(3, _VOCABULARY, int(rng.integers(64, 960))).astype(np.int32)
                writer.write(seqio.dict_to_tfexample({"targets": ids}).SerializeToString())
        size += os.path.getsize(name)
    about = {
        "num_shards": _FILES,
        "features": {"targets": {"shape": [None], "dtype": "int32"}},
        "seqio_version": "0.0.18",
    }
    for path, content in (
        (seqio.get_cached_info_path(place, "train"), about),
        (seqio.get_cached_stats_path(place, "train"), {"examples": examples}),
    ):
        with open(path, "w") as file:
            json.dump(content, file)
    open(os.path.join(place, "COMPLETED"), "w").close()
    return size


def open_loader(folder: str, order: str) -> Loader:
    """The loader of the cached task."""
    seqio = tasks.load()
    if "cached" not in seqio.TaskRegistry.names():
        vocabulary = seqio.PassThroughVocabulary(_VOCABULARY, eos_id=1)
        seqio.TaskRegistry.add(
            "cached",
            source=seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=["train"]),
            preprocessors=[seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos],
            output_features={"targets": seqio.Feature(vocabulary)},
            shuffle_buffer_size=10000,
        )
    dataset = Dataset(
        mixture_or_task_name="cached",
        use_cached=True,
        cache_dirs=(folder,),
        cached_order=CachedOrder(order),
        length=_LENGTH,
    )
    return make_loader(dataset, batch_size=_ROWS)


def read_bytes() -> int:
    """That this process has read in all."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def restart(folder: str, order: str) -> None:
    """In a process of its own: goes on from the state that lies in the folder."""
    with open(os.path.join(folder, f"{order}.json")) as file:
        saved = json.load(file)
    tasks.load()
    begin_s, before = time.perf_counter(), read_bytes()
    loader = open_loader(folder, order)
    loader.set_state(saved["state"])
    batch = next(loader)
    print(json.dumps({"s": time.perf_counter() - begin_s, "bytes": read_bytes() - before}))
    assert int(batch["targets"].sum()) == saved["next"], "not the batch that the run would have had"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--restart", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.restart:
        restart(*args.restart)
        return
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = write(folder, args.examples)
        print(f"{args.examples:,} examples, {size / 1e6:.0f} MB; restart at step {args.steps:,} of {_ROWS} rows")
        for order in ("blocks", "seqio"):
            loader = open_loader(folder, order)
            begin_s = time.perf_counter()
            for _ in range(args.steps):
                next(loader)
            tokens_per_s = args.steps * _ROWS * _LENGTH / (time.perf_counter() - begin_s)
            state = loader.get_state()
            with open(os.path.join(folder, f"{order}.json"), "w") as file:
                json.dump({"state": state, "next": int(next(loader)["targets"].sum())}, file)
            loader.close()
            found[order] = {"tokens_per_s": tokens_per_s, "restarts": []}
        for _ in range(args.rounds):
            for order, one in found.items():
                command = [sys.executable, os.path.abspath(__file__), "--restart", folder, order]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                one["restarts"].append(json.loads(done.stdout.splitlines()[-1]))
    print("| order | tokens/s | restart, s | MB read |\n|---|---|---|---|")
    for order, one in found.items():
        seconds, read = (statistics.median(run[key] for run in one["restarts"]) for key in ("s", "bytes"))
        print(f"| {order} | {one['tokens_per_s'] / 1e6:.2f} M | {seconds:.2f} | {read / 1e6:.1f} |")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
