"""The commands as a user types them: another directory, configuration errors, exit codes, no TensorFlow for --help."""

import os
import subprocess
import sys

import pytest

from perex_t5x.errors import Reason

ENV = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def run(*arguments, cwd="/"):
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, env=ENV, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("train", "profile_steps"),
        ("eval", "gin_file"),
        ("infer", "gin_file"),
        ("bench", "gin_file"),
        ("checkpoints", "[no]json"),
        ("chaos", "trials"),
        ("preflight", "compare"),
        ("preflight.collectives", "[no]each"),
        ("experiments.sweep", "[no]together"),
        ("experiments.study", "[no]quick"),
        ("experiments.report", "figures"),
    ],
)
def test_help_lists_the_flags_and_loads_neither_tensorflow_nor_jax(command, flag, tmp_path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{command}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('perex_t5x.{command}', run_name='__main__')\n"
        "except SystemExit as e:\n"
        "    print(e.code, [name for name in ('tensorflow', 'jax') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr
    assert f"\n  --{flag}: " in result.stdout


def test_dry_run_from_another_directory_with_a_ported_file(tmp_path):
    """`import __main__ as train_script`, as T5X's files say, names the same function."""
    (tmp_path / "ported.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "import __main__ as train_script\n"
        "include 'runs/quickstart.gin'\n"
        "train_script.train.total_steps = 123\n"
    )
    result = run(
        "perex_t5x.train", "--gin_file=ported.gin", f"--gin.MODEL_DIR={tmp_path}/run", "--dry_run", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "the configuration is fine" in result.stdout and "cudart" not in result.stderr
    assert "global batch 16 = 1 data shard(s) x 16" in result.stderr
    assert not (tmp_path / "run").exists()  # a dry run leaves nothing behind


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "no --gin_file given. For a first run"),
        (["--gin_file=runs/quickstart.gin"], "required but not given: MODEL_DIR"),
        (["--gin_file=runs/quickstart.gin", "--gin.MODEL_DIR=/proc/x"], "MODEL_DIR = '/proc/x' cannot be written"),
        (["--gin_file=models/tiny.gin"], "they are for another command"),
        (["--gin_fil=models/tiny.gin"], "Unknown command line flag 'gin_fil'. Did you mean: gin_file?"),
        (["--process_count=two"], "flag --process_count=two"),
        (["--gin_file=runs/quickstart.gin", "--process_count=2"], "belong together: give all three"),
    ],
)
def test_a_configuration_error_is_one_message_and_exit_code_2(arguments, message):
    result = run("perex_t5x.train", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr and "In call to configurable" not in result.stderr


@pytest.mark.parametrize("words", [("-m", "perex_t5x.train", "--help"), ("-m", "perex_t5x", "--help")])
def test_output_that_nobody_reads_is_no_error(words):
    """As of `perex train --help | head -1`: the other end of the pipe is closed before everything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        done = subprocess.run([sys.executable, *words], stdout=out, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (Reason.INTERRUPTED.exit_code, "")
