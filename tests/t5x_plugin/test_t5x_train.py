"""`python -m t5x.train` with the files of docs/inside_t5x.md. Needs T5X, which is in no registry."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

t5x = pytest.importorskip("t5x", reason="needs T5X (github.com/google-research/t5x); see docs/inside_t5x.md")

ROOT = Path(__file__).resolve().parents[2]
T5X = Path(t5x.__file__).parents[1]
# T5X shuffles anew after a restart, unless its data have a seed and are saved, too.
SAME_DATA = (
    "--gin.train/utils.DatasetConfig.seed=0",
    "--gin.utils.SaveCheckpointConfig.save_dataset=True",
    "--gin.utils.RestoreCheckpointConfig.restore_dataset=True",
)


def t5x_train(folder: Path, *flags: str, succeeds: bool = True) -> str:
    """Its log."""
    paths = [ROOT, folder, T5X, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "t5x.train", f"--gin_search_paths={T5X}", "--gin_file=small.gin"]
    ran = subprocess.run([*command, *flags], cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert (ran.returncode == 0) == succeeds, ran.stderr[-3000:]
    return ran.stderr


def write_files_of_the_page(folder: Path, *more: str) -> None:
    """And more lines of Gin: T5X knows `train_script` in files, and not in flags."""
    page = (ROOT / "docs" / "inside_t5x.md").read_text()
    for name, language in (("small_task.py", "python"), ("small.gin", "")):
        pattern = f"`{re.escape(name)}`:\n\n(?:<!--.*?-->\n)?```{language}\n(.*?)```"
        (folder / name).write_text(re.search(pattern, page, re.DOTALL)[1])
    with open(folder / "small.gin", "a") as f:
        f.writelines(f"{line}\n" for line in more)


def leaves(checkpoint: Path, format: str) -> dict[str, np.ndarray]:
    """What T5X saved, by name."""
    import orbax.checkpoint as ocp
    from flax.traverse_util import flatten_dict
    from t5x import checkpoints

    if format == "legacy":
        tree = checkpoints.load_t5x_checkpoint(str(checkpoint))
    else:
        tree = ocp.PyTreeCheckpointer().restore(checkpoint / "state")
    return {"/".join(path): np.asarray(leaf) for path, leaf in flatten_dict(tree).items()}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["orbax", "legacy"])
def test_the_files_of_the_page_train_and_restart_bit_for_bit(tmp_path, format):
    write_files_of_the_page(tmp_path, f"train_script.train.use_orbax = {format == 'orbax'}")
    flags = (*SAME_DATA, "--gin.TRAIN_STEPS=30")
    straight, restarted = tmp_path / "straight", tmp_path / "restarted"
    log = t5x_train(tmp_path, *flags, f"--gin.MODEL_DIR='{straight}'")
    assert "per_example/noise_scale=" in log and "learning_rate/current=" in log
    for step in (0, 10, 20, 30):
        assert (straight / f"checkpoint_{step}").is_dir()

    shutil.copytree(straight, restarted)
    shutil.rmtree(restarted / "checkpoint_30")  # as after a kill at step 29
    for left in restarted.glob("train_ds-*30*"):
        left.unlink()
    assert "Starting main loop over steps 20-30" in t5x_train(tmp_path, *flags, f"--gin.MODEL_DIR='{restarted}'")
    first, second = (leaves(folder / "checkpoint_30", format) for folder in (straight, restarted))
    assert first.keys() == second.keys() and any("/nu/" in name for name in first)
    for name, leaf in first.items():
        np.testing.assert_array_equal(second[name], leaf, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "binding, message",
    [
        ("PerExampleTrainer.moniter=True", "PerExampleTrainer.*doesn't have a parameter named 'moniter'"),
        ("micro_adam.b3=0.5", "micro_adam.*doesn't have a parameter named 'b3'"),
        ("PerExampleTrainer.non_finite='drop'", "PerExampleTrainer.non_finite = 'drop'"),
    ],
)
def test_a_wrong_binding_is_refused_by_name(tmp_path, binding, message):
    write_files_of_the_page(tmp_path)
    log = t5x_train(tmp_path, f"--gin.t5x_plugin.{binding}", f"--gin.MODEL_DIR='{tmp_path}'", succeeds=False)
    assert re.search(message, log), log[-3000:]
