"""The table of throughputs: what a case requires, and the page."""

import dataclasses

import pytest

from perex_t5x.preflight import step, throughput
from perex_t5x.preflight.account import PreflightReport
from perex_t5x.preflight.breakdown import Part
from perex_t5x.preflight.report_cache import ReportCache
from tests.preflight.support import needs_libtpu

TARGET = step.CompileTarget("v5e:16x16")
CASE = throughput.Case("1_2b", "v5e_256", 1024, 2048, "full", 0.62, 0.58, (821e6, 654e6))


def report(name, cycles, bound, has_schedules=True):
    parts = (Part("MLP", cycles, 0, bound, 1),)
    found = step.StepReport(0, 0, 0, 10**9, 0, cycles, (), (), TARGET.chip, parts, has_schedules)
    flops = 0.6 * 700e6 / 1.5e9 * 197e12 * 256  # an MFU of 60 % at 700 M cycles
    return PreflightReport(
        name, TARGET, "", 2048, 2048 * 1024, flops, "TPU v5 lite", 256, {}, ("mean",), found, "", None, (), {}
    )


def test_what_a_case_requires():
    good = {"adamw": report("adamw", 650_000_000, 600_000_000), "micro_adam": report("micro_adam", 680_000_000, 1)}
    assert throughput.missed(CASE, good) == []
    slow = {"adamw": report("adamw", 800_000_000, 660_000_000), "micro_adam": report("micro_adam", 900_000_000, 1)}
    assert throughput.missed(CASE, slow) == [
        "MFU 52.5%, required 62%",
        "MFU, none hidden 52.5%, required 58%",
        "statistics 1.125 x, allowed 1.05",
        "0.974 x MaxText's by A, allowed 0.91",
        "1.009 x MaxText's by B, allowed 1.0",
    ]
    # A bound of less than MaxText's is made of is not compared with it.
    assert len(throughput.missed(CASE, {"adamw": report("adamw", 650_000_000, 660_000_000, False)})) == 0
    too_large = {"adamw": dataclasses.replace(good["adamw"], step=None)}
    assert throughput.missed(CASE, too_large) == ["adamw does not fit"]
    page = throughput.as_markdown({"x": (CASE, good), "y": (CASE, too_large)})
    row = next(line for line in page.splitlines() if "micro_adam" in line and "680 M" in line)
    assert "| 1.046 |" in row
    assert "0.792; 0.917" in page and "| 821 M | 654 M |" in page and "| 1348 M | 894 M |" in page


@needs_libtpu
@pytest.mark.slow
def test_the_step_of_1_2b_on_a_pod(tmp_path):
    """The requirements at T = 1024, by the compiler's cycles."""
    from perex_t5x.cli.progress import Working

    names = ["1_2b-1024-full", "1_2b-1024-named"]
    for case, reports in throughput.measured(names, throughput.OPTIMIZERS, ReportCache(tmp_path), Working()):
        assert throughput.missed(case, reports) == []
