"""XLA options by TPU generation: one table for steps that are compiled to be proven and to be run."""

from __future__ import annotations

import dataclasses
import os
import re

from capibara.planner.hardware import chips
from capibara.sharding import Plan, Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One XLA option.

    Attributes:
      name, value: in the form of JAX's compiler_options.
      reason: its effect, and how that is known: "compiled" means according to the compiler's report of a step.
      source: where it comes from.
      tensor: whether it also applies to meshes with tensor parallelism.
      offload: whether it applies only to plans that keep results in the host's memory.
    """

    name: str
    value: str
    reason: str
    source: str
    tensor: bool = True
    offload: bool = False


# "Compiled" below means with jax 0.10.2 and libtpu 0.0.42 and with jax 0.12 and libtpu 0.0.50, for a train step of a
# decoder of 4 layers, 2048 wide, with a vocabulary of 32,000, 4 rows of 2048 tokens per chip, remat full, fsdp over a
# slice of 4x4. "Cycles" are the compiler's estimates, without kernels and collectives.
_COLLECTIVE_MATMUL = (
    "Gathers the weights of a matmul, and scatters its gradient, at once, not in as many steps as the axis has chips "
    "(collective matmul): over fsdp each step reads and writes the whole result again. Compiled: HBM traffic 120 to 41 "
    "GB a step on v5e, 140 to 45 GB on v6e, cycles -63% and -71%, peak -20% and +0.1%, with either libtpu; on v5e:2x2 "
    "cycles -20%, peak -7%. Measured by the source on v6e-8: 8B parameters 9.8% faster, peak 28.3 to 22.2 GiB. "
    "Collectives are fewer and larger, and no longer hidden step by step. Tensor parallelism gathers activations, for "
    "which collective matmul was made (Wang et al., ASPLOS 2023): there the compiler's choice holds."
)
_COLLECTIVE_MATMUL_SOURCE = (
    "github.com/vlasenkoalexey/tpu_performance_autoresearch_wiki, Qwen3-8B on v6e-8, experiments v116, v117; MaxText "
    "and recipes for v6e turn it off by xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000: the same collectives"
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

_SCOPED_VMEM = Option(
    name="xla_tpu_scoped_vmem_limit_kib",
    value="98304",
    reason=(
        "Lets a fusion use 96 MiB of vector memory, not 16. Compiled with libtpu 0.0.50 for 1.1B on v6e-64, remat full, with "
        "12 rows of 2048: cycles -16%, peak +0.7% (benchmarks/tpu_compile.py --rows=1b-12-v6e); compiling takes several "
        "times as long. Worse with collective matmul."
    ),
    source="github.com/AI-Hypercomputer/maxtext, recipes for v6e; github.com/apple/axlearn",
    tensor=False,
)

_HOST_COPIES = Option(
    name="xla_tpu_enable_all_experimental_scheduler_features",
    value="true",
    reason=(
        "Starts copies to and from the host's memory early and ends them late. Compiled with libtpu 0.0.42 for Llama 3 70B on "
        "v6e-64, 2 rows of 8192, the layers' inputs offloaded (8.4 ms a layer over PCIe): the copy back has the whole "
        "backward pass of a layer to hide behind, 160 ms, not 1.7 ms; peak +0.3%. On v5e copies are hidden without it. "
        "Without effect on them: xla_tpu_host_transfer_overlap_limit, xla_tpu_pcie_bandwidth_multiplier, "
        "xla_lhs_prioritize_async_depth_over_stall, xla_tpu_pipeline_memory_host_transfers."
    ),
    source="github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py, HOST_OFFLOAD_FLAGS",
    offload=True,
)

# Tried on that step and rejected, though published recipes use them (libtpu 0.0.42, v6e, with collective matmul):
# - xla_tpu_enable_async_collective_fusion and its kin for all-gathers (MaxText): cycles -8.7%, but libtpu 0.0.50
#   refuses a program with them on v6e ("not supported/recommended on platforms other than TPU v5e"); on v5e they are
#   the default (OpenXLA's guide).
# - xla_tpu_enable_ici_ag_pipelining and the two xla_should_*_in_chain (OpenXLA's guide): peak +0.9%, cycles -0.8%.
# - xla_tpu_assign_all_reduce_scatter_layout and the two that go with it (MaxText): the same program.
# - xla_tpu_enable_sunk_dcn_allreduce_done_with_host_reduction (axlearn, for several slices): libtpu 0.0.50 refuses it.
TABLE: dict[str, tuple[Option, ...]] = {"v5e": _FSDP, "v6e": (*_FSDP, _SCOPED_VMEM, _HOST_COPIES)}


def of_plan(chip_name: str, plan: Plan) -> dict[str, str]:
    """The options to compile a plan's train step with, as `options` gives them."""
    return options(chip_name, tensor=plan.axes["tensor"], offload=plan.remat_policy.kind is Remat.OFFLOAD)


def options(chip_name: str, *, tensor: int = 1, offload: bool = False) -> dict[str, str]:
    """The options to compile a train step with, for compiler.compile.compile_train_step and for JAX.

    Options that the user sets in LIBTPU_INIT_ARGS are omitted, so that the user's values hold.

    Args:
      chip_name: a chip's name, alias or JAX device kind.
      tensor: size of the mesh axis for tensor parallelism.
      offload: whether results of layers are kept in the host's memory.

    Returns:
      name -> value; empty if the compiler's defaults are the best known, and for unknown devices.
    """
    taken = set(re.findall(r"--(\w+)", os.environ.get("LIBTPU_INIT_ARGS", "")))
    known = chips.find(chip_name)
    table = TABLE.get(known.name, ()) if known else ()
    applicable = (o for o in table if (o.tensor or tensor == 1) and (offload or not o.offload))
    return {o.name: o.value for o in applicable if o.name not in taken}
