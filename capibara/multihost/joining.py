"""Connects the processes of a run on several hosts: JAX detects the cluster, `roll_call` waits for all processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from capibara.core import extras
from capibara.core.types import UserError
from capibara.multihost import peers, roll_call

if TYPE_CHECKING:
    import jax

_JAX_CONNECTS_S = 120  # after the roll call, when all processes are there
# Packages whose versions decide what a process compiles, or which rows it reads.
_PACKAGES = (extras.DISTRIBUTION, "flax", "grain", "jax", "jaxlib", "libtpu", "numpy", "optax", "orbax-checkpoint")
# Variables with a launcher's number of processes that JAX may not detect: Open MPI 5, MPICH, Slurm without srun.
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")
_PODS = "KUBERNETES_SERVICE_HOST"  # set in every pod
_INDEXED = "JOB_COMPLETION_INDEX"  # set in the pods of an indexed job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joining:
    """The command line's options on the other processes; JAX detects those that are None.

    Attributes:
      coordinator_address: "HOST:PORT" of process 0.
      num_processes: of the run.
      process_id: index of this process, from 0.
      timeout_s: for all processes to connect.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.num_processes is not None and self.num_processes < 1:
            raise UserError(f"--num_processes is {self.num_processes}, must be at least 1")
        if self.process_id is not None and not 0 <= self.process_id < (self.num_processes or self.process_id + 1):
            raise UserError(f"--process_id is {self.process_id}, must be from 0 to --num_processes - 1")
        if not 0 < self.timeout_s < 86_400:
            raise UserError(f"--join_timeout is {self.timeout_s:g}, must be above 0 and below 86400 seconds")


class _Member(NamedTuple):
    """This process among all of them; local_device_ids: the host's accelerators that it uses, None: all."""

    address: str
    num_processes: int
    process_id: int
    local_device_ids: list[int] | None


def join(
    joining: Joining,
    facts: Mapping[str, str],
    *,
    emulated: bool = False,
    heartbeat_s: int = 100,
    tell: Callable[[str], None] = print,
) -> None:
    """Connects this process with the others of the run, if there are any; call it before JAX is first used.

    Args:
      joining: options of the command line.
      facts: values that must be the same on all processes, beside the packages' versions: name -> text.
      emulated: the devices are emulated (`devices.emulate`): connect only if flags or JAX's environment variables name
        other processes; the machine's slice is ignored.
      heartbeat_s: seconds without a heartbeat after which a process counts as dead, and the others end.
      tell: called on process 0 with a line on how many have connected.

    Raises:
      UserError: the processes differ, or their address, number or index is unknown.
      TryAgain: not all have connected in time.
    """
    import jax

    member = _find(joining, emulated)
    if member is None or member.num_processes == 1:
        return
    mine = roll_call.Process(member.process_id, member.num_processes, {**_versions(), **facts})
    processes = roll_call.call(mine, member.address, joining.timeout_s)
    jax.distributed.initialize(
        coordinator_address=member.address,
        num_processes=member.num_processes,
        process_id=member.process_id,
        local_device_ids=member.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=_JAX_CONNECTS_S,
        heartbeat_timeout_seconds=heartbeat_s,
    )
    peers.listen()
    if jax.process_index() == 0:
        tell(_joined(processes, jax.devices()))


def _joined(processes: Sequence[roll_call.Process], devices: Sequence[jax.Device]) -> str:
    """A line with the numbers of processes, hosts, chips and slices."""
    hosts = len({item.host for item in processes})
    # A chip of v2, v3, v4 or v5p may have two devices (cores), with the same coordinates.
    chips = {(getattr(device, "slice_index", 0), *getattr(device, "coords", (device.id,))) for device in devices}
    slices = len({chip[0] for chip in chips})
    there = f"{len(devices)} devices"
    if devices[0].platform == "tpu":
        there = f"{len(chips)} chips in {slices} slice{'s' * (slices > 1)}"
    return f"joined {len(processes)} processes on {hosts} host{'s' * (hosts > 1)}: {there}"


