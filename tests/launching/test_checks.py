"""The checks before anything is created."""

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from perex_t5x.data import streaming
from perex_t5x.errors import ConfigError
from perex_t5x.hardware import devices
from perex_t5x.hardware.devices import has_libtpu
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import bundle, checks, gin_check
from perex_t5x.launching.checks import Estimate
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands, Completed
from perex_t5x.launching.spec import Job, Work

PYTHON = checks._python  # env NAME=VALUE ... python -P -m module
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


def test_errors_of_several_runs_are_all_found_at_once(tmp_path, monkeypatch):
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


@pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed (extra 'tpu')")
def test_configurations_are_built_on_the_devices_of_the_slices(monkeypatch):
    one = job("a", 64, files=(*FILES, "--gin_file=meshes/fsdp.gin"))
    report = gin_check.check([one, one], "v5e:4x4", 2)
    assert report == gin_check.GinReport((), built=1, hosts=8, unchecked=())

    def run(self, argv, **_):
        path = next(a.partition("=")[2] for a in argv if a.startswith("--report="))
        assert "--topology=v5e:4x4" in argv and "--slices=2" in argv and "--devices=32" in argv
        Path(path).write_text(report.to_json())
        return Completed(tuple(argv), 0, "", "")

    monkeypatch.setattr(Commands, "run", run)
    checklist = checks.Checklist()
    checks.check_gin(request(one, slices=2), Commands(), checklist)
    said = (
        "1 configuration(s), built on the devices of 2 x v5e:4x4: model, mesh, batch, task, and the rows that each of 8"
    )
    assert checklist.done[0].startswith(said)
    assert checklist.open == ["whether the hosts can read the data (the tasks were looked up from here), and how fast"]


def test_without_the_compiler_devices_are_fake_and_it_is_said(monkeypatch):
    monkeypatch.setattr(devices, "has_libtpu", lambda: False)
    found, unchecked = gin_check._devices("v5e:4x4", 1)
    assert found == [] and "which rows each host would read" in unchecked[0] and "not installed" in unchecked[0]
    found, unchecked = gin_check._devices("", 1)
    assert found == [] and "does not know these chips" in unchecked[0]


def test_a_feed_that_streams_is_refused_where_hosts_share_some_of_their_rows():
    """As `perex_t5x.train` does before it compiles; one that may stream gets a note, as the data's size is not known yet."""

    @dataclasses.dataclass(frozen=True)
    class Device:
        process_index: int

    class Skewed:
        def devices_indices_map(self, shape):
            held = {0: (0, 8), 1: (4, 12), 2: (8, 16)}
            return {Device(p): (slice(*rows), slice(None)) for p, rows in held.items()}

    def arguments(feed):
        cfg = SimpleNamespace(feed=feed, batch_size=16)
        return {"train_dataset_cfg": cfg, "partitioner": SimpleNamespace(data_sharding=Skewed())}

    with pytest.raises(ConfigError, match="either the same rows or none in common"):
        streaming.check_hosts(arguments("streaming")["train_dataset_cfg"], Skewed())
    assert "if not, the run is refused" in gin_check._division(arguments("auto"))[0]
    streaming.check_hosts(arguments("cached")["train_dataset_cfg"], Skewed())
    assert gin_check._division(arguments("cached")) == []


