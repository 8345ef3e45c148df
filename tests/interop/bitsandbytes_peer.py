"""Makes bitsandbytes.json: weights as bitsandbytes stores them, and their dequantized values.

    python tests/interop/bitsandbytes_peer.py tests/interop/bitsandbytes.json    (pip install torch bitsandbytes)

Each row is as long as a block: for other rows bitsandbytes 0.50's CPU kernel uses a neighbour's scale.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys

import bitsandbytes
import torch
from bitsandbytes import functional


def said(value: torch.Tensor) -> dict[str, object]:
    array = value.contiguous()
    data = array.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": str(array.dtype)[6:], "shape": list(array.shape), "data": base64.b64encode(data).decode()}


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def main(path: str) -> None:
    generator, cases = torch.Generator().manual_seed(0), {}
    # 260 blocks: their scales make two blocks of the second quantization.
    for name, kind, nested, shape, dtype in (
        ("nf4 nested", "nf4", True, (130, 128), torch.bfloat16),
        ("nf4", "nf4", False, (8, 64), torch.float16),
        ("fp4", "fp4", False, (4, 128), torch.float32),
    ):
        weight = (torch.randn(shape, generator=generator) / 8).to(dtype)
        weight[1] = 0
        packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        parts = {"": packed} | {f".{key}": value for key, value in state.as_dict(packed=True).items()}
        values = functional.dequantize_4bit(packed, state)
        cases[name] = {"parts": {key: said(value) for key, value in parts.items()}, "shape": shape}
        cases[name] |= {"dtype": str(dtype)[6:], "values": digest(values)}
    weight = (torch.randn((8, 48), generator=generator) / 8).half()
    codes, largest, _ = functional.int8_vectorwise_quant(weight)
    values = functional.int8_vectorwise_dequant(codes, largest).half()
    parts = {"": said(codes), "SCB": said(largest)}
    cases["int8"] = {"parts": parts, "shape": (8, 48), "dtype": "float16", "values": digest(values)}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"bitsandbytes": bitsandbytes.__version__, "cases": cases}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
