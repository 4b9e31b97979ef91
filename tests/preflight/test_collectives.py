"""The table of collectives, and the command that prints it."""

import os
import subprocess
import sys

import pytest

from perex_t5x.hardware.hlo.program import Collective
from perex_t5x.preflight import render
from tests.preflight.support import needs_libtpu

LOOPS = {"microbatch": 4, "layer": 12}


def collective(kind="all-reduce", size=4_000_000, loops=(), axes=("data",), name="x", **more):
    executions = 1
    for turns in loops:
        executions *= turns
    return Collective(kind, name, size, 1, axes, loops, executions, "ICI", 8, ("f32",), **more)


def test_alike_are_one_line():
    found = [
        collective(size=2_000_000, loops=(4, 12), name="a"),
        collective(size=6_000_000, loops=(4, 12), name="b"),
        collective("all-gather", name="c"),
        collective(size=4, name="d"),  # a scalar is no part of what stands beside it
        collective(name="e"),
    ]
    lines = render.collective_rows(found, LOOPS)
    assert [line[:4] + line[6:8] for line in lines] == [
        ("all-reduce", "data", "per microbatch, layer", "96", "2 MB to 6 MB", "384 MB"),
        ("all-gather", "data", "once", "1", "4 MB", "4 MB"),
        ("all-reduce", "data", "once", "1", "4 B", "4 B"),
        ("all-reduce", "data", "once", "1", "4 MB", "4 MB"),
    ]
    assert len(render.collective_rows(found, LOOPS, each=True)) == 5


def test_permutes_that_are_a_gather_say_so():
    (line,) = render.collective_rows([collective("collective-permute", part_of="all-gather", loops=(12, 8))], LOOPS)
    assert line[0] == "all-gather, as permutes"
    assert line[2] == "per layer, turn of 8"


def test_text_and_markdown():
    lines = render.collective_rows([collective()], LOOPS)
    header, row = render.collectives_text(lines).splitlines()
    assert header.index("axes") == row.index("data")
    assert (
        render.collectives_text(lines, markdown=True)
        .splitlines()[2]
        .startswith("| all-reduce | data | once | 1 | 1 | f32 |")
    )


def run(*flags):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "perex_t5x.preflight.collectives", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


RUN = ("--gin_file=models/tiny.gin", "--gin_file=runs/pretrain.gin", "--gin.TASK_FEATURE_LENGTHS={'targets': 16}")


@pytest.mark.slow
def test_the_command_on_fake_devices():
    done = run(*RUN, "--gin_file=meshes/dp.gin", "--gin.BATCH_SIZE=16", "--devices=4", "--markdown")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| collective | axes | where |")
    assert "| all-reduce | data | once |" in done.stdout
    assert "mesh replica 1 x data 4 x model 1 on 4 device(s)" in done.stderr


@needs_libtpu
@pytest.mark.slow
def test_the_command_for_a_pod():
    done = run(*RUN, "--gin_file=meshes/v5e_16.gin", "--gin.BATCH_SIZE=16")
    assert done.returncode == 0, done.stderr
    assert "compiling for 16 x TPU v5 lite" in done.stderr
    assert "ICI" in done.stdout
    # Nothing of libtpu's noise, with no environment set by the user.
    assert [line for line in done.stderr.splitlines() if line and not line.startswith("compiling")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags,message",
    [
        ((), "no --gin_file given"),
        (RUN, "nothing to compile for: give --topology=v5e:4x4"),
        ((*RUN, "--topology=v5e:5x5"), "Did you mean 'v5e:4x8'"),
        ((*RUN, "--topology=v5e:4x4", "--devices=8"), "exclude each other"),
        (RUN[:2], "required but not given: TASK_FEATURE_LENGTHS."),
        ((*RUN, "--gin.TASK_FEATURE_LENGTHS={'inputs': 16}", "--devices=4"), "the model also needs targets"),
        ((*RUN, "--gin.BATCH_SIZE=3", "--devices=4"), "not divisible by the 4 data shards"),
    ],
)
def test_slips(flags, message):
    done = run(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
