"""`perex COMMAND` is `python -m perex_t5x.MODULE`: every command of the README, its exit codes, and quick to start."""

import json
import re
import subprocess
import sys

import pytest

import perex_t5x
from perex_t5x.cli import dispatch, status
from tests.cli.test_commands import ENV
from tests.distributed import support


def perex(*words, cwd="/", python=("-m", "perex_t5x")):
    command = [sys.executable, *python, *words]
    return subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=300)


def test_it_knows_every_command_of_the_readme():
    readme = (support.ROOT / "README.md").read_text()
    table = readme[readme.index("## Commands") : readme.index("## Documentation")]
    modules = set(re.findall(r"`python -m perex_t5x\.([\w.]+)", table))
    scripts = set(re.findall(r"`python launch/(\w+\.py)", table))
    assert modules | scripts <= {command.place for command in dispatch.COMMANDS.values()}


def test_every_command_is_there_and_has_a_name_of_its_own():
    for name, command in dispatch.COMMANDS.items():
        path = support.ROOT / "perex_t5x" / command.place.replace(".", "/")
        script = support.ROOT / "launch" / command.place
        places = [script] if command.is_script else [path.with_suffix(".py"), path / "__main__.py"]
        assert any(place.is_file() for place in places), name
        assert name == command.place.removesuffix(".py").rpartition(".")[2]


def test_help_lists_the_commands_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom perex_t5x.cli import dispatch\nsys.argv = ['perex', '--help']\ndispatch.main()\n"
        "print(sorted({'jax', 'absl', 'gin', 'numpy', 'tensorflow', 'xml'} & set(sys.modules)))"
    )
    done = perex(python=("-c", code))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]"
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(dispatch.COMMANDS)
    assert perex().stdout == perex("help").stdout == dispatch.usage() + "\n"


def test_version():
    done = perex("--version")
    assert done.returncode == 0 and re.match(rf"perex_t5x {re.escape(perex_t5x.__version__)}, python 3\.", done.stdout)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["trian"], 2, "ERROR: 'trian' is not a command. Did you mean 'train'? perex --help lists them.\n"),
        (["--gin_file=models/tiny.gin"], 2, "ERROR: '--gin_file=models/tiny.gin' is not a command. "),
        (["train"], 2, "no --gin_file given"),
        (["train", "--gin_fle=x"], 2, "Did you mean: gin_file? --help lists the flags."),
        (["experiments.sweep"], 2, "--sweep"),
        (["checkpoints", "verify", "/no/such"], 2, "/no/such"),
        (["local", "--processes=x"], 2, "--processes"),
        (["completion", "bsh"], 2, "ERROR: 'bsh' is not a known shell. Did you mean 'bash'? "),
    ],
)
def test_errors_are_one_message_and_the_command_s_exit_code(words, code, said):
    done = perex(*words)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert said in done.stderr


@pytest.mark.slow
def test_a_command_finds_what_is_in_the_working_directory_and_runs_as_the_main_module(tmp_path):
    """As with `python -m`: a Gin file may import a module that lies here, and `__main__` is the command."""
    (tmp_path / "here.py").write_text("import gin\n\n@gin.configurable\ndef steps():\n    return 7\n")
    (tmp_path / "mine.gin").write_text(
        "from __gin__ import dynamic_registration\nimport here\nimport __main__ as train_script\n"
        "include 'runs/quickstart.gin'\ntrain_script.train.total_steps = @here.steps()\n"
    )
    # The script that pip makes lies in another folder, which is then the first of the path.
    script = tmp_path / "bin" / "perex"
    script.parent.mkdir()
    script.write_text("from perex_t5x.cli.dispatch import main\nmain()\n")
    code = f"import runpy, sys\nsys.path[0:0] = [{str(script.parent)!r}]\nrunpy.run_path({str(script)!r})"
    words = ["train", "--gin_file=mine.gin", f"--gin.MODEL_DIR={tmp_path}/run", "--dry_run"]
    done = perex(*words, cwd=tmp_path, python=("-c", code))
    assert done.returncode == 0, done.stderr
    assert "dry run: the configuration is fine" in done.stdout


def test_the_path_begins_with_the_working_directory(tmp_path, monkeypatch):
    ran = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dispatch.runpy, "run_module", lambda name, **how: ran.append((name, sys.path[0], sys.argv[1:])))
    monkeypatch.setattr(sys, "path", ["/usr/local/bin", *sys.path])
    monkeypatch.setattr(sys, "argv", ["perex", "train", "--dry_run"])
    dispatch.main()
    assert ran == [("perex_t5x.train", str(tmp_path), ["--dry_run"])]


def test_without_the_extra_a_command_names_it(tmp_path):
    blocked = "import sys; sys.modules['absl'] = sys.modules['seqio'] = None\n"
    code = blocked + "from perex_t5x.cli import dispatch\ndispatch.main()"
    done = perex("eval", "--help", python=("-c", code))
    assert done.returncode == 2
    assert done.stderr.startswith("ERROR: perex_t5x.eval needs the extra [train]: pip install 'perex_t5x[train]' ")
    assert done.stderr.count("\n") == 1


def test_status_of_a_command(tmp_path, monkeypatch):
    """What supervisors read is written as ever."""
    monkeypatch.setitem(ENV, status.VARIABLE, str(tmp_path / "status.json"))
    assert perex("checkpoints", "verify", "/no/such").returncode == 2
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == "configuration"
