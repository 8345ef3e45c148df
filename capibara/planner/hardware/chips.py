"""Specifications of accelerators: peak FLOP/s, memory, links, hosts and list prices, each figure with its source.

Sources that are named more than once:
  [v4], [v5e], [v5p], [v6e], [tpu7x]: the page of that chip in Google's documentation, docs.cloud.google.com/tpu/docs/
    with v5e and so on behind it. [tpu7x] has v5p, v6e and TPU7x side by side.
  [book]: Austin et al. 2025, "How to Scale Your Model", jax-ml.github.io/scaling-book, chapter 2, "TPU Specs"; and
    [book gpus], its chapter 12.
  [h100], [h200]: NVIDIA's data sheets of the SXM modules; FLOP/s are those of dense matrices.
  [catalog]: SkyPilot's copy of Google's billing catalogue, github.com/skypilot-org/skypilot-catalog.
"Derived" means computed from other figures; "assumed" means that no source was found.

The pages give ICI bandwidth per chip, over all links and both directions. Per link and direction that is 1/0.9 of the
figures in [book], which are closer to what collectives reach, and are used here.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping

from capibara.core.fields import did_you_mean
from capibara.core.types import UserError

GIB = 2**30
# Bytes per second of a network of one gigabit per second.
_GBIT = 1e9 / 8
_QUOTED = 'Google\'s price list as quoted in "How to Scale Your Model", chapter 7'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """On-demand price of a chip.

    Attributes:
      usd: US dollars per chip-hour.
      date: of the source, as YYYY-MM or YYYY-MM-DD; if it has none, when it was read.
      source: where it was published.
      region: Google Cloud region or regions that it applies to.
    """

    usd: float
    date: str
    source: str
    region: str

    def describe(self) -> str:
        """Its date, and its age where that is a quarter of a year or more: prices change."""
        today, year, month = datetime.date.today(), *map(int, self.date.split("-")[:2])
        months = 12 * (today.year - year) + today.month - month
        return f"list price of {self.date}" + (f", {months} months old" if months > 2 else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A virtual machine with chips: Compute Engine's name, number of chips, and memory in bytes."""

    name: str
    chips: int
    memory_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of accelerator. All figures are per chip, even if JAX represents a chip as two devices.

    Attributes:
      name: our name: "v5e".
      aliases: other names in use, in lower case.
      device_kinds: JAX's names for its devices (`jax.Device.device_kind`).
      devices: JAX devices per chip.
      name_units: units per chip in the number of a slice's name: v5p-8 has 8 cores, so 4 chips.
      peak_flops: dtype -> FLOP/s of dense matrix products; use `flops`. "float32" is at jax.lax.Precision.HIGHEST; by
        default JAX multiplies float32 in bfloat16 on TPUs.
      hbm_bytes: physical memory.
      usable_hbm_bytes: memory available to programs: the compiler's limit, if it has one.
      hbm_bytes_per_s: HBM bandwidth.
      ici_axes: axes of the torus of direct links between chips; 1 is one flat network.
      ici_links: links of a chip: two per axis of the torus.
      link_bytes_per_s: of one link in one direction; the other direction has the same at the same time.
      pcie_bytes_per_s: between one chip and its host, in one direction.
      dcn_bytes_per_s: one chip's share of its host's network bandwidth to other slices, in one direction.
      clock_hz: converts the compiler's cycles to seconds.
      machines: available virtual machines, by growing number of chips.
      machine_chips: chips per machine of a slice with several machines.
      sub_cubes: for 3-D chips, the shapes of slices smaller than a cube of 4 x 4 x 4.
      most_chips: chips of the largest slice.
      gke_accelerator: value of the label cloud.google.com/gke-tpu-accelerator (gke-accelerator for GPUs).
      api_name: its name in the Cloud TPU API's accelerator types; None if that API does not have it.
      on_vertex: whether Vertex AI can train on it.
      price: on-demand list price; None if none was found. Users can override it everywhere.
    """

    name: str
    aliases: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()
    devices: int = 1
    name_units: int = 1
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    hbm_bytes: float
    usable_hbm_bytes: float
    hbm_bytes_per_s: float
    ici_axes: int
    ici_links: int
    link_bytes_per_s: float
    pcie_bytes_per_s: float
    dcn_bytes_per_s: float
    clock_hz: float
    machines: tuple[Machine, ...] = ()
    machine_chips: int
    sub_cubes: tuple[tuple[int, int, int], ...] = ()
    most_chips: int
    gke_accelerator: str | None = None
    api_name: str | None = None
    on_vertex: bool = False
    price: Price | None = None

    @property
    def kind(self) -> str:
        """JAX's name for its devices; of a chip without one its own."""
        return next(iter(self.device_kinds), self.name)

    @property
    def is_tpu(self) -> bool:
        """Whether libtpu compiles for it."""
        return self.ici_axes > 1

    @property
    def platform(self) -> str:
        """JAX's name for it: "tpu", "gpu" or "cpu"."""
        return "tpu" if self.is_tpu else "cpu" if self.name == "cpu" else "gpu"

    @property
    def unit(self) -> str:
        """The name of one of its JAX devices."""
        return "chip" if self.devices == 1 else "core"

    @property
    def device_usable_hbm_bytes(self) -> float:
        """HBM available to a program on one JAX device, in bytes."""
        return self.usable_hbm_bytes / self.devices

    @property
    def device_hbm_bytes_per_s(self) -> float:
        """HBM bandwidth of one JAX device."""
        return self.hbm_bytes_per_s / self.devices

    @property
    def device_pcie_bytes_per_s(self) -> float:
        """Bandwidth between one JAX device and its host, in one direction."""
        return self.pcie_bytes_per_s / self.devices

    def flops(self, dtype: str = "bfloat16") -> float:
        """Peak FLOP/s of a chip for matrices of a dtype; bfloat16's if the dtype has no faster units."""
        family = "float8" if dtype.startswith("float8") else dtype
        return self.peak_flops.get(family, self.peak_flops["bfloat16"])

    def device_flops(self, dtype: str = "bfloat16") -> float:
        """Peak FLOP/s of one JAX device."""
        return self.flops(dtype) / self.devices


