"""The side of datasketch in benchmarks/prepare.py: MinHash and MinHashLSH of the word 5-grams of JSON lines.

python datasketch_dedup.py FOLDER WORKERS BANDS ROWS [--in_memory] [--xxhash]

Prints one JSON line: documents, duplicates, and seconds by stage. With --in_memory the texts are read before the clock starts,
and one process does everything. With --xxhash a faster function than the library's SHA-1 hashes the n-grams.
"""

from __future__ import annotations

import functools
import glob
import json
import multiprocessing
import re
import sys
import time

import xxhash
from datasketch import MinHash, MinHashLSH

bulk = functools.partial(MinHash.bulk, hashfunc=xxhash.xxh32_intdigest if "--xxhash" in sys.argv else None)
WORD = re.compile(r"\w+")
N_GRAM = 5


def grams(text: str) -> list[bytes]:
    words = WORD.findall(text.lower())
    return [" ".join(words[i : i + N_GRAM]).encode() for i in range(max(1, len(words) - N_GRAM + 1))]


def of_file(arguments: tuple[str, int]) -> list[MinHash]:
    path, permutations = arguments
    with open(path, encoding="utf-8") as file:
        return bulk((grams(json.loads(line)["text"]) for line in file), num_perm=permutations)


def main() -> None:
    folder, workers, bands, rows = sys.argv[1], *map(int, sys.argv[2:5])
    paths = sorted(glob.glob(f"{folder}/*.jsonl"))
    permutations = bands * rows
    more = {}
    begin_cpu_s = time.process_time()
    if "--in_memory" in sys.argv:
        texts = [json.loads(line)["text"] for path in paths for line in open(path, encoding="utf-8")]
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        found = bulk(map(grams, texts), num_perm=permutations)
    else:
        begin_s = time.perf_counter()
        with multiprocessing.Pool(workers) as pool:
            of_files = pool.map(of_file, [(path, permutations) for path in paths], chunksize=1)
        found = [one for of_one in of_files for one in of_one]
    signed_s = time.perf_counter()
    index = MinHashLSH(num_perm=permutations, params=(bands, rows))
    duplicates = 0
    for i, one in enumerate(found):
        duplicates += bool(index.query(one))
        index.insert(i, one, check_duplication=False)
    seconds = {"signatures": signed_s - begin_s, "bands": time.perf_counter() - signed_s}
    if "--in_memory" in sys.argv:
        more = {"stage_cpu_s": time.process_time() - begin_cpu_s}
    print(json.dumps({"documents": len(found), "duplicates": duplicates, "seconds": seconds, **more}))


if __name__ == "__main__":
    main()
