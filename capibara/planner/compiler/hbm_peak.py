"""The contents of a device's HBM at the peak of a compiled step, buffer by buffer, from its scheduled HLO.

The compiler reports the size of the peak, not its contents. This module walks the schedule with the first and last use
of every buffer, as far as the text tells; HLO's rules decide which results share a buffer with an operand (loops,
in-place updates, donated arguments). The sum is no substitute for the compiler's peak, of which it may miss a fifth;
`capibara prove` prints both. Its purpose is the list of large buffers.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from capibara.planner.compiler.hlo import Instruction, Module, branches, callee, number_of, searched

# Results without memory of their own: aliases of operands, and what is part of the program.
_NAMES = ("bitcast", "get-tuple-element", "tuple", "optimization-barrier", "while")
_NO_MEMORY = (*_NAMES, "parameter", "constant", "iota", "after-all", "dynamic-update-slice", "call", "conditional")
# "output_to_operand_aliasing={{}: (0, {}), {2}: (5, {})}": the result, or one of several, lies in the buffer of an operand.
_ALIASING = re.compile(r"output_to_operand_aliasing=\{((?:\{[\d, ]*\}: \(\d+, \{[\d, ]*\}\)(?:, )?)*)\}")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), ")
_SCOPES = re.compile(r"\b(attention|mlp|loss|optimizer)\b")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Arrays of one kind that are alive at the peak.

    Attributes:
      bytes: size of all of them together.
      count: how many there are.
      array: their type and shape on one device in HLO's notation: "bf16[12,2048,7168]".
      source: what they belong to, as far as known.
    """

    bytes: int
    count: int
    array: str
    source: str


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of a program.

    Attributes:
      bytes: arguments and temporaries together.
      argument_bytes: state and batch.
      buffers: temporaries, the largest first.
    """

    bytes: int
    argument_bytes: int
    buffers: tuple[Buffer, ...]


def at_peak(module: Module) -> Peak:
    """The buffers that are alive at the peak."""
    entry = module.computations[module.entry].values()
    arguments = sum(a.hbm_bytes for i in entry if i.opcode == "parameter" for a in i.arrays)
    size, result = _Computations(module).largest(module.entry)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for amount, array, source in result:
        counts[array, source] += 1
        sizes[array, source] += amount
    buffers = [Buffer(amount, counts[key], *key) for key, amount in sizes.items()]
    return Peak(arguments + size, arguments, tuple(sorted(buffers, key=lambda b: -b.bytes)))


class _Computations:
    """The peak of each computation of a module, including what it calls; its parameters belong to the caller."""

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[str, tuple[int, list[tuple[int, str, str]]]] = {}

    def largest(self, name: str) -> tuple[int, list[tuple[int, str, str]]]:
        """Bytes, and (bytes, array, source) of each buffer."""
        if name not in self._known:
            self._known[name] = self._largest(self._module.computations[name])
        return self._known[name]

    def _largest(self, computation: dict[str, Instruction]) -> tuple[int, list[tuple[int, str, str]]]:
        order = list(computation.values())
        buffers, born, sizes = _buffers(self._module, computation)
        last = _last_uses(order, buffers, born)
        alive: dict[str, int] = {}
        best: tuple[int, list[tuple[int, str, str]]] = (0, [])
        dying: dict[int, list[str]] = {}
        for name, when in last.items():
            dying.setdefault(when, []).append(name)
        starting: dict[int, list[str]] = {}
        for name, when in born.items():
            starting.setdefault(when, []).append(name)
        for when, instruction in enumerate(order):
            alive |= {name: sizes[name] for name in starting.get(when, ()) if sizes[name]}
            inner, within = self._called(instruction)
            total = sum(alive.values()) + inner
            if total > best[0]:
                best = total, [_described(computation, name, size) for name, size in alive.items()] + within
            for name in dying.get(when, ()):
                alive.pop(name, None)
        return best

    def _called(self, instruction: Instruction) -> tuple[int, list[tuple[int, str, str]]]:
        names: Sequence[str | None]
        match instruction.opcode:
            case "while":
                names = [instruction.called("body")]
            case "call" | "async-start":
                names = [callee(instruction)]
            case "conditional":
                names = branches(instruction)
            case _:
                names = []
        return max((self.largest(name) for name in names if name), key=lambda moment: moment[0], default=(0, []))


def _described(computation: dict[str, Instruction], name: str, size: int) -> tuple[int, str, str]:
    producer, _, index = name.partition("#")
    instruction = computation[producer]
    array = instruction.arrays[int(index or 0)] if instruction.arrays else None
    shape = f"{array.dtype}[{','.join(map(str, array.dims))}]" if array else ""
    return size, shape, _source(instruction)


def _source(instruction: Instruction) -> str:
    """What a buffer belongs to, from the operation path that JAX writes into the text."""
    path = re.search(r'op_name="([^"]*)"', instruction.attributes)
    text = path[1] if path else ""
    scope = _SCOPES.findall(text)
    kind = instruction.opcode.removesuffix("-start")
    parts = [scope[-1]] if scope else []
    parts += (
        [kind] if kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute") else []
    )
    parts += [kernel[0]] if (kernel := re.match(r"splash_\w*?_(?:fwd|dq|dkv)", instruction.name)) else []
    if "transpose(jvp" in text:
        parts.append("made again" if "rematted_computation" in text else "backward pass")
    elif "jvp(" in text:
        parts.append("forward pass")
    return ", ".join(parts) or "buffers of loops and copies"


def _buffers(
    module: Module, computation: dict[str, Instruction]
) -> tuple[dict[str, frozenset[str]], dict[str, int], dict[str, int]]:
    """The buffers of each result, the time when each buffer is allocated, and its bytes.

    A buffer is named after its instruction, one of several results "name#index". Results of the computation lie in the
    caller's buffers (carried ones of a loop, donated arguments of the entry) and have no bytes here.
    """
    lies_in: dict[str, frozenset[str]] = {}
    born: dict[str, int] = {}
    sizes: dict[str, int] = {}
    root = None
    for when, instruction in enumerate(computation.values()):
        root = instruction if instruction.is_root else root
        buffers = dict(_allocations(module, computation, instruction))
        sizes |= buffers
        born |= dict.fromkeys(buffers, when)
        if instruction.opcode == "get-tuple-element":
            lies_in[instruction.name] = _element(computation, instruction, lies_in, allocated=born)
            continue
        shared = (lies_in.get(o, frozenset()) for o in _shared(module, instruction))
        lies_in[instruction.name] = frozenset(buffers).union(*shared)
    leaving = lies_in[root.name] if root else frozenset()
    return lies_in, born, {name: 0 if name in leaving else size for name, size in sizes.items()}


def _element(
    computation: dict[str, Instruction],
    instruction: Instruction,
    lies_in: dict[str, frozenset[str]],
    allocated: Container[str],
) -> frozenset[str]:
    """The buffers of one element of a tuple."""
    index = int(searched(r"index=(\d+)", instruction.attributes)[1])
    producer = computation.get(instruction.operands[0])
    while producer is not None and producer.opcode in ("while", "optimization-barrier") and producer.operands:
        producer = computation.get(producer.operands[0])
    if producer is None or producer.opcode == "parameter":
        return frozenset()
    if producer.opcode == "tuple":
        return lies_in.get(producer.operands[index], frozenset()) if index < len(producer.operands) else frozenset()
    if index in (aliased := _aliased(producer)):
        return lies_in.get(producer.operands[aliased[index]], frozenset())
    name = f"{producer.name}#{index}"
    return frozenset({name}) if name in allocated else lies_in.get(producer.name, frozenset())


def _allocations(
    module: Module, computation: dict[str, Instruction], instruction: Instruction
) -> Iterator[tuple[str, int]]:
    """(name, bytes) of the buffers that an instruction allocates."""
    opcode, arrays = instruction.opcode, instruction.arrays
    if opcode in _NO_MEMORY or opcode.endswith(("-done", "-update")):
        return
    if opcode.endswith("-start"):  # its result includes the operands
        operands = sum(a.hbm_bytes for o in instruction.operands if o in computation for a in computation[o].arrays)
        yield instruction.name, max(0, sum(a.hbm_bytes for a in arrays) - operands)
        return
    if aliased := _aliased(instruction):
        new = (pair for pair in enumerate(arrays) if pair[0] not in aliased)
        yield from ((f"{instruction.name}#{index}", array.hbm_bytes) for index, array in new)
        return
    in_place = sum(a.hbm_bytes for o in _shared(module, instruction) if o in computation for a in computation[o].arrays)
    if len(arrays) == 1 or in_place:
        yield instruction.name, max(0, sum(a.hbm_bytes for a in arrays) - in_place)
    else:
        yield from ((f"{instruction.name}#{index}", a.hbm_bytes) for index, a in enumerate(arrays))


def _shared(module: Module, instruction: Instruction) -> tuple[str, ...]:
    """The operands that the result shares a buffer with."""
    opcode = instruction.opcode
    if opcode in _NAMES:
        return instruction.operands
    if opcode.endswith("-done") or opcode == "dynamic-update-slice":
        return instruction.operands[:1]
    if aliased := _aliased(instruction):
        return tuple(instruction.operands[n] for n in aliased.values())
    if opcode != "fusion":
        return ()
    inner = module.computations[instruction.inner("calls")]
    root = next(i for i in inner.values() if i.is_root)
    outputs = [inner[o] for o in root.operands] if root.opcode == "tuple" else [root]
    result = (_updated_parameter(inner, output) for output in outputs)
    return tuple(instruction.operands[n] for n in result if n is not None and n < len(instruction.operands))


def _aliased(instruction: Instruction) -> dict[int, int]:
    """Index of a result -> number of the operand whose buffer it lies in, as the compiler states it."""
    text = _ALIASING.search(instruction.attributes)
    return {int(index or 0): int(number) for index, number in _ALIAS.findall(text[1])} if text else {}


def _updated_parameter(inner: dict[str, Instruction], output: Instruction) -> int | None:
    """The number of the parameter that a fusion's output updates in place; None: of none."""

    def through(instruction: Instruction, opcodes: tuple[str, ...]) -> Instruction:
        while instruction.opcode in opcodes and instruction.operands and instruction.operands[0] in inner:
            instruction = inner[instruction.operands[0]]
        return instruction

    output = through(output, ("bitcast", "convert"))
    if output.opcode != "dynamic-update-slice":
        return None
    target = through(inner[output.operands[0]], ("bitcast",))
    return number_of(target) if target.opcode == "parameter" else None


def _last_uses(order: list[Instruction], lies_in: dict[str, frozenset[str]], born: dict[str, int]) -> dict[str, int]:
    """The time of each buffer's last use; get-tuple-element is no use."""
    last = dict(born)
    for when, instruction in enumerate(order):
        if instruction.opcode in ("get-tuple-element", "tuple", "bitcast"):
            continue
        for operand in instruction.operands:
            for name in lies_in.get(operand, ()):
                last[name] = max(last.get(name, when), when)
    return last