def _tpu_flops(bfloat16: float, **others: float) -> dict[str, float]:
    # float32 is derived: Precision.HIGHEST makes six bfloat16 products of one (jax.lax.Precision, "bf16_6x" in XLA).
    return {"bfloat16": bfloat16, "float32": bfloat16 / 6, **others}


_SUB_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # [v4], [v5p]

V4 = Chip(
    name="v4",
    aliases=("tpu-v4", "v4p"),
    device_kinds=("TPU v4",),
    name_units=2,
    peak_flops=_tpu_flops(275e12, int8=275e12),  # [v4]
    hbm_bytes=32 * GIB,  # [v4]
    # What libtpu said in "Used 63.80G of 30.75G hbm": github.com/erfanzar/EasyDeL/issues/166.
    usable_hbm_bytes=30.75 * GIB,
    hbm_bytes_per_s=1200e9,  # [v4]
    ici_axes=3,  # [v4]
    ici_links=6,
    link_bytes_per_s=4.5e10,  # [book]
    pcie_bytes_per_s=1.6e10,  # [book]
    dcn_bytes_per_s=6.25e9,  # [book]: "typically"
    clock_hz=275e12 / (2 * 4 * 128 * 128 * 2),  # derived: 2 cores of 4 units of 128 x 128 [v4], a multiply and an add
    machines=(Machine(name="ct4p-hightpu-4t", chips=4, memory_bytes=400e9),),  # name: xpk; memory: assumed
    machine_chips=4,
    sub_cubes=_SUB_CUBES,
    most_chips=4096,  # [v4]: the pod
    gke_accelerator="tpu-v4-podslice",
    api_name="v4",
    # 12.88 an hour for v4-8 in an older edition of [catalog], without a date.
    price=Price(usd=3.22, date="2026-11", source="SkyPilot catalog, older edition, tpu-v4-8", region="us-central2"),
)

