"""Mesh axes on a torus agree with sharding.make_mesh, and the seconds of collectives with arithmetic."""

import importlib.util
import itertools
import math
import random

import numpy as np
import pytest

from capibara import sharding
from capibara.core.types import UserError
from capibara.planner.hardware import network, slices, topology
from capibara.sharding import MESH_AXES, Plan


def mesh_of(**sizes):
    return dict.fromkeys(MESH_AXES, 1) | sizes


def laid(name, **sizes):
    return network.layout(slices.parse(name), mesh_of(**sizes))


def meshes(devices, count):
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if devices % n == 0]
    legal = [m for m in itertools.product(sizes, repeat=len(MESH_AXES)) if math.prod(m) == devices]
    return random.Random(devices).sample(legal, min(count, len(legal)))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("name", ["v5e-16", "v5e-32", "v5e-64", "v6e-256", "v5p-128"])
def test_axes_lie_where_make_mesh_puts_them(name):
    """On 8 chips or fewer JAX follows a ring instead, which the layout does not know."""
    slice_, devices = slices.parse(name), topology.slice_devices(name)
    for sizes in meshes(len(devices), 12):
        mesh = dict(zip(MESH_AXES, sizes))
        array = sharding.make_mesh(Plan(batch_size=len(devices) ** 2 * 4, **mesh), devices).devices
        lay = network.layout(slice_, mesh)
        for index, axis in enumerate(MESH_AXES):
            line = np.moveaxis(array, index, 0).reshape(sizes[index], -1)[:, 0]
            for torus_axis, span in enumerate(lay.spans[axis]):
                coordinates = sorted({device.coords[torus_axis] for device in line})
                assert len(coordinates) == span.size, (mesh, axis)
                assert span.size == 1 or coordinates[1] - coordinates[0] == span.stride, (mesh, axis)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_mesh_of_several_slices_has_one_part_of_the_outermost_axis_in_each():
    devices = topology.slice_devices("2xv5e-16")
    array = sharding.make_mesh(Plan(batch_size=32, data=2, fsdp=16), devices).devices
    assert [{d.slice_index for d in part.flat} for part in array] == [{0}, {1}]
    with pytest.raises(UserError, match=r"Plan.data \(1\).* multiple of the 2 slices: try data=2"):
        sharding.make_mesh(Plan(batch_size=32, fsdp=1, tensor=32), devices)


def test_whole_axes_come_first_and_inner_axes_are_neighbours():
    lay = laid("v5e-64", fsdp=16, tensor=4)
    assert [span.size for span in lay.spans["tensor"]] == [4, 1]
    assert [(span.size, span.stride) for span in lay.spans["fsdp"]] == [(2, 4), (8, 1)]
    assert lay.describe("tensor") == "tensor=4: x 4"
    assert lay.describe("fsdp") == "fsdp=16: x 2 (stride 4) x y 8"


def test_gathering_takes_the_bytes_that_arrive_over_the_links_there_are():
    link = slices.parse("v5e-64").chip.link_bytes_per_s
    line = laid("v5e-64", data=8, fsdp=8)
    assert line.gather_s(8e9, ["fsdp"]) == pytest.approx(7e9 / link)  # 8 chips in a line: no ring
    assert laid("v5e-64", fsdp=64).gather_s(64e9, ["fsdp"]) == pytest.approx(63e9 / (2 * link))  # both torus axes
    ring = laid("v5e-256", data=16, fsdp=16)
    assert ring.gather_s(16e9, ["fsdp"]) == pytest.approx(15e9 / (2 * link))  # round both ways
    assert ring.reduce_s(16e9, ["fsdp"]) == pytest.approx(2 * 15e9 / (2 * link))
    assert ring.gather_s(16e9, ["tensor"]) == 0.0


def test_axes_together_are_as_fast_as_their_links_together():
    lay = laid("v5e-256", data=16, fsdp=16)
    assert lay.bandwidth(["data", "fsdp"]) == pytest.approx(lay.bandwidth(["data"]) + lay.bandwidth(["fsdp"]))


def test_an_exchange_waits_for_the_middle_of_the_line():
    link = slices.parse("v5e-64").chip.link_bytes_per_s
    # 8 chips in a line, 4 on each side: each sends half of its bytes over the middle link.
    assert laid("v5e-64", data=8, expert=8).exchange_s(1e9, ["expert"]) == pytest.approx(4 * 0.5e9 / link)
    assert laid("v5e-256", data=16, expert=16).exchange_s(1e9, ["expert"]) == pytest.approx(8 * 0.5e9 / 2 / link)


def test_several_slices_lie_on_the_outermost_axis_and_talk_over_the_data_centre():
    lay = laid("2xv5e-256", data=2, fsdp=256)
    assert lay.slices["data"] == 2
    dcn = lay.slice_.chip.dcn_bytes_per_s * network.DCN_REACHED
    assert lay.reduce_s(1e9, ["data"]) == pytest.approx(2 * 0.5e9 / dcn)
    assert lay.describe("data") == "data=2: 2 slices"


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"mesh \(fsdp=32\) has 32 devices, v5e-64 has 64"):
        laid("v5e-64", fsdp=32)
    with pytest.raises(UserError, match="must be a multiple of the 2 slices"):
        laid("2xv5e-16", tensor=32)
