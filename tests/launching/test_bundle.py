"""What travels along: committed files only, Gin files, jobs."""

import subprocess
import sys
import tarfile
import zipfile

import pytest
from absl import app, flags, logging  # noqa: F401  (they keep the flags they find when they are first imported)

from perex_t5x import gin_utils
from perex_t5x.errors import ConfigError
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import bundle, request
from perex_t5x.launching.checks import estimate
from perex_t5x.launching.shell import Commands
from perex_t5x.launching.spec import ExtraGinFiles, Job, Work


def git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path):
    """A small checkout with the same layout."""
    root = tmp_path / "checkout"
    (root / "perex_t5x").mkdir(parents=True)
    (root / "gin").mkdir()
    (root / "perex_t5x" / "__init__.py").write_text("x = 'committed'\n")
    (root / "gin" / "a.gin").write_text("A = 1\n")
    (root / "launch").mkdir()
    for name in ("constraints.txt", "README.md", "LICENSE", "pyproject.toml", *bundle.REQUIREMENTS):
        (root / name).write_text("")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def test_uncommitted_files_are_named_and_not_taken(project):
    assert not bundle.checkout(root=str(project)).dirty
    (project / "perex_t5x" / "words.json").write_text("code may read it")
    with pytest.raises(ConfigError, match=r"\?\? perex_t5x/words.json"):
        bundle.checkout(root=str(project))
    (project / "perex_t5x" / "new.py").write_text("")
    (project / "gin" / "a.gin").write_text("A = 2\n")
    with pytest.raises(ConfigError, match=r"(?s)M gin/a.gin.*\?\? perex_t5x/new.py.*--allow_uncommitted"):
        bundle.checkout(root=str(project))
    assert bundle.checkout(True, root=str(project)).commit.endswith("-dirty")


@pytest.mark.parametrize("allowed", [False, True])
def test_what_is_packed(project, tmp_path, monkeypatch, allowed):
    files = bundle.checkout(root=str(project))
    (project / "perex_t5x" / "__init__.py").write_text("x = 'changed'\n")
    if allowed:
        files = bundle.checkout(True, root=str(project))
    (project / "perex_t5x" / "ä b'.json").write_text("named as no shell would like it")
    monkeypatch.setattr(bundle, "_wheel", lambda source, target, commands: None)
    own = tmp_path / "own.gin"
    own.write_text("B = 1\n")
    work = Work("w", "gs://b/w", (Job("a", ("-m", "m", "$(x) 'y'"), "gs://b/w"),), gin_files={"my/own.gin": str(own)})
    packed = bundle.build(work, str(tmp_path / "target"), files, Commands())
    assert (
        f"'{'changed' if allowed else 'committed'}'" in (tmp_path / "target/source/perex_t5x/__init__.py").read_text()
    )
    assert (tmp_path / "target/source/perex_t5x/ä b'.json").exists() == allowed
    with tarfile.open(packed) as tar:
        assert {
            "./jobs.json",
            "./constraints.txt",
            "./requirements_tpu.txt",
            "./commit.txt",
            "./gin_files/my/own.gin",
        } <= set(tar.getnames())
    found = Work.from_json((tmp_path / "target/bundle/jobs.json").read_text())
    assert found.jobs == work.jobs


@pytest.mark.parametrize("dirty", [False, True])
def test_a_dry_run_writes_nothing_and_a_shell_does_the_same(project, tmp_path, capsys, dirty):
    if dirty:
        (project / "perex_t5x" / "new.py").write_text("")
    (tmp_path / "my own.gin").write_text("B = 1\n")
    work = Work(
        "w", "r", (Job("a", ("-c", "$(x) 'y'\n"), "r"),), gin_files={"my own.gin": str(tmp_path / "my own.gin")}
    )
    packed = bundle.build(work, str(tmp_path / "t"), bundle.checkout(dirty, str(project)), Commands(dry_run=True))
    said = capsys.readouterr().out
    assert not (tmp_path / "t").exists()
    without_pip = "".join(line for line in said.splitlines(True) if "pip wheel" not in line)
    subprocess.run(["bash", "-euc", without_pip], check=True)
    with tarfile.open(packed) as tar:
        assert {"./jobs.json", "./constraints.txt", "./commit.txt", "./gin_files/my own.gin"} <= set(tar.getnames())
        assert Work.from_json(tar.extractfile("./jobs.json").read().decode()).jobs == work.jobs
    assert (tmp_path / "t/source/perex_t5x/new.py").exists() == dirty


