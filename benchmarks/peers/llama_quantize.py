"""llama.cpp's own llama-quantize, without its binary: what ours is compared with.

    python llama_quantize.py FOLDER SOURCE.gguf TARGET.gguf FILE_TYPE [--threads=1]

FOLDER has llama.cpp's shared libraries: libggml-base, libggml and libllama, as npm's @node-llama-cpp/linux-x64 brings them.
FILE_TYPE is the number of general.file_type (15 is Q4_K_M). Needs Python alone. Prints the seconds that
llama_model_quantize took.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import time


class Params(ctypes.Structure):
    """llama_model_quantize_params: what is set here, and room for what comes after it in any version."""

    _fields_ = [("threads", ctypes.c_int32), ("file_type", ctypes.c_int32), ("rest", ctypes.c_char * 504)]


def library(folder: str) -> ctypes.CDLL:
    """libllama, after what it needs."""
    loaded = None
    for stem in ("libggml-base", "libggml", "libllama"):
        path = next(path for path in sorted(pathlib.Path(folder).iterdir()) if path.name.partition(".")[0] == stem)
        loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("file_type", type=int)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")  # llama.cpp itself writes to standard output
    os.dup2(2, 1)
    llama = library(args.folder)
    llama.llama_model_quantize_default_params.restype = Params
    params = llama.llama_model_quantize_default_params()
    params.threads, params.file_type = args.threads, args.file_type
    start = time.perf_counter()
    code = llama.llama_model_quantize(args.source.encode(), args.target.encode(), ctypes.byref(params))
    if code:
        raise SystemExit(f"llama_model_quantize gave {code}")
    print(time.perf_counter() - start, file=out, flush=True)


if __name__ == "__main__":
    main()
