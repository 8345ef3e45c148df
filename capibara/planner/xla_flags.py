"""XLA options by TPU generation: one table, for steps that are compiled to be proven and those compiled to run."""

from __future__ import annotations

import dataclasses
import os
import re

from capibara.planner import chips


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One XLA option.

    Attributes:
      name, value: as compiler_options of jax take them.
      reason: what it is good for, and how that is known: "compiled" is what the compiler says of a step.
      source: where it comes from.
      tensor: whether it is for meshes with tensor parallelism too.
    """

    name: str
    value: str
    reason: str
    source: str
    tensor: bool = True


# What is measured here is compiled, with jax 0.10.2 and libtpu 0.0.42 and with jax 0.12 and libtpu 0.0.50: a train step
# of a decoder of 4 layers, 2048 wide, a vocabulary of 32,000, 4 rows of 2048 tokens a chip, remat full, fsdp over a
# slice of 4x4. "Cycles" are the compiler's estimates, kernels and collectives not in them.
_COLLECTIVE_MATMUL = (
    "Gathers weights, and scatters gradients, whole instead of in one step of each matmul per chip of the axis ("
    "collective matmul), whose many small matmuls and updates cost more than what they hide under fsdp. @COMPILED@ On v6e-8 "
    "an 8B model ran 9.8% faster and its peak fell from 28.3 to 22.2 GiB (source). Tensor parallelism gathers "
    "activations, for which it was made (Wang et al. 2023, ASPLOS): there the compiler's choice holds."
)
_COLLECTIVE_MATMUL_SOURCE = (
    "github.com/vlasenkoalexey/tpu_performance_autoresearch_wiki, Qwen3-8B on v6e-8, experiments v116 and v117; Google's "
    "recipe for Llama 3.1 8B on v6e-32 turns it off too, by xla_jf_spmd_threshold_for_windowed_einsum_mib"
)
_FSDP = tuple(
    Option(
        name=f"xla_tpu_{collective}_collective_matmul_mode",
        value="none",
        reason=_COLLECTIVE_MATMUL,
        source=_COLLECTIVE_MATMUL_SOURCE,
        tensor=False,
    )
    for collective in ("all_gather", "reduce_scatter")
)

# @LEFT_OUT@
TABLE: dict[str, tuple[Option, ...]] = {"v5e": _FSDP, "v6e": _FSDP}


def options(chip_name: str, *, tensor: int = 1) -> dict[str, str]:
    """The options that a train step is compiled with: planner.compile.compile_train_step and jax take them.

    Those that the user sets in LIBTPU_INIT_ARGS are left out, so that the user's hold.

    Args:
      chip_name: a chip's name, alias or JAX device kind.
      tensor: size of the mesh axis for tensor parallelism.

    Returns:
      name -> value; empty where the compiler's own choices are the best that is known, and for devices that are not.
    """
    taken = set(re.findall(r"--(\w+)", os.environ.get("LIBTPU_INIT_ARGS", "")))
    known = chips.find(chip_name)
    table = TABLE.get(known.name, ()) if known else ()
    return {o.name: o.value for o in table if o.name not in taken and (o.tensor or tensor == 1)}
