"""Slices by name: their shapes, links, hosts, names in Google Cloud and prices."""

import subprocess
import sys

import pytest

from capibara.core.types import UserError
from capibara.planner.hardware import chips, slices


@pytest.mark.parametrize(
    ("name", "canonical", "shape", "count", "devices", "hosts"),
    [
        ("v5e-64", "v5e-64", (8, 8), 1, 64, 16),
        ("v5litepod-64", "v5e-64", (8, 8), 1, 64, 16),
        ("v5e:8x8", "v5e-64", (8, 8), 1, 64, 16),
        ("V6E-256", "v6e-256", (16, 16), 1, 256, 64),
        ("trillium-8", "v6e-8", (2, 4), 1, 8, 1),
        ("v5e-1", "v5e-1", (1, 1), 1, 1, 1),
        ("v5p-8", "v5p-8", (2, 2, 1), 1, 4, 1),  # 8 cores are 4 chips
        ("v4-16", "v4-16", (2, 2, 2), 1, 8, 2),
        ("v5p-384", "v5p-384", (4, 4, 12), 1, 192, 48),
        ("v5p-12288", "v5p-12288", (16, 16, 24), 1, 6144, 1536),
        ("v5p:4x4x16", "v5p:4x4x16", (4, 4, 16), 1, 256, 64),
        ("v5p:4x8x8", "v5p-512", (4, 8, 8), 1, 256, 64),
        ("ironwood-8", "tpu7x-8", (2, 2, 1), 1, 8, 1),  # 4 chips of two devices each
        ("tpu7x-2", "tpu7x-2", (1, 1, 1), 1, 2, 1),
        ("tpu7x-256", "tpu7x-256", (4, 4, 8), 1, 256, 32),
        ("2xv5e-256", "2xv5e-256", (16, 16), 2, 512, 128),
        ("8 x v5e-256", "8xv5e-256", (16, 16), 8, 2048, 512),
        ("2xv5p:4x4x16", "2xv5p:4x4x16", (4, 4, 16), 2, 512, 128),
        ("1xv5e-4", "v5e-4", (2, 2), 1, 4, 1),
        ("h100-8", "h100-8", (8,), 1, 8, 1),
        ("4xh200-8", "4xh200-8", (8,), 4, 32, 4),
        ("cpu-6", "cpu-6", (6,), 1, 6, 1),
    ],
)
def test_names_of_slices(name, canonical, shape, count, devices, hosts):
    found = slices.parse(name)
    assert (found.name, found.shape, found.count) == (canonical, shape, count)
    assert (found.devices, found.hosts) == (devices, hosts)
    assert found.chips * found.chip.devices == devices == found.count * found.devices_per_slice
    assert slices.parse(found.name) == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-65", "v5e has the sizes 1, 4, 8, 16, 32, 64, 128, 256: try v5e-64"),
        ("v5litepod-512", "try v5litepod-256"),
        ("v5p-9", "v5p has the sizes 8, 16, .* and the other multiples of 128 up to 12288: try v5p-8"),
        ("v5p-200", "try v5p-256"),
        ("v5p-99999", "try v5p-12288"),
        ("v5e64", "must be like v5e-64.*with one of v4, v5e.*: did you mean v5e-64"),
        ("v7e-4", "must be like v5e-64"),
        ("", "must be like v5e-64"),
        ("v5f:2x2", r"no TPU 'v5f': did you mean v5p or v5e\?"),
        ("h100:8", "no TPU 'h100'"),
        ("v5e:3x5", "v5e has no topology v5e:3x5: try v5e:4x4"),
        ("v5e:8x4", "the shorter axes come first: try v5e:4x8"),
        ("v5p:8x4x4", "try v5p:4x4x8"),
        ("v5p:4x4", "v5p has no topology v5p:4x4: try v5p:2x2x4"),
        ("v5p:4x4x6", "v5p has no topology v5p:4x4x6: try v5p:4x4x4"),
        ("v5p:0x0x0", "has no topology"),
        ("0xv5e-4", "the number of slices .0. must be from 1 to 1024: try v5e-4"),
        ("999999xv5e-256", "the number of slices .999999. must be from 1 to 1024: try 1024xv5e-256"),
        ("h100-64", "one h100 machine has at most 8 chips: try 8xh100-8"),
        ("h100-3", "h100 has the sizes 1, 2, 4, 8: try h100-2"),
        ("cpu-0", "cpu has the sizes 1 to 512: try cpu-1"),
    ],
)
def test_a_slice_that_is_none_is_named_with_the_nearest(name, message):
    with pytest.raises(UserError, match=message) as error:
        slices.parse(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("v5e-64", (False, False)),
        ("v5e-128", (False, True)),  # 8 x 16
        ("v6e-256", (True, True)),
        ("v5p-64", (False, False, False)),  # 2 x 4 x 4: less than a cube
        ("v4-128", (True, True, True)),
        ("v5p:4x4x16", (True, True, True)),
        ("tpu7x-32", (False, False, False)),
        ("h100-8", (True,)),
        ("h100-1", (False,)),
    ],
)
def test_rings_are_closed_where_the_slice_has_the_links(name, want):
    assert slices.parse(name).wraps == want


