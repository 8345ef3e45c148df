"""Sorts the operations of a trace into categories a reader knows."""

from __future__ import annotations

import re

COLLECTIVES = "collectives"
# The categories of TPU traces (hlo_category), names of operations of all back ends, and kernels of NVIDIA's libraries: nvjet,
# xmma and cutlass multiply matrices, sdpa and fmha are attention, whose backward pass ends with dot_do_o and convert_dq. The
# first that matches counts.
_RULES = (
    (
        COLLECTIVES,
        r"all-reduce|all-gather|reduce-scatter|all-to-all|collective|ragged-all|send|recv|ppermute|psum|nccl|nvshmem",
    ),
    ("host transfers", r"infeed|outfeed|copy-start|copy-done|host|memcpy(h2d|d2h)"),
    ("attention kernels", r"attention|splash|flash|mha|sdpa|dot_do_o|convert_dq"),
    (
        "matrix products",
        r"convolution|\bdot|matmul|gemm|einsum|ragged-dot|\bgmm|megablox|cublas|nvjet|xmma|cutlass|splitk",
    ),
    ("custom kernels", r"custom[- ]call|custom fusion|pallas|mosaic|tpu_custom"),
    ("gather and scatter", r"gather|scatter|dynamic-slice|dynamic-update|dynamic_slice|dynamic_update"),
    ("sorting", r"\bsort|top-?k"),
    ("random numbers", r"rng|threefry|random"),
    ("reductions", r"reduce|\breduction"),
    (
        "copies and layouts",
        r"copy|memcpy|memset|transpose|bitcast|reshape|concatenate|\bpad|slice|broadcast|iota|data formatting|convert",
    ),
    ("control flow", r"\bwhile|conditional|\bcall\b|tuple|parameter|parallel_loop"),
    (
        "fused operations",
        r"fusion|fused|elementwise|wrapped|\badd|multiply|tanh|exponential|select|compare|divide|subtract",
    ),
)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _RULES)


def category_of(name: str, hlo_category: str | None = None) -> str:
    """The category of an operation.

    Args:
      name: of the operation in the compiled program, such as "fusion.12".
      hlo_category: what the trace itself says; None: it says nothing.
    """
    for text in filter(None, (hlo_category, name)):
        for category, pattern in _PATTERNS:
            if pattern.search(text):
                return category
    return "other"
