"""Runs that start from a checkpoint in T5X's format, and from one in Hugging Face's."""

import os

import pytest

from perex_t5x.checkpoint_formats import convert as convert_lib
from perex_t5x.checkpoint_formats import open_checkpoint
from perex_t5x.checkpoint_formats.plan import Options, make_plan
from perex_t5x.errors import ConfigError
from tests import tiny


@pytest.mark.slow
def test_a_run_from_any_format_is_the_same(tmp_path):
    """Parameters and Adam's state: the losses of the steps that follow are equal to the last bit."""
    tiny.train(tmp_path / "first", "TRAIN_STEPS = 2")
    source = str(tmp_path / "first" / "checkpoint_2")
    contents = open_checkpoint(source)
    scanned = make_plan(contents, Options("legacy", layers="axis1", optimizer_state="t5x"))
    convert_lib.convert(scanned, str(tmp_path / "t5x" / "checkpoint_2"))
    file = make_plan(contents, Options("safetensors", names="t5x"))
    convert_lib.convert(file, str(tmp_path / "flat.safetensors"))
    followed = {}
    for name, path in {
        "ours": source,
        "t5x": str(tmp_path / "t5x"),
        "flat": str(tmp_path / "flat.safetensors"),
    }.items():
        mode = "latest" if name == "t5x" else "specific"
        restore = f"utils.RestoreCheckpointConfig.path = '{path}'", f"utils.RestoreCheckpointConfig.mode = '{mode}'"
        tiny.train(tmp_path / f"run_{name}", "TRAIN_STEPS = 4", *restore)
        followed[name] = tiny.losses(tmp_path / f"run_{name}")
    assert set(followed["ours"]) >= {4} and followed["t5x"] == followed["flat"] == followed["ours"]

    # In the run's own folder it is refused, and stays.
    with pytest.raises(ConfigError, match=r"checkpoint_2 was written by T5X.*Start a new MODEL_DIR from it"):
        tiny.train(tmp_path / "t5x", "TRAIN_STEPS = 4")
    assert "checkpoint_2" in os.listdir(tmp_path / "t5x")
