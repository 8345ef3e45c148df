"""A program that reads arrays with TensorStore for capibara.interop.zarr.arrays, in a process of its own.

TensorStore decompresses a chunk, or a node of an OCDBT store, before it checks its size: here that ends this process,
at a limit derived from the array's shape. Imports nothing of ours, and executes nothing from files.

Standard input: one request per line, {"list": STORE, "ends": [END, ...]}, {"open": SPEC} or {"read": SPEC, "index": [AXIS,
LAYER] or null}.
Standard output: for each request 8 bytes, the length of a JSON object, then the object, then its "bytes" of data.
"""

import json
import resource
import sys
from typing import Any

BASE_BYTES = 640 << 20  # for the libraries, and for a small array
CACHE_BYTES = 256 << 20


def main() -> int:
    """Answers requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _bound(BASE_BYTES)
    import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
    import tensorstore

    context = tensorstore.Context(
        {"cache_pool": {"total_bytes_limit": CACHE_BYTES}, "data_copy_concurrency": {"limit": 2}}
    )
    stores: dict[str, Any] = {}

    def opened(spec: dict[str, Any]) -> Any:
        key = json.dumps(spec)
        if key not in stores:
            stores[key] = tensorstore.open(spec, open=True, read=True, context=context).result()
        return stores[key]

    for line in sys.stdin.buffer:
        request = json.loads(line)
        data: Any = b""
        reply: dict[str, Any]
        try:
            if "list" in request:
                keys = tensorstore.KvStore.open(request["list"]).result().list().result()
                ends = tuple(request["ends"])
                reply = {"names": [name for name in map(bytes.decode, keys) if name.endswith(ends)]}
            elif "open" in request:
                store = opened(request["open"])
                chunk = list(store.chunk_layout.read_chunk.shape or store.shape)
                reply = {"shape": list(store.shape), "dtype": store.dtype.numpy_dtype.name, "chunk": chunk}
            else:
                _bound(BASE_BYTES + request["need"])
                data, reply = _read(opened(request["read"]), request["index"])
        except (ValueError, KeyError, TypeError, OSError, ArithmeticError, UnicodeDecodeError, MemoryError) as error:
            data, reply = b"", {"error": " ".join(str(error).split())[:300] or type(error).__name__}
        answer = json.dumps(reply | {"bytes": len(data)}).encode()
        sys.stdout.buffer.write(len(answer).to_bytes(8, "little") + answer)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return 0


def _read(store: Any, index: list[int] | None) -> tuple[Any, dict[str, Any]]:
    import numpy as np

    part = store if index is None else store[(*(slice(None),) * index[0], index[1])]
    value = np.ascontiguousarray(part.read().result())
    return value.reshape(-1).view(np.uint8).data, {"shape": list(value.shape), "dtype": value.dtype.name}


def _bound(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size, hard))


if __name__ == "__main__":
    sys.exit(main())
