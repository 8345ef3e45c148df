"""The MaxText side of benchmarks/tpu_compile.py: MaxText's own ahead-of-time compilation of its train step for a slice.

Runs in a virtual environment of its own (Python 3.12: pip install 'maxtext[tpu]==0.2.5') and imports nothing of
capibara. MaxText's train_compile does everything; this only keeps the compiled step: its HLO goes to --hlo, its memory
to one JSON line on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from importlib import metadata

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON object of MaxText's configuration")
    parser.add_argument("--hlo", required=True, help="file for the optimised HLO")
    options = parser.parse_args()

    import maxtext
    from maxtext.trainers.pre_train import train_compile

    kept = {}
    compile_ = train_compile.jit_and_compile

    def keep(*args, **kwargs):
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        kept["compiled"] = compile_(*args, **kwargs)
        kept["compile_s"] = time.perf_counter() - begin_s
        kept["cpu_s"] = time.process_time() - begin_cpu_s
        return kept["compiled"]

    train_compile.jit_and_compile = keep
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    settings = json.loads(options.settings)
    line = {"version": metadata.version("maxtext"), "libtpu": metadata.version("libtpu")}
    try:
        train_compile.main(["train_compile", base, *(f"{key}={value}" for key, value in settings.items())])
    except Exception as error:  # noqa: BLE001: any fault of the peer is its result
        print(json.dumps(line | {"error": " ".join(str(error).split())[:2000]}), flush=True)
        return
    memory = kept.pop("compiled")
    with open(options.hlo, "w", encoding="utf-8") as file:
        file.write(memory.as_text())
    stats = memory.memory_analysis()
    names = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
    names += ("peak_memory_in_bytes",)
    print(json.dumps(line | kept | {name: getattr(stats, name) for name in names}), flush=True)


if __name__ == "__main__":
    main()
