"""Reads the costs of a compiled step from its optimised HLO; every number is for one device and one step.

XLA's own cost_analysis counts the body of a loop once; here each computation counts as often as it runs. Nothing is
executed and JAX is not needed. Shapes of instructions are those after partitioning.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections import Counter
from collections.abc import Iterator, Mapping

# All kinds of f8 take 8 bits.
_DTYPE_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4, "token": 0, "opaque": 0,
}  # fmt: skip
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
# Instructions that move no data: aliases of others' results.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id "
    "opt-barrier domain async-start async-update async-done".split()
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_LAYOUT = re.compile(r"([\d,]*)(?::T\(([\d,]+)\))?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_END = re.compile(r'^\}(, execution_thread="\w+")?\s*$')  # the attribute is for a SparseCore
_HOST_SPACE = re.compile(r"S\(5\)")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_WORD = re.compile(r" ?([a-z][\w\-]*)\(")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's shape.

    Attributes:
      dtype: XLA's name.
      dims: sizes.
      on_chip: whether it is not in HBM but in the chip's vector or scalar memory, or in the host's (TPU memory spaces
        other than 0).
      on_host: whether it is in the host's pinned memory.
      padded: number of elements including tile padding: a TPU stores [.., 1] in tiles of 128 lanes. None: no tiles.
    """

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool
    padded: int | None = None
    on_host: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return self._bytes_of(self.size)

    @property
    def hbm_bytes(self) -> int:
        return 0 if self.on_chip else self._bytes_of(self.size if self.padded is None else self.padded)

    def _bytes_of(self, size: int) -> int:
        bits = 8 if self.dtype.startswith("f8") else _DTYPE_BITS.get(self.dtype, 32)
        return (size * bits + 7) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
      name, opcode: as written.
      arrays: its results, tuples flattened.
      operands: names of its operands.
      attributes: the text after the operands.
      is_root: whether it is the computation's result.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def called(self, key: str) -> str | None:
        """The computation named by the attribute `key` (calls, body, condition, to_apply)."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    def inner(self, key: str) -> str:
        """Like `called`, for an instruction that must have the attribute.

        Raises:
          KeyError: it does not have it.
        """
        if (name := self.called(key)) is None:
            raise KeyError(f"{self.opcode} {self.name} names no {key}")
        return name


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed module: its computations, each a dict of instructions in schedule order."""

    entry: str
    computations: dict[str, dict[str, Instruction]]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of one step on one device.

    Attributes:
      matmul_flops: of dots and convolutions, 2 per multiply-add.
      kernel_flops: of attention kernels, as if nothing were masked (skipped blocks included).
      hbm_bytes: read and written by instructions; intermediate values of fusions and kernels stay on the chip.
      collective_bytes: kind -> bytes of its larger side (what was gathered, what is reduced).
      collective_counts: kind -> number of executions.
      cycles: sum of the TPU compiler's estimated_cycles, without kernels and collectives.
      kernels: name of a Pallas kernel or other custom call -> number of executions.
      host_bytes: copied to and from the host's memory.
      host_exposed_cycles: cycles that these copies take beyond the estimated_cycles scheduled between their starts and ends.
    """

    matmul_flops: float = 0.0
    kernel_flops: float = 0.0
    hbm_bytes: float = 0.0
    collective_bytes: Counter[str] = dataclasses.field(default_factory=Counter)
    collective_counts: Counter[str] = dataclasses.field(default_factory=Counter)
    cycles: float = 0.0
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    host_bytes: float = 0.0
    host_exposed_cycles: float = 0.0

    def plus(self, other: Costs, times: float = 1) -> Costs:
        """The sum, with `other` counted `times` times."""
        scaled = {
            f.name: Counter({k: v * times for k, v in value.items()}) if isinstance(value, Counter) else value * times
            for f in dataclasses.fields(self)
            for value in [getattr(other, f.name)]
        }
        return Costs(**{name: getattr(self, name) + value for name, value in scaled.items()})


def parse(text: str) -> Module:
    """Parses compiled.as_text().

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] | None = None
    entry = ""
    for line in _joined(text):
        if current is None:
            if header := _HEADER.match(line):
                current = computations[header[2]] = {}
                entry = header[2] if header[1] else entry
        elif _END.match(line):
            current = None
        elif instruction := _instruction(line):
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("not HLO text: it has no ENTRY computation")
    return Module(entry, computations)


