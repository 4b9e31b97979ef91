"""The checks before anything is created."""

import dataclasses
import io
import json
import sys

import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import bundle, checks
from perex_t5x.launching.checks import Estimate
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands
from perex_t5x.launching.spec import Job, Work

FILES = ("--gin_file=models/nano.gin", "--gin_file=runs/pretrain.gin", "--gin_file=optimizers/adamw.gin")


def job(name, batch_size, *bindings, files=FILES):
    given = ("MIXTURE_OR_TASK_NAME = 'python_stdlib_lm'", "TASK_FEATURE_LENGTHS = {'targets': 32}", "TRAIN_STEPS = 10",
             f"BATCH_SIZE = {batch_size}", "MODEL_DIR = 'gs://my-bucket/x'", *bindings)  # fmt: skip
    arguments = ("-m", "perex_t5x.train", *files, *(f"--gin_bindings={b}" for b in given))
    return Job(name, arguments, "gs://my-bucket/x", batch_size, 10, group=f"{name}")


def request(*jobs, gin_files=None, **options):
    work = Work("w", "gs://my-bucket/x", jobs, gin_files=gin_files or {})
    values = {f.name: None for f in dataclasses.fields(Request)}
    values |= {
        "name": "w",
        "work": work,
        "slice": Slice.of("v5e-16"),
        "slices": 1,
        "with_package": (),
        "zone": "us-west4-a",
    }
    return Request(**{**values, "skip_gin_check": False, **options})


def test_slips_of_several_runs_are_all_found_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.gin"
    own.write_text("from __gin__ import dynamic_registration\n")
    travels = ("--gin_search_paths=gin_files", *FILES, "--gin_file=own.gin")
    fine = job("fine", 32, files=travels)
    asked = request(fine, job("a", 24), job("b", 32, "OPTIMIZER = 5"), gin_files={"own.gin": str(own)})
    with pytest.raises(ConfigError) as e:
        checks.check_gin(asked, Commands())
    assert "= 24" in str(e.value) and "not divisible by the 16 data shards" in str(e.value)
    assert "OPTIMIZER" in str(e.value) or "b (" in str(e.value)
    assert "fine" not in str(e.value)


def preflight_that(tmp_path, monkeypatch, code):
    """Puts a program in preflight's place; it is given the same arguments."""
    monkeypatch.setenv("PEREX_T5X_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setattr(checks, "_python", lambda request, module, *arguments: [sys.executable, "-c", code, *arguments])


FITS = "import sys, json; path = [a for a in sys.argv if a.startswith('--json=')][0][7:]\n"
FITS += "json.dump({'cases': [{'seconds': 36.0, 'fits': True}]}, open(path, 'w')); print('TABLE', *sys.argv[1:3])\n"


def test_preflight_of_the_largest_batch_and_the_cost(tmp_path, monkeypatch, capfd):
    preflight_that(tmp_path, monkeypatch, FITS)
    commands = Commands()
    found = checks.preflight(request(job("a", 16), job("b", 32)), commands)
    assert len(commands.record) == 1 and any("BATCH_SIZE = 32" in a for a in commands.record[0])
    assert found == Estimate(16, 1.2, (36 + 18) * 10 / 3600)
    said = capfd.readouterr().err
    assert "TABLE --topology=v5e:4x4 --slices=1" in said and "only the largest batch" in said


def test_what_does_not_fit_is_refused_with_its_table(tmp_path, monkeypatch, capfd):
    preflight_that(tmp_path, monkeypatch, FITS.replace("True", "False") + "sys.exit(1)")
    with pytest.raises(ConfigError, match="does not fit on 1 x v5e:4x4"):
        checks.preflight(request(job("a", 16)), Commands())
    assert "TABLE" in capfd.readouterr().err
    words = "compiling needs the TPU compiler, which is not installed: pip install 'perex_t5x[tpu]'"
    written = json.dumps({"reason": "configuration", "exit_code": 2, "message": words})
    code = f"import os, sys; open(os.environ['PEREX_T5X_STATUS_FILE'], 'w').write({written!r}); sys.exit(2)"
    preflight_that(tmp_path, monkeypatch, code)
    with pytest.raises(ConfigError, match="not installed: pip install(.|\n)*--skip_preflight"):
        checks.preflight(request(job("a", 16)), Commands())
    found = checks.preflight(request(job("a", 16), skip_preflight=True), Commands())
    assert found.hours is None


def test_being_asked(monkeypatch, capsys):
    asked = request(job("a", 16))
    with pytest.raises(ConfigError, match="Give --yes"):
        checks.confirm("", asked)
    for answer in ("y\n", "\n", "no\n", ""):  # the last is Ctrl-D
        terminal = io.StringIO(answer)
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", terminal)
        if answer == "y\n":
            checks.confirm("SUMMARY", asked)
        else:
            with pytest.raises(ConfigError, match="Nothing was created"):
                checks.confirm("", asked)
    assert "SUMMARY" in capsys.readouterr().err


def test_the_summary(tmp_path):
    said = checks.summary(request(job("a", 16), spot=True), Estimate(16, 1.2), "abc-dirty", "p, z")
    assert "perex_t5x.train of one run, into gs://my-bucket/x" in said
    assert "1 x v5e:4x4 (16 chips on 4 host(s)), spot" in said and "abc-dirty" in said and "along" not in said
    own = dataclasses.replace(request(job("a", 16)), reserved=True, with_package=(str(tmp_path),))
    said = checks.summary(own, Estimate(16, 1.2), "abc", "p, z")
    assert "host(s)), reserved" in said and f"along     {tmp_path} (not in git)" in said


@pytest.mark.slow
def test_the_real_preflight(tmp_path, monkeypatch):
    from perex_t5x.hardware.devices import has_libtpu

    if not has_libtpu():
        pytest.skip("needs libtpu")
    monkeypatch.setenv("PEREX_T5X_LAUNCH_DIR", str(tmp_path))
    found = checks.preflight(request(job("a", 16)), Commands())
    assert found.hours > 0
    assert json.loads(Work("w", "r", ()).to_json())["jobs"] == [] and bundle.folder("w") == str(tmp_path / "w")
