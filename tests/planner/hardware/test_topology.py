"""Names of slices; the devices behind them where libtpu is installed."""

import importlib.util
import math

import pytest

from capibara import sharding
from capibara.core.types import UserError
from capibara.planner.hardware import slices, topology
from capibara.sharding import Plan

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("v5e-64", "v5e:8x8"),
        ("v5litepod-8", "v5e:2x4"),
        ("v6e-256", "v6e:16x16"),
        ("v5p-8", "v5p:2x2x1"),  # 8 cores are 4 chips
        ("v4-16", "v4:2x2x2"),
        ("v5e:4x8", "v5e:4x8"),
    ],
)
def test_names_of_slices_become_the_compilers(name, want):
    assert topology.topology_name(name) == want


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-65", "has the sizes 1, 4, 8.*try v5e-64"),
        ("v5e64", "must be like v5e-64"),
        ("v7e-4", "must be like v5e-64"),
        ("v5f:2x2", "no TPU 'v5f'"),
    ],
)
def test_a_slice_that_is_none_is_named_with_the_nearest(name, message):
    with pytest.raises(UserError, match=message):
        topology.topology_name(name)


def test_without_libtpu_the_install_command_is_said(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(UserError, match=r'libtpu is not installed.*v5e-4.*pip install -e "[^"]+\[tpu\]"'):
        topology.slice_devices("v5e-4")


@needs_libtpu
def test_slices_have_their_chips_and_hosts():
    for name, chips, hosts, kind in (("v5e-1", 1, 1, "TPU v5 lite"), ("v6e-16", 16, 4, "TPU v6 lite")):
        devices = topology.slice_devices(name)
        assert len(devices) == chips and len({d.process_index for d in devices}) == hosts
        assert {d.device_kind for d in devices} == {kind} and devices[0].platform == "tpu"
    with pytest.raises(UserError, match="no topology v5e:3x5"):
        topology.slice_devices("v5e:3x5")


@needs_libtpu
@pytest.mark.parametrize("name", ["v6e-8", "v5p-128", "tpu7x-2", "v4-8", "2xv5e-16"])
def test_the_compiler_agrees_with_the_tables(name):
    devices, want = topology.slice_devices(name), slices.parse(name)
    assert len(devices) == want.devices and devices[0].device_kind in want.chip.device_kinds
    assert len({device.process_index for device in devices}) == want.hosts
    assert len({getattr(device, "slice_index", 0) for device in devices}) == want.count


def test_the_compiler_is_not_asked_for_gpus():
    with pytest.raises(UserError, match="slice 'h100-8' has no TPUs"):
        topology.topology_name("h100-8")


@needs_libtpu
@pytest.mark.parametrize("name", ["v5e-8", "v6e-8", "v5p-8"])
def test_jax_makes_meshes_of_the_parts_that_are_boxes_and_of_no_others(name):
    whole, all_devices = slices.parse(name), topology.slice_devices(name)
    for count in range(1, whole.devices):
        for first in (0, whole.devices - count):
            part, chosen = slices.part(whole, first, count), all_devices[first : first + count]
            sides = [max(along) - min(along) + 1 for along in zip(*(device.coords for device in chosen))]
            if part is None:
                assert math.prod(sides) != count
                with pytest.raises(AssertionError):
                    sharding.make_mesh(Plan(batch_size=count, fsdp=count), chosen)
            else:
                assert tuple(sides)[: len(part.shape)] == part.shape
                sharding.make_mesh(Plan(batch_size=count, fsdp=count), chosen)
