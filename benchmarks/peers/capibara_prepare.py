"""Our side of benchmarks/prepare.py: the preparation of a corpus of JSON lines, timed by stage.

python capibara_prepare.py FOLDER WORKERS BANDS ROWS OUT [--in_memory] [--filters] [--similarity=0.7]

Prints one JSON line: documents, duplicates, and seconds by stage. With --in_memory the texts are read before the clock starts,
and one process only makes signatures and compares their bands. --filters adds datatrove's Gopher filter and the language.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import pathlib
import sys
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

from capibara.builders.preparation import build, near, tables
from capibara.builders.preparation.filters import DatatroveFilter, LanguageFilter
from capibara.builders.preparation.settings import CorpusPreparation


def in_memory(folder: str, settings: near.NearDuplicates) -> dict:
    texts = [json.loads(line)["text"] for path in sorted(glob.glob(f"{folder}/*.jsonl")) for line in open(path)]
    near.signatures(["loads the library and the tables of characters, \u00e4"], settings)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    found = near.signatures(texts, settings)
    signed_s = time.perf_counter()
    groups, every = near.Groups(np.zeros(len(texts), np.int64)), np.arange(len(texts))
    for key in near.keys(found, settings):
        one, other = tables.repeated(key[None], every)
        similar = near.are_similar(found[one], found[other], settings)
        groups.join(one[similar], other[similar])
    duplicates = int((groups.first(every) != every).sum())
    seconds = {"signatures": signed_s - begin_s, "bands": time.perf_counter() - signed_s}
    cpu_s = time.process_time() - begin_cpu_s
    return {"documents": len(texts), "duplicates": duplicates, "seconds": seconds, "stage_cpu_s": cpu_s}


def cpu_s() -> float:
    """CPU seconds of this process and its workers."""
    ticks = 0
    for pid in ["self", *pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that have ended
    return ticks / os.sysconf("SC_CLK_TCK")


def pipeline(folder: str, workers: int, out: str, settings: CorpusPreparation) -> dict:
    begins: dict[str, tuple[float, float]] = {}

    def progress(topic: str, _: str) -> None:
        if topic not in begins:
            begins[topic] = (time.perf_counter(), cpu_s())

    manifest = build.prepare([folder], out, settings, workers, progress)
    edges = [*begins.values(), (time.perf_counter(), cpu_s())]
    seconds, of_cpu = (
        {topic: edges[i + 1][which] - edges[i][which] for i, topic in enumerate(begins)} for which in (0, 1)
    )
    of_cpu["start"] = edges[0][1]
    counts = dict(manifest.counts)
    duplicates = counts["exact_duplicates"] + counts["near_duplicates"]
    about = {"documents": counts["documents"], "duplicates": duplicates, "counts": counts}
    return about | {"seconds": seconds, "cpu_seconds": of_cpu}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    for name in ("workers", "bands", "rows"):
        parser.add_argument(name, type=int)
    parser.add_argument("out")
    parser.add_argument("--in_memory", action="store_true")
    parser.add_argument("--filters", action="store_true")
    parser.add_argument("--similarity", type=float, default=0.7)
    args = parser.parse_args()
    settings = near.NearDuplicates(bands=args.bands, rows=args.rows, similarity=args.similarity)
    if args.in_memory:
        print(json.dumps(in_memory(args.folder, settings)))
        return
    filters = (LanguageFilter(languages=("en",), least=0.0), DatatroveFilter(name="GopherQualityFilter"))
    chosen = CorpusPreparation(near=settings, filters=filters if args.filters else ())
    print(json.dumps(pipeline(args.folder, args.workers, args.out, chosen)))


if __name__ == "__main__":
    main()