def costs(
    module: Module,
    *,
    kernel_bytes: Mapping[str, float] = types.MappingProxyType({}),
    dearest: bool = True,
    host_bytes_per_cycle: float = math.inf,
) -> Costs:
    """The costs of one run of the entry computation, with loop trip counts.

    Args:
      module: the program.
      kernel_bytes: name of a kernel -> HBM bytes that one call reads and writes, for kernels that do not read all their
        operands exactly once.
      dearest: whether a conditional counts as its most expensive branch, or as the cheapest.
      host_bytes_per_cycle: bandwidth between the device and the host's memory.
    """

    @functools.cache
    def of(name: str) -> Costs:
        total = Costs()
        seen: set[str] = set()
        copies = _HostCopies(host_bytes_per_cycle)
        for instruction in module.computations[name].values():
            total = total.plus(_own_costs(module, name, instruction, seen, kernel_bytes))
            total = total.plus(Costs(host_exposed_cycles=copies.exposed(instruction, total.cycles)))
            if instruction.opcode == "while":
                times = trip_count(module, name, instruction)
                for key in ("body", "condition"):
                    total = total.plus(of(instruction.inner(key)), times)
            elif instruction.opcode in ("call", "async-start") and (called := callee(instruction)):
                total = total.plus(of(called))
            elif instruction.opcode == "conditional":
                each = [of(name) for name in branches(instruction)]
                choose = max if dearest else min
                total = total.plus(choose(each, key=lambda c: c.matmul_flops + c.hbm_bytes, default=Costs()))
        return total

    return of(module.entry)


def trip_count(module: Module, computation: str, loop: Instruction) -> int:
    """Trip count of a while loop: from XLA's attribute, else the constant in its condition, else 1."""
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes):
        return int(known[1])
    condition = module.computations[loop.inner("condition")]
    compares = [i for i in _reachable(module, condition) if i.opcode == "compare" and "direction=LT" in i.attributes]
    constants = [re.match(r"(\d+)\)", i.attributes) for i in condition.values() if i.opcode == "constant"]
    limits = [int(match[1]) for match in constants if match]
    return max(limits) if compares and limits else 1


def _reachable(module: Module, computation: dict[str, Instruction]) -> Iterator[Instruction]:
    for instruction in computation.values():
        yield instruction
        if instruction.opcode == "fusion":
            yield from _reachable(module, module.computations[instruction.inner("calls")])


def _own_costs(
    module: Module, computation: str, instruction: Instruction, seen: set[str], kernel_bytes: Mapping[str, float]
) -> Costs:
    """Costs of one instruction without loops and calls; `seen` holds the collectives that were counted already."""
    inside = [instruction]
    lookup = {instruction.name: module.computations[computation]}
    if instruction.opcode == "fusion":
        inside = list(_fused(module, instruction, lookup))
    flops = sum(_matmul_flops(i, lookup[i.name]) for i in inside)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for i in inside:
        kind = i.opcode.removesuffix("-start")
        # A collective that overlaps several fusions appears in each of them, with the same channel.
        channel = re.search(r"channel_id=(\d+)", i.attributes)
        key = f"{kind} {channel[1] if channel else i.name}"
        if kind in _COLLECTIVES and key not in seen:
            seen.add(key)
            counts[kind] += 1
            operands = sum(a.bytes for o in i.operands for a in lookup[i.name][o].arrays)
            results = sum(a.bytes for a in i.arrays)
            sizes[kind] += max(operands, results - operands if i.opcode.endswith("-start") else results)
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    kernels: Counter[str] = Counter()
    kernel_flops = 0.0
    hbm_bytes = _hbm_bytes(module, instruction, module.computations[computation])
    if instruction.opcode == "custom-call":
        kernel = _kernel_name(instruction)
        kernels[kernel] += 1
        hbm_bytes = kernel_bytes.get(kernel, hbm_bytes)
        kernel_flops = _kernel_flops(kernel, instruction, module.computations[computation])
    return Costs(
        matmul_flops=flops,
        kernel_flops=kernel_flops,
        hbm_bytes=hbm_bytes,
        collective_bytes=sizes,
        collective_counts=counts,
        cycles=float(cycles[1]) if cycles else 0.0,
        kernels=kernels,
        host_bytes=_host_bytes(instruction),
    )


