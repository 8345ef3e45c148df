"""llama.cpp's server, of the package xllamacpp: python llama_server.py MODEL.gguf PORT SLOTS THREADS LENGTH."""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main() -> None:
    """Serves until a signal."""
    model, port, slots, threads, length = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port, params.hostnames = int(port), ["127.0.0.1"]
    params.n_parallel, params.n_ctx = int(slots), int(slots) * int(length)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