V5E = Chip(
    name="v5e",
    aliases=("v5litepod", "v5lite", "tpu-v5e", "v5-lite"),
    device_kinds=("TPU v5 lite", "TPU v5e"),
    peak_flops=_tpu_flops(197e12, int8=393e12),  # [v5e]
    hbm_bytes=16 * GIB,  # [v5e]
    usable_hbm_bytes=15.75 * GIB,  # measured: the limit in libtpu's out-of-memory errors
    hbm_bytes_per_s=819e9,  # [v5e]; one edition of the page says 800 GiB/s
    ici_axes=2,  # [v5e]
    ici_links=4,
    link_bytes_per_s=4.5e10,  # [book]; 400 GB/s in both directions of 4 links [v5e]
    pcie_bytes_per_s=1.6e10,  # [book]
    dcn_bytes_per_s=2 * 100 * _GBIT / 8,  # [v5e]: two NICs of 100 Gb/s for a host of 8 chips
    clock_hz=1.5e9,  # derived: 197e12 with 4 units of 128 x 128 [v5e]
    machines=(
        Machine(name="ct5lp-hightpu-1t", chips=1, memory_bytes=48e9),  # [v5e]
        Machine(name="ct5lp-hightpu-4t", chips=4, memory_bytes=192e9),
        Machine(name="ct5lp-hightpu-8t", chips=8, memory_bytes=384e9),
    ),
    machine_chips=4,
    most_chips=256,  # [v5e]
    gke_accelerator="tpu-v5-lite-podslice",
    api_name="v5litepod",
    on_vertex=True,  # docs.cloud.google.com/vertex-ai/docs/training/training-with-tpu-vm
    price=Price(usd=1.20, date="2025-02", source=_QUOTED, region="us"),
)

V5P = Chip(
    name="v5p",
    aliases=("tpu-v5p",),
    device_kinds=("TPU v5", "TPU v5p"),
    name_units=2,
    peak_flops=_tpu_flops(459e12, int8=918e12, float8=459e12),  # [v5p]; int8: [book]
    hbm_bytes=96 * GIB,  # [v5p]
    usable_hbm_bytes=95.74 * GIB,  # libtpu's out-of-memory errors in public logs, "of 95.74G hbm"; [v5p]: 95 GiB
    hbm_bytes_per_s=2765e9,  # [v5p]
    ici_axes=3,  # [v5p]
    ici_links=6,
    link_bytes_per_s=9e10,  # [book]; 1200 GB/s in both directions of 6 links [v5p]
    pcie_bytes_per_s=1.6e10,  # [book]
    dcn_bytes_per_s=50 * _GBIT,  # [v5p]
    clock_hz=459e12 / (2 * 4 * 128 * 128 * 2),  # derived: 2 cores of 4 units of 128 x 128 [v5p]
    machines=(Machine(name="ct5p-hightpu-4t", chips=4, memory_bytes=448e9),),  # [v5p]
    machine_chips=4,
    sub_cubes=_SUB_CUBES,
    most_chips=96 * 64,  # [v5p]: the largest job is of 96 cubes, of a pod of 8960 chips
    gke_accelerator="tpu-v5p-slice",
    api_name="v5p",
    # 17,472 an hour for the 4160 chips of v5p-8320 in [catalog], v8; [book] has 4.2 as of 2025-02.
    price=Price(usd=4.20, date="2026-11", source="SkyPilot catalog v8, tpu-v5p-8320", region="us-central1, us-east5"),
)

