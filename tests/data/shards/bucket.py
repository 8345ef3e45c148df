"""A program of test_bucket.py: trains on gs://bucket/corpus and on the same files here, and prints whether rows are the same.

python bucket.py FOLDER STEPS
"""

from __future__ import annotations

import itertools
import os
import sys

import gcsfs
import numpy as np

from capibara.data.dataset import Dataset
from capibara.data.pipeline.loader import make_loader
from capibara.data.shards.source import ShardedSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.multihost.exits import run_process


def batches(files: str, steps: int) -> list[dict[str, np.ndarray]]:
    source = ShardedSource(files=(files,), block_bytes=4096)
    dataset = Dataset(source=source, vocabulary=ByteVocabulary(), length=256, window_rows=8, window_documents=8)
    loader = make_loader(dataset, batch_size=4)
    found = list(itertools.islice(loader, steps))
    loader.close()
    return found


def main(argv: object = None) -> int:
    folder, steps = sys.argv[1], int(sys.argv[2])
    if folder != "-":  # upload them, past the proxy
        store = gcsfs.GCSFileSystem(endpoint_url=os.environ["EMULATOR"], token="anon", skip_instance_cache=True)
        for name in os.listdir(folder):
            store.pipe_file(f"bucket/corpus/{name}", open(os.path.join(folder, name), "rb").read())
    there = batches("gs://bucket/corpus/*.jsonl", steps)
    here = batches(f"{folder}/*.jsonl", steps) if folder != "-" else there
    same = all(np.array_equal(one[key], other[key]) for one, other in zip(there, here, strict=True) for key in one)
    print("same" if same else "different", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_process(main))
