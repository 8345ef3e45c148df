"""Every program that capibara/ jits is compiled for slices by a test here, or is listed with the reason why not."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import test_consensus
import test_generation
import test_training
from matrix import PACKAGE

from capibara.inference.engine.programs.programs import Programs

JITS = ("jit", "pjit", "pmap", "xmap")
BY_HAND = ("shard_map", "pallas_call")

ENGINE = "inference/engine/programs/programs.py on_mesh"
COVERED = {ENGINE, test_consensus.START, *(program.site for program in test_training.PROGRAMS.values())}
ON_ONE_DEVICE = {
    "api/scored_model.py ScoredModel._logits": "a notebook's model, one row at a time",
    "api/scored_model.py ScoredModel._hidden": "a notebook's model, one row at a time",
    "interop/peft_runs.py merged": "convert has all of a model on one device",
    "interop/quantize/awq.py _loss": "convert rounds a layer at a time, on one device",
    "interop/conversion.py _merged": "convert has all of a model on one device",
    "interop/quantize/grid.py _fit": "convert rounds a layer at a time, on one device",
    "interop/quantize/grid.py _scales": "convert rounds a layer at a time, on one device",
    "interop/quantize/quantization.py _Layers.__init__": "convert runs a layer at a time, on one device",
    "interop/quantize/quantization.py _Layers.__init__ 2": "convert runs a layer at a time, on one device",
    "retrieval/embedding.py TextEmbedder.__init__": "prepare index embeds a batch of chunks at a time, on one device",
    "strategies/group/arrays.py compressed": "a node's process 0 has all of an update on its host, or one device",
    "strategies/group/arrays.py gradient_of": "the coordinator has all updates on its host",
    "strategies/group/coordinator.py _Coordination._settled": "the coordinator has all updates on its host",
    "checkpoints/saving.py _copied": "on CPUs alone: elsewhere the copies go to the host's memory without a program",
}


def sites(source: str, path: str, names: tuple[str, ...]) -> Iterator[str]:
    """Where a module names one of these functions of JAX: "file qualified.name", a second time with " 2".

    A decorator is of the function that it decorates.
    """
    counts: dict[str, int] = {}

    def walk(node: ast.AST, owners: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            owners = (*owners, node.name)
        imported = isinstance(node, ast.ImportFrom) and any(alias.name in names for alias in node.names)
        if imported or (isinstance(node, ast.Attribute) and node.attr in names):
            site = f"{path} {'.'.join(owners)}".strip()
            counts[site] = counts.get(site, 0) + 1
            yield site if counts[site] == 1 else f"{site} {counts[site]}"
        for child in ast.iter_child_nodes(node):
            yield from walk(child, owners)

    yield from walk(ast.parse(source), ())


def sites_of_package(names: tuple[str, ...]) -> set[str]:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        found |= set(sites(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix(), names))
    return found


def test_every_jitted_program_is_compiled_for_slices_or_has_a_reason():
    found = sites_of_package(JITS)
    new, gone = found - COVERED - ON_ONE_DEVICE.keys(), (COVERED | ON_ONE_DEVICE.keys()) - found
    assert not new, (
        f"compile {sorted(new)} in tests/slices/test_training.py, or list it in ON_ONE_DEVICE with the reason"
    )
    assert not gone, f"capibara/ jits nothing there any more: {sorted(gone)}"
    assert not COVERED & ON_ONE_DEVICE.keys()


def test_what_partitions_by_hand_is_part_of_a_program_that_is_compiled():
    known = test_training.WITHIN.keys() | test_generation.WITHIN.keys() | test_consensus.WITHIN.keys()
    assert sites_of_package(BY_HAND) == known
    assert {*test_consensus.WITHIN.values()} <= test_consensus.AGGREGATIONS.keys() | test_consensus.STEPS.keys()
    for name, model in test_training.WITHIN.values():
        assert model in test_training.PROGRAMS[name].models


def test_the_short_half_has_every_jitted_function_and_every_axis():
    chosen = [p.values for p in test_training.matrix() if not p.marks]
    assert {test_training.PROGRAMS[name].site for name, *_ in chosen} == COVERED - {ENGINE, test_consensus.START}
    assert len(chosen) == len(test_training.SHORT)
    assert {axis for *_, sizes in chosen for axis in sizes} == {"data", "fsdp", "expert", "tensor", "context", "stage"}
    engines = [p.values for p in test_generation.matrix() if not p.marks]
    assert len(engines) == len(test_generation.SHORT)
    called = {"serving", "start", "prefill", "take_row", "resume", "admit", "step", "verify", "row"}
    on_one_device = {"read", "put", "mix", "begin"}  # on CPUs alone
    assert called | on_one_device == set(Programs._fields), "test_generation.py must call what the engine calls"


def test_the_finder_sees_every_way_to_jit():
    source = """
import functools, jax
from jax.experimental.pjit import pjit
alias = jax.jit
@functools.partial(jax.jit, static_argnums=0)
def decorated(x):
    @jax.jit
    def inner(y): return y
class Owner:
    def make(self):
        self.a, self.b = jax.jit(f), nnx.jit(g)
"""
    want = {"m.py", "m.py 2", "m.py decorated", "m.py decorated.inner", "m.py Owner.make", "m.py Owner.make 2"}
    assert set(sites(source, "m.py", JITS)) == want
