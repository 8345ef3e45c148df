"""Proof by the TPU compiler: compiles a lowered train step and reports its memory and costs. Nothing is run."""

from __future__ import annotations

import dataclasses
import re
import time

import jax

from capibara.planner import hlo

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# CompileTimeHbmOom says "Used 18.04G of 15.75G hbm.", or where temporaries alone are too much "the total memory required
# for HLO temporaries (20.42G) exceeds available HBM (15.75G)".
_SIZE = r"([\d.]+)([KMGT]?)"
_USED = re.compile(
    rf"Used {_SIZE} of {_SIZE} hbm|temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one step on one device.

    Attributes:
      fits: whether the step fits the device's HBM; where it does not, only peak_bytes and compile_s say something.
      peak_bytes: most HBM in use at one time, arguments included; of a step that does not fit what it would need.
      limit_bytes: the HBM that there is, where the compiler said it.
      argument_bytes, output_bytes, temporary_bytes: state and batch, results (the donated state is no second one),
        and everything between them, packed without regard to time.
      compile_s: seconds on the clock.
      costs: read from the optimised HLO.
      text: the optimised HLO.
    """

    fits: bool
    peak_bytes: int | None
    compile_s: float
    limit_bytes: int | None = None
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    costs: hlo.Costs = dataclasses.field(default_factory=hlo.Costs)
    text: str = ""


def compile_train_step(lowered: jax.stages.Lowered) -> Compiled:
    """Compiles a step that was lowered for the devices of a slice (planner.topology.slice_devices).

    Args:
      lowered: the step, with donated state: what training.run.lower_step gives.

    Returns:
      The report; a step that does not fit is one too, any other fault of the compiler is raised.
    """
    begin_s = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(str(error)):
            raise
        used, limit = hbm_need(str(error))
        return Compiled(fits=False, peak_bytes=used, limit_bytes=limit, compile_s=time.perf_counter() - begin_s)
    compile_s = time.perf_counter() - begin_s
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return Compiled(
        fits=True,
        peak_bytes=memory.peak_memory_in_bytes,
        compile_s=compile_s,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        costs=hlo.costs(hlo.parse(text)),
        text=text,
    )


def out_of_memory(message: str) -> bool:
    """Whether a compiler's error says that the program does not fit the HBM."""
    return "CompileTimeHbmOom" in message or ("RESOURCE_EXHAUSTED" in message and "memory space hbm" in message)


def hbm_need(message: str) -> tuple[int | None, int | None]:
    """(bytes needed, bytes there) of an out-of-memory error; None where it does not say.

    What is needed may be that of temporaries alone: no more than the whole need.
    """
    match = _USED.search(message)
    if not match:
        return None, None
    sizes = [text for text in match.groups() if text is not None]
    used, limit = (int(float(sizes[i]) * _UNITS[sizes[i + 1].upper()]) for i in (0, 2))
    return used, limit
