"""Packed tokens a second: ours against seqio's trim-and-pack and Grain's packing.

    taskset -c 1 python benchmarks/data.py [--length 2048] [--rounds 5] [--tokens 3000000] [--json data.json]

Everyone packs the same tokens of the standard library into batches of 8 rows, in turns within one process, and the
median of the rounds counts. Two corpora: whole modules (long documents), and their paragraphs (short ones). Tokens are
in memory before the clock starts. seqio and Grain's bin packers cannot cut long documents, so they get the pieces
ready made; ours cuts them, and shifts the inputs besides, within its time. "files" is the whole way from files to
batches, once the pipeline runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Document, Packing, empty_batch
from capibara.data.pipeline.loader import make_loader
from capibara.data.pipeline.stream import Layout, RowStream
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary

BATCH_ROWS = 8
Batches = Iterable[np.ndarray]  # the segment ids [rows, length] of a batch: what is not 0 is packed


def read_corpora(token_limit: int) -> dict[str, list[np.ndarray]]:
    """Token ids of whole modules and of their paragraphs, about `token_limit` tokens each."""
    documents, vocabulary = StdlibSource().open("train"), ByteVocabulary()
    modules: list[np.ndarray] = []
    paragraphs: list[np.ndarray] = []
    total = 0
    for i in np.random.default_rng(0).permutation(len(documents)).tolist():
        text = documents[i]
        modules += vocabulary.encode_batch([text])
        paragraphs += vocabulary.encode_batch([part for part in text.split("\n\n") if part])
        total += len(modules[-1])
        if total >= token_limit:
            break
    return {"modules": modules, "paragraphs": paragraphs}


def cut(documents: list[np.ndarray], length: int) -> list[np.ndarray]:
    """Pieces of at most `length` tokens."""
    return [ids[at : at + length] for ids in documents for at in range(0, len(ids), length)]


def ours(documents: list[np.ndarray], length: int, packing: Packing) -> Batches:
    layout = Layout(
        length=length, packing=packing, pad_id=0, window_rows=64, window_documents=128, shuffle_seeds=(0, 0)
    )
    numbered = [(i, Document(ids, None, 0)) for i, ids in enumerate(documents)]
    stream = RowStream(lambda begin: iter(numbered[begin:]), layout)
    while True:
        batch = empty_batch(BATCH_ROWS, length)
        for b in range(BATCH_ROWS):
            row = next(stream, None)
            if row is None:
                if b:
                    yield batch["segment_ids"]
                return
            row.fill(batch, b)
        yield batch["segment_ids"]


def seqio_packing(pieces: list[np.ndarray], length: int) -> Callable[[], Batches]:
    tf, seqio = load_seqio()
    flat = tf.constant(np.concatenate(pieces))
    edges = tf.constant(np.cumsum([0, *map(len, pieces)]))

    def run() -> Batches:
        examples = tf.data.Dataset.range(len(pieces)).map(lambda i: {"targets": flat[edges[i] : edges[i + 1]]})
        packed = seqio.utils.trim_and_pack_dataset(examples, {"targets": length}, use_custom_ops=False)
        for batch in packed.batch(BATCH_ROWS).prefetch(2).as_numpy_iterator():
            yield batch["targets_segment_ids"]

    return run


def grain_packing(pieces: list[np.ndarray], length: int, kind: str) -> Callable[[], Batches]:
    import grain
    from grain import experimental

    elements = [{"targets": piece} for piece in pieces]

    def run() -> Batches:
        dataset = grain.MapDataset.source(elements).to_iter_dataset(grain.ReadOptions(num_threads=0))
        if kind == "concat":
            dataset = experimental.ConcatThenSplitIterDataset(dataset, length_struct={"targets": length})
        else:
            packer = {
                "best_fit": experimental.BestFitPackIterDataset,
                "first_fit": experimental.FirstFitPackIterDataset,
            }[kind]
            dataset = packer(dataset, length_struct={"targets": length}, num_packing_bins=64)
        for batch in dataset.batch(BATCH_ROWS):
            yield batch["targets_segment_ids"]

    return run


def files_ours(length: int, task: str | None, token_limit: int) -> Batches:
    """Our loader on the files; a SeqIO task where `task` names one."""
    where = (
        dict(source=StdlibSource())
        if task is None
        else dict(mixture_or_task_name=task, task_module="capibara.data.builtin_tasks")
    )
    loader = make_loader(Dataset(**where, vocabulary=ByteVocabulary(), length=length), batch_size=BATCH_ROWS)
    try:
        for _ in range(token_limit // (BATCH_ROWS * length)):
            yield next(loader)["segment_ids"]
    finally:
        loader.close()


def files_seqio(length: int, token_limit: int) -> Batches:
    """The same task with seqio's own packing, its long examples cut by a map."""
    tf, seqio = load_seqio()
    from capibara.data.tasks import tasks

    def pieces(example):
        ids = example["targets"]
        rows = tf.range(0, tf.size(ids), length)
        ends = tf.minimum(rows + length, tf.size(ids))
        return tf.data.Dataset.from_tensor_slices({"targets": tf.RaggedTensor.from_row_lengths(ids, ends - rows)})

    task = tasks.get("python_stdlib", "capibara.data.builtin_tasks")
    examples = task.get_dataset(None, "train", shuffle=True, seed=0, num_epochs=None)
    examples = examples.interleave(pieces, cycle_length=1, num_parallel_calls=tf.data.AUTOTUNE)
    examples = examples.map(lambda e: {"targets": tf.ensure_shape(e["targets"], [None])})
    packed = seqio.utils.trim_and_pack_dataset(examples, {"targets": length}, use_custom_ops=False)
    batches = packed.batch(BATCH_ROWS).prefetch(4).take(token_limit // (BATCH_ROWS * length))
    for batch in batches.as_numpy_iterator():
        yield batch["targets_segment_ids"]


def load_seqio():
    from capibara.data.tasks import tasks

    seqio = tasks.load()
    import tensorflow as tf

    return tf, seqio


def measure(batches: Callable[[], Batches], warm_up: int) -> tuple[float, float, float, int]:
    """Wall seconds, CPU seconds, fill and tokens of one run, without its first `warm_up` batches."""
    iterator = iter(batches())
    for _ in range(warm_up):
        next(iterator)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    tokens = positions = 0
    for segment_ids in iterator:
        tokens += np.count_nonzero(segment_ids)
        positions += segment_ids.size
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s, tokens / positions, tokens


def compare(case: str, contestants: dict[str, Callable[[], Batches]], rounds: int, warm_up: int = 0) -> list[dict]:
    """Runs the contestants in turns; rows of medians, with the ratio to seqio's wall time a token."""
    runs: dict[str, list] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            runs[name].append(measure(contestant, warm_up))
    results = []
    for name, measured in runs.items():
        rate = statistics.median(tokens / wall_s for wall_s, _, _, tokens in measured)
        cpu_rate = statistics.median(tokens / cpu_s for _, cpu_s, _, tokens in measured)
        results.append(
            {"case": case, "name": name, "tokens_per_s": rate, "tokens_per_cpu_s": cpu_rate, "fill": measured[-1][2]}
        )
    peer = next(row for row in results if row["name"].startswith("seqio"))
    for row in results:
        row["ratio_to_seqio"] = row["tokens_per_s"] / peer["tokens_per_s"]
    return results


def show(results: Iterable[dict]) -> Iterator[str]:
    """The lines of the table."""
    yield f"{'case':<12}{'packer':<24}{'Mtokens/s':>11}{'Mtokens/CPU s':>15}{'fill':>8}{'x seqio':>10}"
    for row in results:
        rates = f"{row['tokens_per_s'] / 1e6:>11.2f}{row['tokens_per_cpu_s'] / 1e6:>15.2f}"
        yield f"{row['case']:<12}{row['name']:<24}{rates}{row['fill']:>8.4f}{row['ratio_to_seqio']:>10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048, help="positions in a row")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, alternating")
    parser.add_argument("--tokens", type=int, default=3_000_000, help="tokens of a run")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()

    results = []
    for case, documents in read_corpora(args.tokens).items():
        pieces = cut(documents, args.length)
        contestants = {
            "ours, best fit": lambda: ours(documents, args.length, Packing.BEST_FIT),
            "ours, concat": lambda: ours(documents, args.length, Packing.CONCAT),
            "seqio trim_and_pack": seqio_packing(pieces, args.length),
            "grain best fit": grain_packing(pieces, args.length, "best_fit"),
            "grain first fit": grain_packing(pieces, args.length, "first_fit"),
            "grain concat": grain_packing(documents, args.length, "concat"),
        }
        results += compare(case, contestants, args.rounds)
    # Both pack in advance, ours a window and seqio 2048 examples: enough tokens that none comes for nothing.
    tokens = 8 * args.tokens
    contestants = {
        "ours, source": lambda: files_ours(args.length, None, tokens),
        "ours, SeqIO task": lambda: files_ours(args.length, "python_stdlib", tokens),
        "seqio task and packing": lambda: files_seqio(args.length, tokens),
    }
    results += compare("files", contestants, args.rounds, warm_up=16)
    print("\n".join(show(results)))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"length": args.length, "rounds": args.rounds, "cpus": len(os.sched_getaffinity(0)),
                       "results": results}, file, indent=2)  # fmt: skip


if __name__ == "__main__":
    main()