def test_a_second_launch_of_the_same_name_waits(tmp_path):
    with bundle.alone(str(tmp_path / "t")):
        assert (tmp_path / "t").is_dir()
        code = f"import fcntl\nfcntl.flock(open({str(tmp_path / 't/lock')!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 1
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_not_a_checkout(tmp_path):
    with pytest.raises(ConfigError, match="not a git checkout"):
        bundle.checkout(root=str(tmp_path))


@pytest.mark.slow
def test_the_real_wheel_has_the_gin_files(tmp_path):
    files = bundle.checkout(allow_uncommitted=True)
    bundle.build(Work("w", "r", ()), str(tmp_path), files, Commands())
    with zipfile.ZipFile(tmp_path / "bundle" / bundle.WHEEL) as wheel:
        names = wheel.namelist()
    assert "perex_t5x/gin/runs/pretrain.gin" in names and "perex_t5x/launching/worker.py" in names


def test_gin_files_travel_with_what_they_include(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib" / "parts").mkdir(parents=True)
    (tmp_path / "mine.gin").write_text("include 'parts/b.gin'\ninclude 'meshes/dp.gin'\n")
    (tmp_path / "lib" / "parts" / "b.gin").write_text("include 'parts/c.gin'\n")
    (tmp_path / "lib" / "parts" / "c.gin").write_text("C = 1\n")
    extra = ExtraGinFiles(["lib"])
    assert extra.add("models/nano.gin") == "models/nano.gin"
    assert extra.add(f"{gin_utils.shipped_gin_dir()}/models/nano.gin") == "models/nano.gin"
    assert extra.add("mine.gin") == "mine.gin"
    assert sorted(extra.paths) == ["mine.gin", "parts/b.gin", "parts/c.gin"]
    assert extra.add(str(tmp_path / "mine.gin")) == "mine.gin"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.gin").write_text("")
    with pytest.raises(ConfigError, match="both be copied as mine.gin"):
        extra.add(str(tmp_path / "other" / "mine.gin"))
    for path in (f"{tmp_path}/lib/parts/c.gin", f"{gin_utils.shipped_gin_dir()}/models/nano.gin"):
        (tmp_path / "bad.gin").write_text(f"include '{path}'\n")
        with pytest.raises(ConfigError, match="will not be found on another machine"):
            extra.add("bad.gin")


@pytest.fixture
def flag_values(monkeypatch):
    """Parses flags without touching those of other tests."""
    values = flags.FlagValues()
    with monkeypatch.context() as patch:
        patch.setattr(flags, "FLAGS", values)
        for name in ("string", "multi_string", "bool", "integer", "float", "list"):
            define = getattr(flags, f"DEFINE_{name}")
            patch.setattr(flags, f"DEFINE_{name}", lambda *a, _d=define, **k: _d(*a, flag_values=values, **k))
        request.define_launch_flags()
        yield lambda *a: (values(["launch", *a]), values)[1]


RUN = ("--gin_file=models/nano.gin", "--gin_file=runs/pretrain.gin",
       "--gin_bindings=MIXTURE_OR_TASK_NAME = 'python_stdlib_lm'",
       "--gin_bindings=TASK_FEATURE_LENGTHS = {'targets': 32}", "--gin_bindings=TRAIN_STEPS = 10")  # fmt: skip


def test_a_single_run(flag_values):
    found = request.Request.from_flags(
        flag_values(
            *RUN,
            "--dir=gs://bucket/runs/My_run",
            "--topology=v5e-16",
            "--heartbeat_timeout=50",
            "--env",
            "A=1",
            "--libtpu_args=--xla_a=1",
            "--libtpu_args",
            "--xla_b=2",
            "--secret=HF_TOKEN=hf-token",
        )
    ).in_bucket()
    assert (found.name, found.slice.hosts, found.slices) == ("my-run", 4, 1)
    (job,) = found.work.jobs
    assert job.arguments[-1] == "--heartbeat_timeout=50"
    assert found.environment == {"A": "1", "LIBTPU_INIT_ARGS": "--xla_a=1 --xla_b=2"} == found.work.environment
    assert found.secrets == {"HF_TOKEN": "hf-token"} and found.work.secrets == ("HF_TOKEN",)
    assert "hf-token" not in found.work.to_json()
    assert job.train_steps == 10 and job.model_dir == "gs://bucket/runs/My_run"
    assert found.work.fingerprint == Work("x", "gs://bucket/runs/My_run/", ()).fingerprint


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((*RUN, "--dir=gs://b/x", "--topology=v5e-16"), "gs://BUCKET/FOLDER"),
        ((*RUN, "--dir=/tmp/x", "--topology=v5e-16"), "--gin.MODEL_DIR='/tmp/x'"),
        ((*RUN, "--dir=gs://bucket/x"), "--topology is missing"),
        ((*RUN, "--dir=gs://bucket/x", "--topology=v5e-16", "--name=a b"), "such as --name=a-b"),
        ((*RUN, "--dir=gs://bucket/x", "--topology=v5e-16", "--zone=$(x)"), "not the name of a zone"),
        ((*RUN, "--dir=gs://bucket/x", "--topology=v5e-16", "--slices=0"), "at least 1"),
        ((*RUN, "--topology=v5e-16"), "MODEL_DIR"),
        (("--sweep=sweeps/sqrt_lr.gin", "--topology=v5e-16"), "--dir is missing"),
        ((), "nothing to run"),
        ((*RUN, "--spot", "--reservation=r"), "exclude each other"),
        ((*RUN, "--with_package=/nowhere"), "--with_package=/nowhere: neither a wheel"),
        (("--sweep=sweeps/learning_rate.gin", "--dir=/tmp/x", "--topology=v5e-16"), "--dir='/tmp/x':"),
    ],
)
def test_slips(flag_values, arguments, message):
    with pytest.raises(ConfigError, match=message):
        request.Request.from_flags(flag_values(*arguments)).in_bucket()


