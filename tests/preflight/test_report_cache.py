"""What was compiled before is not compiled again, and never taken for something else."""

import re

import jax
import pytest

from perex_t5x.hardware.hlo.program import Collective
from perex_t5x.preflight import report_cache, step
from perex_t5x.preflight.breakdown import Part
from tests import tiny

FILES = ["models/tiny.gin", "runs/pretrain.gin"]
BINDINGS = [b for b in tiny.BINDINGS if "TASK_NAME" not in b and "TASK_MODULE" not in b]
BINDINGS.append("models.T5Config.num_decoder_layers = 1")
COLLECTIVE = Collective("all-gather", "x.1", 8, 1, ("data",), (4, None), 4, "ICI", 2, ("f32",), "", "step/x")
PART = Part("attention", 6, 2, 5, 3)
REPORT = step.StepReport(1, 2, 3, 4, 5, 6, (COLLECTIVE,), ("kernel.1",), None, (PART,))


def built(devices, *bindings):
    return step.build(FILES, [*BINDINGS, *bindings], devices)


@pytest.fixture
def compiled(monkeypatch):
    """In the compiler's place: counts what it is asked for."""
    calls = []
    monkeypatch.setattr(step, "compile_lowered", calls.append)
    monkeypatch.setattr(step, "report", lambda compiled, mesh, cache, schedules: REPORT)
    return calls


def test_again_without_the_compiler(tmp_path, compiled):
    devices = jax.devices()[:2]
    assert report_cache.ReportCache(tmp_path).report(*built(devices)) == REPORT
    assert report_cache.ReportCache(tmp_path).report(*built(devices)) == REPORT
    assert len(compiled) == 1
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:100])  # a file cut short is none
    assert report_cache.ReportCache(tmp_path).report(*built(devices)) == REPORT
    assert len(compiled) == 2


def test_other_programs_and_places_are_others(tmp_path, compiled, monkeypatch):
    compiler = report_cache.ReportCache(tmp_path)
    compiler.report(*built(jax.devices()[:2]))
    compiler.report(*built(jax.devices()[2:4]))  # the same program on others
    compiler.report(*built(jax.devices()[:2], "optax.adamw.b1 = 0.8"))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--some_flag=1")
    compiler.report(*built(jax.devices()[:2]))
    compiler.report(*built(jax.devices()[:2], "trainer.Trainer.compiler_options = {'xla_cpu_enable_fast_math': False}"))
    assert len(compiled) == 5


def test_refusals_are_kept_too(tmp_path, monkeypatch):
    calls = []

    def refuse(lowered):
        calls.append(lowered)
        raise step.DoesNotFitError("Ran out of memory.")

    monkeypatch.setattr(step, "compile_lowered", refuse)
    for _ in range(2):
        with pytest.raises(step.DoesNotFitError) as e:
            report_cache.ReportCache(tmp_path).report(*built(jax.devices()[:1]))
        assert e.value.refusal == "Ran out of memory."
    assert len(calls) == 1


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path, compiled):
    (tmp_path / "file").write_text("")
    assert report_cache.ReportCache(tmp_path / "file" / "below").report(*built(jax.devices()[:1])) == REPORT


def test_the_step_is_the_trainers():
    """To the letter: what is lowered here is what training compiles."""
    trainer, spec = built(jax.devices()[:2])
    shapes, shardings, _ = trainer.abstract_state({name: s.shape for name, s in spec.items()})
    mine, trained = step.compile_step(trainer, spec), trainer.compiled_step(shapes, shardings, spec)
    assert instructions(mine) == instructions(trained)


def instructions(compiled):
    """Without where in the source they come from."""
    return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in compiled.as_text().splitlines() if " = " in line]
