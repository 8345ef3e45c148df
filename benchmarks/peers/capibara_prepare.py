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


def pipeline(folder: str, workers: int, out: str, settings: CorpusPreparation) -> dict:
    begins: dict[str, float] = {}
    manifest = build.prepare(
        [folder], out, settings, workers, lambda topic, _: begins.setdefault(topic, time.perf_counter()) and None
    )
    edges = [*begins.values(), time.perf_counter()]
    seconds = {topic: end - begin for topic, begin, end in zip(begins, edges, edges[1:])}
    duplicates = manifest.counts["exact_duplicates"] + manifest.counts["near_duplicates"]
    counts = dict(manifest.counts)
    return {"documents": counts["documents"], "duplicates": duplicates, "seconds": seconds, "counts": counts}


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
