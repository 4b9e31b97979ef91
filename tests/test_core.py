"""The core alone (jax, numpy, optax) runs the README's Python example: nothing of the trainer is needed.

In a real environment: tests/test_packaging.py."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the extras bring; the import of any of these fails in the default test.
EXTRAS = [
    *(
        "absl",
        "array_record",
        "clu",
        "etils",
        "flax",
        "gin",
        "grain",
        "libtpu",
        "orbax",
        "rich",
        "seqio",
        "tensorboard",
    ),
    *("tensorflow", "tensorflow_datasets", "tensorstore", "vl_convert", "xmanager", "yaml"),
]


def readme_example() -> str:
    """The README's one Python block."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return code + "\nassert loss < 0.9, loss\nassert optimizer.needs == ('mean', 'mean_square')\n"


BLOCKER = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        # optax imports absl's logging; ours must not.
        if name.split(".")[0] in EXTRAS and name.split(".")[0] != "absl":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

sys.meta_path.insert(0, Blocked())
"""


def test_readme_example_without_the_extras():
    code = f"EXTRAS = {EXTRAS!r}\n{textwrap.dedent(BLOCKER)}\n{readme_example()}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^([vw])\b", done.stdout, re.MULTILINE) == ["v", "w"], done.stdout


def test_the_blocker_blocks():
    code = f"EXTRAS = {EXTRAS!r}\n{textwrap.dedent(BLOCKER)}\nimport flax"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'flax'" in done.stderr
