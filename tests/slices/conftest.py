"""What the tests of slices share (matrix.py), and the table of all that they compiled, at the end of the run."""

from __future__ import annotations

import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

_ROW = "compiled for a slice"
_COLUMNS = ("program", "model", "slice", "mesh", "compiled in", "peak MiB", "collectives")


@pytest.fixture(autouse=True)
def _compiler(request):
    """Without a cache, which cannot hold programs of devices that are not here; in `make test` at the least effort."""
    before = jax.config.jax_enable_compilation_cache, jax.config.jax_optimization_level
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_optimization_level", "O0" if request.config.option.markexpr == "not heavy" else before[1])
    yield
    jax.config.update("jax_enable_compilation_cache", before[0])
    jax.config.update("jax_optimization_level", before[1])


@pytest.fixture
def tell(request):
    """(program, model, slice, mesh, report) -> a row of the table."""

    def tell(program, model, slice_name, mesh, report):
        sizes = " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
        counts = ", ".join(f"{round(count)} {kind}" for kind, count in sorted(report.costs.collective_counts.items()))
        peak = f"{report.peak_bytes / 2**20:.1f}"
        row = (program, model, slice_name, sizes, f"{report.compile_s:.1f} s", peak, counts or "none")
        request.node.user_properties.append((_ROW, row))

    return tell


def pytest_terminal_summary(terminalreporter):
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, ())]
    rows = sorted({tuple(row) for one in reports for name, row in one.user_properties if name == _ROW})
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows)]
    terminalreporter.section(f"{len(rows)} programs compiled for slices")
    for row in (_COLUMNS, *rows):
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
