"""Commands without the packages of their extra: one line that names it, before anything is imported."""

import subprocess
import sys

import pytest

from tests.distributed import support

# Nothing but the core is there.
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {names}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Blocker())
import runpy
sys.argv = {argv}
runpy.{run}
"""
TRAIN = {"absl", "etils", "flax", "gin", "grain", "orbax", "rich", "seqio", "tensorflow", "tensorstore"}
LAUNCHERS = ("gcloud_tpu.py", "gke.py", "build_image.py", "xm_launch.py")


def without(names, argv, run):
    code = BLOCKED.format(names=set(names), argv=argv, run=run)
    return subprocess.run(
        [sys.executable, "-c", code], env=support.environment(), cwd=support.ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("train", "train"), ("eval", "train"), ("infer", "train"), ("bench", "train"), ("preflight", "train"),
        ("preflight.collectives", "train"), ("preflight.overhead", "train"), ("experiments.sweep", "train"),
        ("experiments.study", "train"), ("experiments.report", "reports"), ("quickstart", "train"),
    ],
)  # fmt: skip
def test_a_command_names_its_extra_in_one_line(command, extra):
    done = without(TRAIN, [command, "--help"], f"run_module('perex_t5x.{command}', run_name='__main__')")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()
    assert len(last) == 1 and last[0].startswith("ERROR: ")
    assert f"needs the extra [{extra}]: pip install 'perex_t5x[{extra}]' (missing: absl, " in last[0]


@pytest.mark.parametrize("script", LAUNCHERS)
def test_a_launcher_names_its_extra_in_one_line(script):
    path = str(support.ROOT / "launch" / script)
    done = without(TRAIN, [path, "--help"], f"run_path({path!r}, run_name='__main__')")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("ERROR: ") and done.stderr.count("\n") == 1
    assert "needs the extra [launch]: pip install 'perex_t5x[launch]' (missing: absl, " in done.stderr


def test_figures_need_their_own_extra(tmp_path):
    done = without(
        {"vl_convert"}, ["report", str(tmp_path)], "run_module('perex_t5x.experiments.report', run_name='__main__')"
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "needs the extra [reports]: pip install 'perex_t5x[reports]' (missing: vl_convert)"
    )


def test_completion_needs_no_extra():
    """It asks commands that end for want of theirs, and does not end as they do."""
    absent = TRAIN - {"absl"}  # which optax brings
    done = without(absent, ["perex", "completion", "fish"], "run_module('perex_t5x', run_name='__main__')")
    assert (done.returncode, done.stderr) == (0, "") and "-a train -d" in done.stdout
