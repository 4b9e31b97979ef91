"""What would make a step fit."""

import os

import jax
import pytest

from perex_t5x.cli import progress
from perex_t5x.models import remat as remat_policies
from perex_t5x.preflight import report_cache, search, step
from tests import tiny
from tests.preflight.support import needs_libtpu

FILES = ("models/tiny.gin", "runs/pretrain.gin")
BINDINGS = (
    *(b for b in tiny.BINDINGS if "TASK_NAME" not in b and "TASK_MODULE" not in b),
    "models.T5Config.num_decoder_layers = 1",
)


def quiet():
    return progress.Working(open(os.devnull, "w"))


def test_the_order_of_changes():
    trainer, _ = step.build(FILES, [*BINDINGS, "Trainer.num_microbatches = 2"], jax.devices()[:2])
    found = [str(c) for c in search.changes(trainer, 16, step.CompileTarget("v5e:8x16"))]
    remat = "--gin.T5Config.remat_policy=\"'full'\""
    fsdp = "--gin.standard_logical_axis_rules.parameter_partitioning_dims=2"
    assert found == [
        "--gin.Trainer.num_microbatches=4",
        "--gin.Trainer.num_microbatches=8",
        remat,
        fsdp,
        "--topology=v5e:16x16",
        f"--gin.Trainer.num_microbatches=8 {remat} {fsdp}",
        f"{remat} {fsdp} --topology=v5e:16x16",
    ]


def test_what_is_so_already_is_not_tried():
    files = (*FILES, "meshes/fsdp.gin")
    trainer, _ = step.build(files, [*BINDINGS, "T5Config.remat_policy = 'full'"], jax.devices()[:2])
    assert not list(search.changes(trainer, 2, step.CompileTarget("v5e:16x16")))


class Chip:
    """In the compiler's place: each device holds a number of its own examples at a time."""

    def __init__(self, examples):
        self.examples, self.asked = examples, 0

    def report(self, trainer, spec):
        self.asked += 1
        mine = (
            next(iter(spec.values())).shape[0]
            // trainer.partitioner.data_parallel_size
            // trainer.options.num_microbatches
        )
        if mine > self.examples:
            raise step.DoesNotFitError(f"{mine} examples.")
        return step.StepReport(1, 1, 1, 10**9, 0, 10**6, (), (), step.CompileTarget("v5e:2x2").chip)


@pytest.fixture
def cpus(monkeypatch):
    """CPUs in the chips' place."""
    monkeypatch.setattr(step.CompileTarget, "devices", lambda self: jax.devices()[: 8 if "2x4" in self.topology else 4])


def find(compiler, *bindings):
    return search.search(
        search.Case("x", FILES, (*BINDINGS, *bindings)), step.CompileTarget("v5e:2x2"), compiler, quiet()
    )


def test_stops_at_the_first_that_fits(cpus):
    compiler = Chip(1)
    found = find(compiler)  # 16 examples, 4 on each
    assert [(str(t.change), t.fits) for t in found.trials] == [
        ("--gin.Trainer.num_microbatches=2", False),
        ("--gin.Trainer.num_microbatches=4", True),
    ]
    assert compiler.asked == 2
    assert found.lines() == [
        "x does not fit.",
        "  tried --gin.Trainer.num_microbatches=2: 2 examples.",
        "  this fits: --gin.Trainer.num_microbatches=4 (1 GB of 16.9 GB, 0.000667 s per step)",
    ]
    assert found.as_dict()["found"] == "--gin.Trainer.num_microbatches=4"


def test_a_state_that_no_microbatches_can_help(cpus):
    """19 GB on chips of 16: only FSDP can, and the compiler is asked for nothing else."""
    compiler = Chip(100)
    found = find(compiler, "models.T5Config.emb_dim = 16384", "models.T5Config.mlp_dim = 32768")
    assert compiler.asked == 1
    assert all("state and batch alone take 19" in t.note for t in found.trials if not t.fits)
    assert str(found.found.change) == "--gin.standard_logical_axis_rules.parameter_partitioning_dims=2"


def test_what_is_not_possible_is_said(cpus):
    found = find(Chip(0), "BATCH_SIZE = 4")
    assert found.found is None and found.lines()[-1] == "  nothing that was tried fits."
    (larger,) = [t for t in found.trials if str(t.change) == "--topology=v5e:2x4"]
    assert larger.note.startswith("not possible: ") and "not divisible by the 8 data shards" in larger.note


@needs_libtpu
@pytest.mark.slow
def test_with_the_compiler():
    wide = ("models.T5Config.emb_dim = 16384", "models.T5Config.mlp_dim = 32768", "BATCH_SIZE = 8")
    found = find(report_cache.ReportCache(), *wide)
    assert "parameter_partitioning_dims" in str(found.found.change)
    assert 10**9 < found.found.peak_bytes < step.CompileTarget("v5e:2x2").chip.hbm_bytes


def test_remat_auto_tries_what_the_trainer_would(monkeypatch):
    """The two policies of which neither keeps all that the other does; with `all` the whole list."""
    cycles = dict(zip(remat_policies.LADDER, (None, 7, 6, 8, 9, 10), strict=True))

    def answer(case, change, cache, working):
        policy = change.bindings[0].partition(" = ")[2].strip("'")
        return search.Trial(change, cycles[policy] is not None, policy, 1, cycles[policy])

    monkeypatch.setattr(search, "_try", answer)
    arguments = search.Case("one", ()), remat_policies.LADDER, step.CompileTarget("v5e:4x4"), None, None
    some, every = (search.choose_remat(*arguments, all=all) for all in (False, True))
    assert [t.note for t in some.trials] == list(remat_policies.LADDER[:3]) and some.best is some.trials[2]
    assert [t.note for t in every.trials] == list(remat_policies.LADDER) and every.best.note == remat_policies.LADDER[2]
    assert some.bindings == (f"T5Config.remat_policy = '{remat_policies.LADDER[2]}'",)
