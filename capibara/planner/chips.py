"""What accelerators can do, by the name that JAX gives the device."""

from __future__ import annotations

# Peak dense bf16 FLOP/s of one JAX device. Source: the Cloud TPU system architecture pages (v4, v5e, v5p, v6e, TPU7x),
# NVIDIA's H100 and H200 data sheets (SXM, without sparsity). A TPU7x chip shows as two devices.
_PEAK_BF16_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak bf16 FLOP/s of one device of this kind; None where it is not known (CPU, other names)."""
    return _PEAK_BF16_FLOPS.get(device_kind)