@pytest.mark.parametrize(
    ("name", "machine", "accelerator", "topology", "api", "vertex"),
    [
        ("v5e-1", "ct5lp-hightpu-1t", "tpu-v5-lite-podslice", "1x1", "v5litepod-1", "ct5lp-hightpu-1t"),
        ("v5e-8", "ct5lp-hightpu-8t", "tpu-v5-lite-podslice", "2x4", "v5litepod-8", "ct5lp-hightpu-8t"),
        ("v5e-64", "ct5lp-hightpu-4t", "tpu-v5-lite-podslice", "8x8", "v5litepod-64", "ct5lp-hightpu-4t"),
        ("2xv6e-256", "ct6e-standard-4t", "tpu-v6e-slice", "16x16", "v6e-256", "ct6e-standard-4t"),
        ("v4-8", "ct4p-hightpu-4t", "tpu-v4-podslice", "2x2x1", "v4-8", None),
        ("v5p-128", "ct5p-hightpu-4t", "tpu-v5p-slice", "4x4x4", "v5p-128", None),
        ("tpu7x-128", "tpu7x-standard-4t", "tpu7x", "4x4x4", None, None),
        ("tpu7x-2", "tpu7x-standard-1t", "tpu7x", "1x1x1", None, None),
    ],
)
def test_names_in_google_cloud(name, machine, accelerator, topology, api, vertex):
    found = slices.parse(name)
    assert (found.machine_type, found.gke_accelerator, found.gke_topology) == (machine, accelerator, topology)
    assert (found.accelerator_type, found.vertex_machine_type) == (api, vertex)
    assert found.vertex_tpu_topology == (topology if vertex else None)
    assert found.topology == f"{found.chip.name}:{topology}"


def test_gpus_and_cpus_have_machines_of_their_own():
    assert slices.parse("h100-4").machine_type == "a3-highgpu-4g" and slices.parse("h100-4").topology is None
    h200 = slices.parse("h200-2")  # a part of the only machine
    assert (h200.machine_type, h200.chips_per_host, h200.hosts) == ("a3-ultragpu-8g", 2, 1)
    cpu = slices.parse("cpu-8")
    assert (cpu.machine_type, cpu.hosts, cpu.host_memory_bytes, cpu.topology) == (None, 1, None, None)


def test_hosts_share_the_network_between_slices():
    v5e = slices.parse("2xv5e-256")
    assert v5e.dcn_bytes_per_s == 4 * 3.125e9 and v5e.host_memory_bytes == 192e9
    # the page of v5e: 6.4 Tb/s for a pod
    assert v5e.hosts * v5e.dcn_bytes_per_s * 8 == 2 * 6.4e12


def test_prices_are_of_all_chips_and_can_be_others():
    assert slices.parse("v5e-64").price_per_hour() == pytest.approx(64 * 1.20)
    assert slices.parse("2xv5p-8").price_per_hour() == pytest.approx(2 * 4 * 4.20)
    assert slices.parse("v6e-256").price_per_hour(1.0) == 256
    assert slices.parse("v6e-256").price_per_hour(0.0) == 0
    assert slices.parse("tpu7x-8").price_per_hour() is None
    assert slices.parse("tpu7x-8").price_per_hour(5.0) == 20


@pytest.mark.parametrize("name", chips.CHIPS)
def test_sizes_grow_and_are_read_back(name):
    found = slices.sizes(name)
    assert found == slices.sizes(chips.chip(name))
    assert [slice_.chips for slice_ in found] == sorted({slice_.chips for slice_ in found})
    assert found[-1].chips == chips.chip(name).most_chips
    for slice_ in found:
        assert slices.parse(slice_.name) == slice_
        if slice_.topology:
            assert slices.parse(slice_.topology) == slice_
        assert slice_.hosts * slice_.chips_per_host == slice_.chips


def test_cubes_are_put_together_as_near_to_a_cube_as_they_go():
    shapes = {slice_.chips // 64: slice_.shape for slice_ in slices.sizes("v5p") if slice_.chips >= 64}
    assert len(shapes) == 96
    for cubes, want in {1: "4x4x4", 6: "4x8x12", 16: "8x8x16", 54: "12x12x24", 61: "4x4x244", 96: "16x16x24"}.items():
        assert "x".join(map(str, shapes[cubes])) == want


def test_every_named_slice_is_one():
    names = slices.slice_names()
    assert {"v5e-64", "v6e-256", "v5p-8", "v4-4096", "tpu7x-128", "h100-8", "cpu-8"} <= set(names)
    assert len(names) == len(set(names))
    assert [slices.parse(name).name for name in names] == names


def test_names_are_read_without_jax():
    code = (
        "import sys\nfrom capibara.planner.hardware import chips, slices\nslices.parse('v5e-64').price_per_hour()\n"
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "first", "devices", "shape"),
    [
        ("v5e-8", 0, 4, (2, 2)),
        ("v5e-8", 0, 6, (2, 3)),
        ("v5e-8", 6, 2, (2, 1)),
        ("v5e-8", 0, 1, (1, 1)),
        ("v5e-8", 0, 3, None),
        ("v5e-8", 1, 2, None),
        ("v5p-8", 0, 2, (2, 1, 1)),
        ("tpu7x-8", 4, 4, (2, 1, 1)),  # two devices a chip
        ("tpu7x-8", 0, 3, None),
        ("h100-8", 0, 5, (5,)),
    ],
)
def test_a_part_is_a_box_of_the_first_or_last_devices(name, first, devices, shape):
    whole = slices.parse(name)
    part = slices.part(whole, first, devices)
    if shape is None:
        assert part is None
        return
    assert part.shape == shape and part.devices == devices
    assert part.title == f"{devices} of the {whole.devices} devices of {name}" and part.name == name == whole.title


def test_a_part_has_the_machine_and_the_price_of_the_whole():
    whole = slices.parse("v5e-8")
    part = slices.part(whole, 0, 4)
    assert part.price_per_hour() == whole.price_per_hour() and part.price_per_hour(2.0) == 16.0
    assert part.hosts == 1 and part.chips == 4
    whole = slices.parse("v6e-8")
    host_bytes = slices.part(whole, 0, 1).device_host_bytes
    assert host_bytes == whole.device_host_bytes != slices.parse("v6e-1").device_host_bytes
