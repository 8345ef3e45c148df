"""How the compiler packs a program's buffers into each memory of a device: the limit that it checks.

memory_analysis() has one peak for all memories: the largest of HBM, vector memory and the host's, so that a step with
many buffers in the host's memory seems to need no HBM beside its arguments (findings/libtpu_peak_of_host_memory.sh). XLA's
usage report has each memory by itself. It is written only to a folder, so that a compile needs one (the option
`xla_dump_to`). With the program's code it is the limit to the mebibyte, by bisection with `xla_tpu_max_hbm_size_mib`
(tests/planner/compiler/test_assignment.py).
"""

from __future__ import annotations

import pathlib
import re

_REPORTS = "*memory-usage-report.txt"
_SPACE = re.compile(r"^Memory Space: .*\(color=(\d+)\)\nTotal bytes: (\d+)", re.MULTILINE)
_HBM = 0


def options(folder: str) -> dict[str, str]:
    """The compiler option that has the report written to a folder."""
    return {"xla_dump_to": folder}


def hbm_bytes(folder: str) -> int | None:
    """HBM of arguments, results and temporaries as the compiler packs them, without the program's code, in bytes.

    Args:
      folder: of one compile with `options`.

    Returns:
      None: there is no report, as when the program was taken from JAX's compilation cache.
    """
    reports = [path.read_text(encoding="utf-8") for path in pathlib.Path(folder).glob(_REPORTS)]
    sizes = [int(size) for text in reports for space, size in _SPACE.findall(text) if int(space) == _HBM]
    return max(sizes, default=None)
