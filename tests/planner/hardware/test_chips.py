"""Specifications of chips: figures that must agree with each other and with other publications."""

import dataclasses
import datetime

import pytest

from capibara.core.types import UserError
from capibara.planner.hardware import chips

TPUS = [chip for chip in chips.CHIPS.values() if chip.is_tpu]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("v5e", "v5e"),
        ("v5litepod", "v5e"),
        ("Trillium", "v6e"),
        ("ironwood", "tpu7x"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("NVIDIA H200", "h200"),
        (" V4 ", "v4"),
    ],
)
def test_a_chip_has_many_names(name, want):
    assert chips.chip(name).name == want


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5f", r"chip 'v5f' is not known: did you mean v5p or v5e\?"),
        ("trilium", "did you mean trillium"),
        ("abacus", "chip 'abacus' is not known: known are v4, v5e, v5p, v6e, tpu7x, h100, h200, cpu"),
    ],
)
def test_a_chip_that_is_none_is_named_with_the_nearest(name, message):
    with pytest.raises(UserError, match=message) as error:
        chips.chip(name)
    assert "\n" not in str(error.value)


def test_no_two_chips_share_a_name():
    names = [name.lower() for name in chips.chip_names()]
    kinds = [kind for chip in chips.CHIPS.values() for kind in chip.device_kinds]
    assert len(names) == len(set(names)) and len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 2307e12 / 2),  # a chip is two devices
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("cpu", None),
        ("Radeon", None),
    ],
)
def test_peak_flops_are_of_one_device(kind, want):
    assert chips.peak_flops(kind) == want


def test_flops_by_dtype():
    v6e, v4 = chips.chip("v6e"), chips.chip("v4")
    assert v6e.flops("int8") == 2 * v6e.flops("bfloat16") == 2 * v6e.flops()
    assert v6e.flops("float8_e4m3fn") == v6e.flops("float8")
    assert v4.flops("float8_e4m3fn") == v4.flops("bfloat16")  # no units for it
    assert v6e.flops("float32") * 6 == pytest.approx(v6e.flops())
    tpu7x = chips.chip("tpu7x")
    assert tpu7x.device_flops("float8") == 4614e12 / 2
    assert tpu7x.device_usable_hbm_bytes == 94.75 * 2**30 and tpu7x.device_hbm_bytes_per_s == 3690e9


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=lambda chip: chip.name)
def test_figures_are_in_their_units(chip):
    assert 0.9 * chip.hbm_bytes < chip.usable_hbm_bytes <= chip.hbm_bytes
    assert 1e9 <= chip.clock_hz <= 4e9
    if chip.name == "cpu":
        return
    assert 1e14 < chip.flops() < 1e16 and 5e11 < chip.hbm_bytes_per_s < 1e13
    # FLOP for a byte of HBM: the corner of the roofline
    assert 150 < chip.flops() / chip.hbm_bytes_per_s < 600
    assert chip.hbm_bytes_per_s > chip.ici_links * chip.link_bytes_per_s > chip.pcie_bytes_per_s > chip.dcn_bytes_per_s
    assert [machine.chips for machine in chip.machines] == sorted({machine.chips for machine in chip.machines})
    assert chip.machine_chips in {machine.chips for machine in chip.machines}


@pytest.mark.parametrize(("name", "published"), [("v5e", 400e9), ("v6e", 800e9), ("v5p", 1200e9), ("tpu7x", 1200e9)])
def test_links_are_nine_tenths_of_what_the_pages_publish_per_chip(name, published):
    chip = chips.chip(name)
    assert chip.ici_links == 2 * chip.ici_axes
    assert 2 * chip.ici_links * chip.link_bytes_per_s == pytest.approx(0.9 * published)


@pytest.mark.parametrize(("name", "hz"), [("v4", 1.05e9), ("v5e", 1.5e9), ("v5p", 1.75e9), ("v6e", 1.75e9)])
def test_clocks_reach_the_published_flops(name, hz):
    assert chips.chip(name).clock_hz == pytest.approx(hz, rel=2e-3)


def test_prices_say_where_they_are_from():
    for chip in chips.CHIPS.values():
        if chip.price:
            assert 0.5 < chip.price.usd < 20 and chip.price.date.startswith("20")
            assert chip.price.source and chip.price.region
    assert {chip.name for chip in TPUS if not chip.price} == {"tpu7x"}  # none was found


def test_an_old_price_says_its_age(monkeypatch):
    class Day(datetime.date):
        @classmethod
        def today(cls):
            return cls(2026, 11, 30)

    monkeypatch.setattr(chips.datetime, "date", Day)
    price = chips.chip("v5e").price
    for date, age in (("2025-02", ", 21 months old"), ("2026-08-31", ", 3 months old"), ("2026-11", "")):
        assert dataclasses.replace(price, date=date).describe() == f"list price of {date}{age}"


def test_a_chip_can_be_a_key_and_be_altered():
    v5e = chips.chip("v5e")
    more = dataclasses.replace(v5e, name="v5e-plus", hbm_bytes=2 * v5e.hbm_bytes)
    assert len({v5e, more, chips.chip("v5litepod")}) == 2