def preflight_that(tmp_path, monkeypatch, code):
    """Puts a program in preflight's place; it is given the same arguments."""
    monkeypatch.setenv("PEREX_T5X_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checks, "_python", lambda asked, module, *a: [*PYTHON(asked, module)[:-3], "-c", code, *a])


FITS = "import sys, json; path = [a for a in sys.argv if a.startswith('--json=')][0][7:]\n"
FITS += "json.dump({'cases': [{'seconds': 36.0, 'fits': True}]}, open(path, 'w')); print('TABLE', *sys.argv[1:3])\n"


def test_preflight_of_the_largest_batch_and_the_cost(tmp_path, monkeypatch, capfd):
    preflight_that(tmp_path, monkeypatch, FITS)
    commands, checklist = Commands(), checks.Checklist()
    found = checks.preflight(request(job("a", 16), job("b", 32)), commands, checklist)
    assert len(commands.record) == 1 and any("BATCH_SIZE = 32" in a for a in commands.record[0])
    assert found == Estimate(16, 1.2, (36 + 18) * 10 / 3600)
    said = capfd.readouterr().err
    assert "TABLE --topology=v5e:4x4 --slices=1" in said and "only the largest batch" in said
    assert checklist.done[0].startswith("1 step(s), compiled for 1 x v5e:4x4: they fit")


def test_preflight_is_asked_once_for_the_same_files_and_versions(tmp_path, monkeypatch, capfd):
    preflight_that(tmp_path, monkeypatch, FITS)
    own = tmp_path / "own.gin"
    own.write_text("A = 1")

    def asked(*jobs, **options):
        commands, checklist = Commands(), checks.Checklist()
        found = checks.preflight(request(*jobs, gin_files={"own.gin": str(own)}, **options), commands, checklist)
        assert found.hours == 36 * 10 / 3600 and "TABLE" in capfd.readouterr().err
        return any("-c" in argv for argv in commands.record), checklist.done[0]

    one = job("a", 16)
    assert asked(one)[0]
    again, said = asked(one)
    assert not again and "1 of them before" in said
    # Whatever the compiled step may depend on is part of the key.
    assert asked(job("a", 32))[0] and asked(job("a", 16, "X = 2"))[0] and asked(one, slices=2)[0]
    assert asked(one, slice=Slice.of("v5e-64"))[0] and asked(one, environment={"LIBTPU_INIT_ARGS": "--a=1"})[0]
    own.write_text("A = 2")
    assert asked(one)[0] and not asked(one)[0]
    monkeypatch.setattr(checks.importlib.metadata, "distributions", lambda: [])
    assert asked(one)[0]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--b=1")
    assert asked(one)[0] and not asked(one)[0]
    package = tmp_path / "copy" / "perex_t5x"
    shutil.copytree(Path(checks.perex_t5x.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(checks.perex_t5x, "__file__", str(package / "__init__.py"))
    assert asked(one)[0] and not asked(one)[0]
    (package / "trainer.py").write_text("# changed")
    assert asked(one)[0] and not asked(one)[0]
    # A package of the user's own may read anything.
    assert asked(one, with_package=(str(tmp_path),))[0] and asked(one, with_package=(str(tmp_path),))[0]
    # A damaged answer is asked for again.
    for path in (tmp_path / "perex_t5x" / "preflight").glob("launch-*.json"):
        path.write_text("{")
    assert asked(one)[0]


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


def test_the_summary_says_what_was_not_checked(tmp_path):
    checklist = checks.Checklist()
    asked = request(job("a", 16), skip_preflight=True, skip_gin_check=True, reserved=True)
    checks.check_gin(asked, Commands(), checklist)
    checks.quota(asked, Commands(), checklist)
    cost = checks.preflight(asked, Commands(), checklist)
    said = checks.summary(asked, cost, "abc", "p, z", checklist)
    lines = [line for line in said.splitlines() if "check" in line or line.startswith("   ")]
    assert lines[:3] == [
        "unchecked the Gin files (--skip_gin_check)",
        "          how much of the reservation is in use",
        "          whether the program fits on the slices, and its time (--skip_preflight)",
    ]
    assert "unchecked" not in checks.summary(dataclasses.replace(asked, dry_run=True), cost, "abc", "p, z", checklist)


@pytest.mark.slow
def test_the_real_preflight(tmp_path, monkeypatch):
    from perex_t5x.hardware.devices import has_libtpu

    if not has_libtpu():
        pytest.skip("needs libtpu")
    monkeypatch.setenv("PEREX_T5X_LAUNCH_DIR", str(tmp_path))
    found = checks.preflight(request(job("a", 16)), Commands())
    assert found.hours > 0
    assert json.loads(Work("w", "r", ()).to_json())["jobs"] == [] and bundle.folder("w") == str(tmp_path / "w")