def _versions() -> dict[str, str]:
    result = {"version of Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        if (version := extras.version(name)) is not None:
            result[f"version of {name}"] = version
    return result


def _find(joining: Joining, emulated: bool) -> _Member | None:
    """Finds address, number and index of the processes; None: there is only this one."""
    address = joining.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    count = _number("JAX_NUM_PROCESSES") if joining.num_processes is None else joining.num_processes
    index = _number("JAX_PROCESS_ID") if joining.process_id is None else joining.process_id
    is_named = (address, count, index) != (None, None, None)
    if emulated and not is_named:
        return None
    address, count, index, local = _detected(address, count, index, joining.timeout_s)
    if address is None and not is_named:
        return None
    missing = {"coordinator_address": address, "num_processes": count, "process_id": index}
    if lacking := [f"--{name}" for name, value in missing.items() if value is None]:
        raise UserError(
            f"{', '.join(lacking)} is not set, and JAX does not detect a cluster that sets it: pass it, too"
        )
    assert address is not None and count is not None and index is not None
    if not 0 <= index < count:
        raise UserError(
            f"the process id is {index}, must be from 0 to {count - 1}: correct --process_id or --num_processes"
        )
    return _Member(address, count, index, None if local is None else list(local))


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    if text and not text.strip().isdigit():
        raise UserError(f"{variable} is {text!r}, must be a number")
    return int(text) if text else None


def _detected(
    address: str | None, count: int | None, index: int | None, timeout_s: float
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Lets JAX detect what is None: on TPU VMs, GKE, Slurm, Open MPI and in indexed Kubernetes jobs."""
    from jax._src import clusters  # as jax.distributed.initialize does, which aborts if a process is missing

    text = os.environ.get("JAX_LOCAL_DEVICE_IDS", "")
    if text and not all(item.strip().isdigit() for item in text.split(",")):
        raise UserError(f"JAX_LOCAL_DEVICE_IDS is {text!r}, must be numbers with commas between, such as 0,1")
    local = [int(item) for item in text.split(",")] if text else None
    with _outside_of_pods() if _INDEXED not in os.environ else contextlib.nullcontext():
        try:
            result = clusters.ClusterEnv.auto_detect_unset_distributed_params(
                address, count, index, local, None, int(timeout_s)
            )
        except ModuleNotFoundError as error:
            raise UserError(
                f"the other hosts cannot be found without the package {error.name}: {extras.install_command('tpu')}"
            ) from None
        except (OSError, RuntimeError, ValueError, KeyError) as error:  # requests' errors are OSErrors
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"the other hosts cannot be found ({cause}): pass --coordinator_address, --num_processes and --process_id"
            ) from error
    if result[0] is None and (whose := _one_of_several()):
        print(
            f"note: this {whose}, but JAX does not detect the others, so it runs alone: to connect them, pass "
            "--coordinator_address, --num_processes and --process_id",
            file=sys.stderr,
        )
    return result


def _one_of_several() -> str | None:
    """A phrase on what suggests that there are other processes, though JAX detects none; None: nothing does."""
    if _INDEXED in os.environ and _PODS in os.environ:
        return f'pod is number {os.environ[_INDEXED]} of an indexed job (pip install "jax[k8s]")'
    counts = {name: os.environ.get(name, "").strip() for name in _COUNTS}
    return next((f"process is one of {n} ({name})" for name, n in counts.items() if n.isdigit() and int(n) > 1), None)


@contextlib.contextmanager
def _outside_of_pods() -> Iterator[None]:
    """Hides the variable from which JAX concludes that every pod belongs to an indexed job."""
    held = os.environ.pop(_PODS, None)
    try:
        yield
    finally:
        if held is not None:
            os.environ[_PODS] = held