V6E = Chip(
    name="v6e",
    aliases=("trillium", "tpu-v6e", "v6"),
    device_kinds=("TPU v6 lite", "TPU v6e"),
    peak_flops=_tpu_flops(918e12, int8=1836e12, float8=918e12),  # [v6e]; float8: [tpu7x]
    hbm_bytes=32 * GIB,  # [v6e]
    usable_hbm_bytes=31.24 * GIB,  # measured: the limit in libtpu's out-of-memory errors
    hbm_bytes_per_s=1638e9,  # [v6e]
    ici_axes=2,  # [v6e]
    ici_links=4,
    link_bytes_per_s=9e10,  # [book]; 800 GB/s in both directions of 4 links [v6e]
    pcie_bytes_per_s=3.2e10,  # [book]
    dcn_bytes_per_s=100 * _GBIT,  # [tpu7x]; [v6e]: four NICs of 200 Gb/s for a host of 8 chips
    # Derived: 918e12 with units of 256 x 256 that make together four products a cycle. [v6e] counts two units, at which
    # the clock would be 3.5e9: but with 1.75e9 the compiler's cycles come near the published steps.
    clock_hz=1.75e9,
    machines=(
        Machine(name="ct6e-standard-1t", chips=1, memory_bytes=176e9),  # [v6e]
        Machine(name="ct6e-standard-4t", chips=4, memory_bytes=720e9),
        Machine(name="ct6e-standard-8t", chips=8, memory_bytes=1440e9),
    ),
    machine_chips=4,
    most_chips=256,  # [v6e]
    gke_accelerator="tpu-v6e-slice",
    api_name="v6e",
    on_vertex=True,  # docs.cloud.google.com/vertex-ai/docs/training/training-with-tpu-vm
    # 172.80 an hour for v6e-64 in [catalog], v8.
    price=Price(usd=2.70, date="2026-11", source="SkyPilot catalog v8, tpu-v6e-64", region="us-central1, us-east5"),
)

TPU7X = Chip(
    name="tpu7x",
    aliases=("ironwood", "v7x", "tpu-v7x", "tpu7"),
    device_kinds=("TPU7x",),
    devices=2,  # [tpu7x]: a chip is two chiplets, and each is a device of its own
    name_units=2,  # xpk and MaxText: tpu7x-8 has 8 cores
    peak_flops=_tpu_flops(2307e12, float8=4614e12),  # [tpu7x]
    hbm_bytes=192 * GIB,  # [tpu7x]
    usable_hbm_bytes=2 * 94.75 * GIB,  # libtpu's out-of-memory errors in public logs, "of 94.75G hbm" on a device
    hbm_bytes_per_s=7380e9,  # [tpu7x]
    ici_axes=3,  # derived: its topologies have three axes [tpu7x]
    ici_links=6,
    link_bytes_per_s=9e10,  # derived: 1200 GB/s as v5p [tpu7x], of which [book] has 9e10
    pcie_bytes_per_s=3.2e10,  # assumed: as v6e
    dcn_bytes_per_s=100 * _GBIT,  # [tpu7x]
    clock_hz=2307e12 / (2 * 4 * 256 * 256 * 2),  # assumed: the units of v6e in each of 2 cores
    machines=(
        Machine(name="tpu7x-standard-1t", chips=1, memory_bytes=240e9),  # name: xpk; memory: derived, a quarter
        Machine(name="tpu7x-standard-4t", chips=4, memory_bytes=960e9),  # [tpu7x]
    ),
    machine_chips=4,
    sub_cubes=((1, 1, 1), *_SUB_CUBES),  # xpk and MaxText
    most_chips=9216,  # [tpu7x]
    gke_accelerator="tpu7x",
    # No list price was found.
)