class _HostCopies:
    """The copies to and from the host's memory that are under way in one computation.

    Args:
      bytes_per_cycle: their bandwidth.
    """

    def __init__(self, bytes_per_cycle: float):
        self._bytes_per_cycle = bytes_per_cycle
        self._open: set[str] = set()
        self._bytes = self._start = 0.0

    def exposed(self, instruction: Instruction, cycles: float) -> float:
        """Cycles that the copies exceed those scheduled beside them, once the last one that is under way ends.

        Args:
          instruction: the next one of the computation.
          cycles: of the instructions before it.
        """
        if _crosses_pcie(instruction):
            if not self._open:
                self._bytes, self._start = 0.0, cycles
            self._open.add(instruction.name)
            self._bytes += _host_bytes(instruction)
        elif instruction.opcode.endswith("-done") and instruction.operands[0] in self._open:
            self._open.remove(instruction.operands[0])
            if not self._open:
                return max(0.0, self._bytes / self._bytes_per_cycle - (cycles - self._start))
        return 0.0


def _crosses_pcie(instruction: Instruction) -> bool:
    """Whether an instruction starts a copy between the device and the host's memory."""
    copies = ("copy-start", "dynamic-slice-start", "dynamic-update-slice-start")
    return instruction.opcode in copies and any(a.on_host for a in instruction.arrays)


def _host_bytes(instruction: Instruction) -> float:
    """Bytes that it copies to or from the host's memory: its array on the device."""
    if not _crosses_pcie(instruction):
        return 0.0
    return float(max((a.bytes for a in instruction.arrays if not a.on_host), default=0))


def _fused(module: Module, fusion: Instruction, lookup: dict[str, dict[str, Instruction]]) -> Iterator[Instruction]:
    inner = module.computations[fusion.inner("calls")]
    for instruction in inner.values():
        if instruction.opcode == "fusion":
            yield from _fused(module, instruction, lookup)
        else:
            lookup[instruction.name] = inner
            yield instruction


def _matmul_flops(instruction: Instruction, names: dict[str, Instruction]) -> float:
    if instruction.opcode == "dot":
        lhs = names[instruction.operands[0]].arrays[0]
        contracted = searched(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)[1]
        return 2.0 * instruction.arrays[0].size * math.prod(lhs.dims[int(d)] for d in contracted.split(",") if d)
    if instruction.opcode == "convolution":
        return 2.0 * _multiply_adds(instruction, names)
    return 0.0