def test_a_sweep_and_its_twins(flag_values):
    rules = "--sweep_bindings=rule = ['sqrt', 'linear']"
    sizes = "--sweep_bindings=batch_sizes = [16, 32]"
    found = request.Request.from_flags(
        flag_values("--sweep=sweeps/sqrt_lr.gin", rules, sizes, "--sweep_bindings=seeds = [0]", "--dir=gs://bucket/s",
                    "--topology=v5e-16"))  # fmt: skip
    assert found.name == "sqrt-lr"
    assert len(found.work.jobs) == 3 and len(found.work.twins) == 1  # at the base batch size all rules are alike
    assert len({job.group for job in found.work.jobs}) == 2  # at 32 the rules differ in the rate alone


def test_the_estimate():
    jobs = [Job("a", (), "", 8, 3600), Job("b", (), "", 16, 7200)]
    found = estimate(jobs, {"a": 1.0, "b": 0.5}, Slice.of("v5e-16"), 2)
    assert (found.hours, found.chips) == (2.0, 32)
    assert "at least 2.0 hours, 64 chip-hours, about $77" in found.words()
    assert "32 chip-hours per hour, about $38 per hour" in estimate(jobs, {}, Slice.of("v5e-16"), 2).words()


def test_own_files_that_no_commit_holds_are_named(tmp_path):
    repository = tmp_path / "own"
    (repository / "tasks").mkdir(parents=True)
    for name in ("kept.gin", "new.gin", "ignored.gin", "tasks/pyproject.toml", ".gitignore"):
        (repository / name).write_text("ignored.gin\ncache\n")
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e@example.com"]
    for words in (["init", "-q"], ["add", "kept.gin", "tasks", ".gitignore"], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *words], check=True)
    (repository / "tasks" / "cache").write_text("")
    (tmp_path / "loose.gin").write_text("")
    paths = [str(repository / name) for name in ("kept.gin", "new.gin", "ignored.gin", "tasks")]
    new = [f"{p} (not committed)" for p in paths[1:3]]
    assert bundle.uncommitted([*paths, str(tmp_path / "a.whl")]) == new
    (repository / "tasks" / "pyproject.toml").write_text("changed")
    assert bundle.uncommitted(paths) == [*new, f"{paths[3]} (not committed)"]
    assert bundle.uncommitted([str(tmp_path / "loose.gin")]) == [f"{tmp_path / 'loose.gin'} (not in git)"]
