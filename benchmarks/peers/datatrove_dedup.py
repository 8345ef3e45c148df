"""The side of datatrove in benchmarks/prepare.py: its own MinHash pipeline on JSON lines, up to the list of what goes.

python datatrove_dedup.py FOLDER WORKERS BANDS ROWS WORK

Prints one JSON line: documents, duplicates, and seconds by stage. All settings but the sizes are the library's own.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.readers import JsonlReader


def main() -> None:
    folder, work = sys.argv[1], sys.argv[5]
    workers, bands, rows = map(int, sys.argv[2:5])
    config = MinhashConfig(n_grams=5, num_buckets=bands, hashes_per_bucket=rows)
    paths = sorted(glob.glob(f"{folder}/*.jsonl"))
    reader = JsonlReader(folder, glob_pattern="*.jsonl")
    stages = {
        "signatures": ([reader, MinhashDedupSignature(f"{work}/signatures", config)], len(paths)),
        "bands": ([MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config)], bands),
        "groups": ([MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config)], 1),
    }
    seconds = {}
    for name, (pipeline, tasks) in stages.items():
        begin_s = time.perf_counter()
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=min(workers, tasks), logging_dir=f"{work}/logs_{name}"
        ).run()
        seconds[name] = time.perf_counter() - begin_s
    duplicates = sum(os.path.getsize(path) // 4 for path in glob.glob(f"{work}/remove/*.remove"))
    documents = sum(sum(1 for _ in open(path, "rb")) for path in paths)
    print(json.dumps({"documents": documents, "duplicates": duplicates, "seconds": seconds}))


if __name__ == "__main__":
    main()
