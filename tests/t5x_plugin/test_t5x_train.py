"""`python -m t5x.train` with the files of docs/inside_t5x.md. Needs T5X, which is in no registry."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

t5x = pytest.importorskip("t5x", reason="needs T5X (github.com/google-research/t5x); see docs/inside_t5x.md")

ROOT = Path(__file__).resolve().parents[2]
T5X = Path(t5x.__file__).parents[1]


def t5x_train(folder: Path, *flags: str) -> str:
    """Its log; fails if it does."""
    paths = [ROOT, folder, T5X, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "t5x.train", f"--gin_search_paths={T5X}", "--gin_file=small.gin"]
    ran = subprocess.run(
        [*command, "--gin.MODEL_DIR='run'", *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("format", ["orbax", "legacy"])
def test_the_files_of_the_page_train_and_restart(tmp_path, format):
    page = (ROOT / "docs" / "inside_t5x.md").read_text()
    (tmp_path / "small_task.py").write_text(re.search(r"`small_task.py`:\n\n```python\n(.*?)```", page, re.DOTALL)[1])
    (tmp_path / "small.gin").write_text(re.search(r"`small.gin`:\n\n```\n(.*?)```", page, re.DOTALL)[1])
    flags = [] if format == "orbax" else ["--gin.train_script.train.use_orbax=False"]
    log = t5x_train(tmp_path, *flags)
    assert "per_example/noise_scale=" in log and "learning_rate/current=" in log
    for step in (0, 10, 20):
        assert (tmp_path / "run" / f"checkpoint_{step}").is_dir()
    assert "Starting main loop over steps 20-30" in t5x_train(tmp_path, "--gin.TRAIN_STEPS=30", *flags)
    assert (tmp_path / "run" / "checkpoint_30").is_dir()
