"""Seconds of collectives at the networks' published rates."""

import pytest

from perex_t5x.hardware.chips import chip
from perex_t5x.hardware.hlo.program import Collective
from perex_t5x.preflight.overlap import network_seconds

V5E = chip("v5e")  # links of 50 GB/s, 3.125 GB/s to other slices


def seconds(kind, network="ICI", size=10**9, group=4, executions=1):
    return network_seconds([Collective(kind, "c", size, 1, ("data",), (), executions, network, group)], V5E)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-gather", 0.75 / 100),
        ("reduce-scatter", 0.75 / 100),
        ("all-reduce", 1.5 / 100),
        ("all-to-all", 1 / 100),
        ("collective-permute", 1 / 50),
    ],
)
def test_a_gigabyte_within_a_slice(kind, expected):
    assert seconds(kind) == pytest.approx({"ICI": expected, "DCN": 0.0})
    assert seconds(kind, executions=12)["ICI"] == pytest.approx(12 * expected)


def test_between_slices():
    assert seconds("all-reduce", "DCN", group=2) == pytest.approx({"ICI": 0.0, "DCN": 1 / 3.125})


def test_collectives_on_a_cpu_have_no_network():
    assert seconds("all-reduce", "") == {"ICI": 0.0, "DCN": 0.0}