def _multiply_adds(convolution: Instruction, names: dict[str, Instruction]) -> float:
    """Multiply-adds of a convolution, which is the TPU's form of every matmul; padding is not counted."""
    lhs, rhs = (names[o].arrays[0].dims for o in convolution.operands[:2])
    out = convolution.arrays[0].dims
    labels = searched(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    groups = re.search(r"batch_group_count=(\d+)", convolution.attributes)
    window = _window(convolution.attributes)
    positions = 1
    for axis in (c for c in labels[3] if c.isdigit()):
        index = int(axis)
        size = lambda key, default, index=index: window[key][index] if key in window else default  # noqa: E731
        low, _ = size("pad", (0, 0))
        stride, base, dilation = size("stride", 1), size("lhs_dilate", 1), size("rhs_dilate", 1)
        length = (lhs[labels[1].index(axis)] - 1) * base + 1
        kernel, results = rhs[labels[2].index(axis)], out[labels[3].index(axis)]
        positions *= _valid_positions(length, kernel, results, low, stride, base, dilation)
    batch = lhs[labels[1].index("b")] // int(groups[1] if groups else 1)
    return float(batch * rhs[labels[2].index("i")] * rhs[labels[2].index("o")] * positions)


def _valid_positions(length: int, kernel: int, out: int, low: int, stride: int, base: int, dilation: int) -> int:
    """Pairs of an output and a kernel index along one axis that hit an element of the input."""
    if kernel == 1 and base == 1 and stride == 1 and low == 0:
        return min(length, out)
    total = 0
    for k in range(kernel):
        # index = o * stride + k * dilation - low must be in [0, length) and a multiple of base
        first = max(0, -(-(low - k * dilation) // stride))
        last = min(out - 1, (length - 1 + low - k * dilation) // stride)
        if base == 1:
            total += max(0, last - first + 1)
        else:
            total += sum((o * stride + k * dilation - low) % base == 0 for o in range(first, last + 1))
    return total


def _window(attributes: str) -> dict[str, list]:
    """Parses window={size=1x16 pad=0_0x15_15 ...} to lists by key; pads as pairs."""
    match = re.search(r"window=\{([^}]*)\}", attributes)
    result: dict[str, list] = {}
    for key, value in (item.split("=") for item in (match[1].split() if match else ())):
        parts = value.split("x")
        result[key] = [tuple(int(n) for n in p.split("_")) for p in parts] if key == "pad" else [int(p) for p in parts]
    return result


def searched(pattern: str | re.Pattern[str], text: str) -> re.Match[str]:
    """Searches a text for a pattern that it must contain.

    Raises:
      ValueError: it does not contain it.
    """
    if (match := re.search(pattern, text)) is None:
        raise ValueError(f"not HLO text: {text[:100]!r} has no {pattern}")
    return match


def number_of(parameter: Instruction) -> int:
    """The index of a parameter instruction."""
    return int(searched(r"^(\d+)\)", parameter.attributes)[1])


def _kernel_name(call: Instruction) -> str:
    target = re.search(r'custom_call_target="([^"]*)"', call.attributes)
    name = target[1] if target else "custom-call"
    return re.sub(r"(\.\d+|\.clone)+$", "", call.name) if name == "tpu_custom_call" else name


def _kernel_flops(kernel: str, call: Instruction, names: dict[str, Instruction]) -> float:
    """FLOPs of the splash kernels: matmuls [T, H] x [H, S] per head: two forward, three for dq, four for dk and dv."""
    match = re.match(r"splash_\w*?_(fwd|dq|dkv)", kernel)
    if not match:
        return 0.0
    arrays = [names[o].arrays[0] for o in call.operands]
    floats = [a for a in arrays if a.dtype in ("bf16", "f32", "f16") and len(a.dims) >= 3]
    q, k = floats[0].dims, floats[1].dims
    heads_and_rows = math.prod(q[:-2])
    return {"fwd": 2, "dq": 3, "dkv": 4}[match[1]] * 2.0 * heads_and_rows * q[-2] * k[-2] * q[-1]


def _hbm_bytes(module: Module, instruction: Instruction, names: dict[str, Instruction]) -> float:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or opcode.endswith("-update"):
        return 0.0
    operands = [sum(a.hbm_bytes for a in names[o].arrays) for o in instruction.operands if o in names]
    result = sum(a.hbm_bytes for a in instruction.arrays)
    if opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
        return _moved(instruction, names)
    if opcode.endswith("-start"):  # its result includes the operand
        return float(max(result, sum(operands)))
    if opcode in ("dynamic-slice", "gather"):
        return 2.0 * result
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2.0 * sum(a.hbm_bytes for a in names[_update_of(instruction)].arrays)
    if opcode == "fusion":
        return _fusion_bytes(module.computations[instruction.inner("calls")], operands, result)
    return float(sum(operands) + result)


def _moved(copy: Instruction, names: dict[str, Instruction]) -> float:
    """HBM bytes of an asynchronous copy, mostly between HBM and the chip: what it reads and writes there."""
    source = names[copy.operands[0]].arrays[0]
    size = lambda a: dataclasses.replace(a, on_chip=False).hbm_bytes  # noqa: E731
    # Its result includes the source and a flag.
    others = [a for a in copy.arrays if len(a.dims) == len(source.dims) and a.dtype == source.dtype]
    created = min(others, key=lambda a: (size(a), a.on_chip == source.on_chip))
    return float((not source.on_chip) * size(created) + (not created.on_chip) * size(created))


def _fusion_bytes(inner: dict[str, Instruction], operands: list[int], result: int) -> float:
    """HBM bytes of a fusion: only the slices of a sliced operand, only the update of a result updated in place."""
    users: dict[str, list[Instruction]] = {}
    for instruction in inner.values():
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)
    total = 0.0
    for instruction in inner.values():
        if instruction.opcode != "parameter":
            continue
        number = number_of(instruction)
        full = operands[number] if number < len(operands) else 0
        uses = users.get(instruction.name, [])
        if full and uses and all(u.opcode in ("dynamic-slice", "slice", "gather") for u in uses):
            full = min(full, sum(a.bytes for u in uses for a in u.arrays))
        elif full and uses and all(_updates(u, instruction.name) for u in uses):
            updates = sum(a.bytes for u in uses for a in inner[_update_of(u)].arrays)
            result -= max(0, full - updates)
            full = 0
        total += full
    return total + max(0, result)


def _updates(user: Instruction, name: str) -> bool:
    return user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name


def _update_of(user: Instruction) -> str:
    """The operand that an in-place update writes; if it cannot share memory, XLA has inserted a copy before it."""
    return user.operands[1 if user.opcode == "dynamic-update-slice" else 2]


def callee(instruction: Instruction) -> str | None:
    """The computation that a call names."""
    return instruction.called("to_apply") or instruction.called("calls")


def branches(conditional: Instruction) -> list[str]:
    """The computations that a conditional chooses from."""
    match = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
    text = (
        match[1] if match else " ".join(re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", conditional.attributes))
    )
    return re.findall(r"%([\w.\-]+)", text)


def _joined(text: str) -> Iterator[str]:
    """Lines, with those that continue in the next (metadata of kernels) joined."""
    held = ""
    for line in text.splitlines():
        if held and (_NAME.match(line) or _END.match(line)):
            yield held
            held = ""
        if _NAME.match(line):
            held = line
        elif held:
            held += line
        else:
            yield line
    if held:
        yield held


def _instruction(line: str) -> Instruction | None:
    head = _NAME.match(line)
    if not head:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[head.end() :])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else 0
    word = _WORD.search(rest, end) if end else re.search(r" ([a-z][\w\-]*)\(", rest)
    if not word:
        return None
    close = _closing(rest, word.end() - 1)
    arguments = rest[word.end() : close]
    arrays = tuple(_array(*result) for result in _ARRAY.findall(rest[: word.start()]))
    opcode = word[1]
    literal = opcode in ("parameter", "constant")
    return Instruction(
        name=head[2],
        opcode=opcode,
        arrays=arrays,
        operands=() if literal else tuple(re.findall(r"%([\w.\-]+)", arguments)),
        attributes=(arguments + ")" if literal else "") + rest[close + 1 :],
        is_root=bool(head[1]),
    )


def _array(dtype: str, dims: str, layout: str) -> Array:
    """Parses "bf16", "32,2048" and "1,0:T(8,128)(2,1)S(1)"; tiles cover the last dimensions in layout order."""
    sizes = tuple(int(d) for d in dims.split(",") if d)
    order, tile = searched(_LAYOUT, layout).groups()
    padded = None
    if tile and sizes:
        laid_out = [sizes[int(d)] for d in order.split(",") if d][::-1]  # the layout names the innermost first
        edges = [int(t) for t in tile.split(",")]
        laid_out = [1] * (len(edges) - len(laid_out)) + laid_out
        inner = (-(-size // edge) * edge for size, edge in zip(laid_out[-len(edges) :], edges))
        padded = math.prod(laid_out[: -len(edges)]) * math.prod(inner)
    return Array(dtype, sizes, bool(re.search(r"S\([1-9]\d*\)", layout)), padded, bool(_HOST_SPACE.search(layout)))


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(text)