H100 = Chip(
    name="h100",
    aliases=("h100-80gb", "h100-sxm", "nvidia-h100-80gb"),
    device_kinds=("NVIDIA H100 80GB HBM3",),
    peak_flops={"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "int8": 1979e12, "float32": 67e12},  # [h100]
    hbm_bytes=81559 * 2**20,  # nvidia-smi
    usable_hbm_bytes=(81559 - 1024) * 2**20,  # assumed: 1 GiB for the CUDA context and libraries
    hbm_bytes_per_s=3.35e12,  # [h100]
    # NVLink through switches, all to all, 450e9 out of each GPU [book gpus]: as a ring of two links that share it.
    ici_axes=1,
    ici_links=2,
    link_bytes_per_s=450e9 / 2,
    pcie_bytes_per_s=64e9,  # [h100]: 128 GB/s in both directions
    dcn_bytes_per_s=400 * _GBIT,  # [book gpus]: a NIC of 400 Gb/s for each in NVIDIA's reference; a cloud may have less
    clock_hz=989e12 / (132 * 4096),  # derived: 132 multiprocessors [book gpus] of 4096 FLOP a cycle
    # [catalog]
    machines=tuple(Machine(name=f"a3-highgpu-{n}g", chips=n, memory_bytes=n * 234e9) for n in (1, 2, 4, 8)),
    machine_chips=8,
    most_chips=8,  # GPUs of one NVLink network; more are several slices
    gke_accelerator="nvidia-h100-80gb",
    on_vertex=True,  # MachineSpec of Vertex AI: NVIDIA_H100_80GB
    price=Price(usd=10.80, date="2025-02", source=_QUOTED, region="us"),
)

H200 = dataclasses.replace(
    H100,  # [h200]: the same but for its memory
    name="h200",
    aliases=("h200-141gb", "h200-sxm", "nvidia-h200-141gb"),
    device_kinds=("NVIDIA H200",),
    hbm_bytes=143771 * 2**20,  # nvidia-smi
    usable_hbm_bytes=(143771 - 1024) * 2**20,  # assumed: as H100
    hbm_bytes_per_s=4.8e12,  # [h200]
    machines=(Machine(name="a3-ultragpu-8g", chips=8, memory_bytes=2900e9),),  # name: xpk; memory: assumed
    gke_accelerator="nvidia-h200-141gb",
    on_vertex=False,
    price=Price(
        usd=10.0, date="2025-08", source='"around $10/hour" in "How to Scale Your Model", chapter 12', region="us"
    ),
)

CPU = Chip(
    # The emulated devices of one machine. All figures are assumed: enough to rank plans on a laptop, not to predict
    # them.
    name="cpu",
    peak_flops={"bfloat16": 5e10, "float32": 5e10},
    hbm_bytes=4 * GIB,
    usable_hbm_bytes=4 * GIB,
    hbm_bytes_per_s=1e10,
    ici_axes=1,
    ici_links=2,
    link_bytes_per_s=2e9,
    pcie_bytes_per_s=1e10,
    dcn_bytes_per_s=1e9,
    clock_hz=3e9,
    machine_chips=512,
    most_chips=512,
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (V4, V5E, V5P, V6E, TPU7X, H100, H200, CPU)}
_BY_NAME = {name.lower(): chip for chip in CHIPS.values() for name in (chip.name, *chip.aliases, *chip.device_kinds)}


def chip_names() -> list[str]:
    """Every name that `chip` accepts, except those of JAX's devices."""
    return [name for chip in CHIPS.values() for name in (chip.name, *chip.aliases)]


def find(name: str) -> Chip | None:
    """The chip of that name, alias or JAX device kind, in any case; None if unknown."""
    return _BY_NAME.get(name.strip().lower())


def chip(name: str) -> Chip:
    """The chip of that name: "v5e", "v5litepod", "Trillium", "TPU v5 lite".

    Raises:
      UserError: it is unknown; suggests the nearest.
    """
    result = find(name)
    if result is None:
        known = f"known are {', '.join(CHIPS)}"
        raise UserError(f"chip {name!r} is not known{did_you_mean(name, chip_names()) or f': {known}'}")
    return result


def peak_flops(device_kind: str) -> float | None:
    """Peak bf16 FLOP/s of one JAX device of this kind; None if unknown (CPU, other names)."""
    for known in CHIPS.values():
        if device_kind in known.device_kinds:
            return known.device_flops("bfloat16")
    return None
