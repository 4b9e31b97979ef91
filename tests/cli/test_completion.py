"""Completion scripts, as the shells use them."""

import os
import shutil
import subprocess

import pytest

from perex_t5x.cli import completion, dispatch
from tests.cli.test_dispatch import perex
from tests.distributed import support

COMPLETE = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
read -ra COMP_WORDS <<<"$2"
[[ $2 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_perex
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    done = perex("completion", "bash")
    assert done.returncode == 0 and not done.stderr, done.stderr
    (folder / "perex.bash").write_text(done.stdout)
    here = folder / "here"
    (here / "models").mkdir(parents=True)
    (here / "mine.gin").touch()
    (here / "notes.txt").touch()

    def run(line: str) -> list[str]:
        command = ["bash", "--norc", "-uc", COMPLETE, "bash", str(folder / "perex.bash"), line]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
        assert not done.stderr, done.stderr
        return done.stdout.split()

    return run


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("perex tr", ["train"]),
        ("perex --v", ["--version"]),
        ("perex train --gin_f", ["--gin_file="]),
        ("perex train --dry", ["--dry_run"]),
        ("perex train --dry_run --prof", ["--profile_steps="]),
        ("perex train --gin.TRAIN_STEPS_", ["--gin.TRAIN_STEPS_RELATIVE="]),
        ("perex train --gin_file=models/ti", ["models/tiny.gin"]),
        ("perex train --gin_file=m", None),
        ("perex sweep --sweep=sweeps/sqrt_l", ["sweeps/sqrt_lr.gin"]),
        ("perex study --anal", ["--analyse_only"]),
        ("perex local --proc", ["--processes="]),
        ("perex completion z", ["zsh"]),
        ("perex report no", ["notes.txt"]),
        ("perex nosuch --x", []),
    ],
)
def test_bash(complete, line, words):
    found = complete(line)
    if words is None:  # shipped files, files here, folders here
        assert {"models/150m.gin", "mine.gin", "models/"} <= set(found) and "notes.txt" not in found
    else:
        assert found == words


def test_every_command_lists_its_flags():
    """Made of what the commands define: none is forgotten, unless it has none."""
    for name, command in dispatch.COMMANDS.items():
        if name != "completion":
            assert completion.flags_of(command), name


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_the_same(shell):
    said = completion.script(shell)
    assert all(name in said for name in dispatch.COMMANDS)
    assert "profile_steps" in said and "models/tiny.gin" in said and "TRAIN_STEPS" in said
    if binary := shutil.which(os.environ.get(f"PEREX_T5X_{shell.upper()}", shell)):
        done = subprocess.run([binary, "-n"], input=said, capture_output=True, text=True, cwd=support.ROOT)
        assert done.returncode == 0, done.stderr
