"""A run's folder that something has happened to: the run resumes from what is valid, or ends with an error of ours."""

import atexit
import contextlib
import functools
import io
import shutil
import tempfile
from pathlib import Path

import jax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perex_t5x import checkpoint_files, checkpoints, gin_utils, train
from perex_t5x.cli import gin_command  # noqa: F401 (imported before a folder is damaged)
from tests import fuzzing, tiny

FEEDS = ("cached", "streaming")
NOTHING = ("cut", 0.0, b"")


@functools.cache
def trained(feed: str) -> Path:
    """The folder of a run of four steps, with the checkpoints of steps 2 and 4."""
    folder = tempfile.mkdtemp(prefix="perex_t5x_fuzz_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):
        tiny.train(folder, "TRAIN_STEPS = 4", *options(feed))
    assert checkpoint_files.whole(folder)[-1].endswith("checkpoint_4")
    return Path(folder)


def options(feed: str) -> list[str]:
    return [
        f"train/DatasetConfig.feed = '{feed}'",
        "SaveCheckpointConfig.period = 2",
        "train.train_eval_dataset_cfg = None",
    ]


@contextlib.contextmanager
def damaged_run(feed: str, damages, part: str = ""):
    """A copy of the run's folder in which a part of it is damaged."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        copy = Path(folder) / "run"
        shutil.copytree(trained(feed), copy, symlinks=True)
        for damage in damages:
            if list((copy / part).iterdir()) if (copy / part).is_dir() else ():
                fuzzing.damage_folder(copy / part, damage)
        yield copy


def check_start(feed: str, damages, named: bool) -> None:
    """Verifies, asks a dry run, and reads what it would start from: what a dry run accepts can be read."""
    with damaged_run(feed, damages, "checkpoint_4") as folder:
        for path in (folder, folder / "checkpoint_4"):
            fuzzing.refused(lambda path=path: verify(str(path)))
        model_dir = f"{folder}_new" if named else str(folder)
        from_there = [f"RestoreCheckpointConfig.path = '{folder}/checkpoint_4'"] if named else []

        def configure():
            tiny.configure(f"MODEL_DIR = '{model_dir}'", "TRAIN_STEPS = 6", *options(feed), *from_there)
            gin_utils.call(train.train, dry_run=True)

        said = fuzzing.refused(configure)
        if said and not named:
            pytest.fail(f"the checkpoint of step 2 is whole, but: {said}")
        if not said:
            bound = gin_utils.gin.get_bindings(train.train)
            training = train.Training({**{k: v.default for k, v in signature().items()}, **bound})
            with training, fuzzing.ends():
                assert training.source is not None
                training.make_feed()
                setup = training.setup
                restored = checkpoints.restore(training.source, setup.shapes, setup.shardings, training._restore_cfg)
                jax.block_until_ready(restored.leaves)


def signature():
    import inspect

    return inspect.signature(train.train).parameters


def verify(path: str) -> None:
    args = type("Args", (), {"json": True})
    assert checkpoint_files.command(args, ["verify", path]) in (0, 1)


def check_resume(feed: str, damages) -> None:
    """Whatever of the folder is damaged, the run resumes and ends, or says in our words why not."""
    with damaged_run(feed, damages) as folder:
        fuzzing.refused(lambda: tiny.train(folder, "TRAIN_STEPS = 6", *options(feed)))


@example("cached", [("fifo", 0.12, NOTHING)], False)
@example("cached", [("loops", 0.3, NOTHING)], True)
@fuzzing.few(2)
@given(feed=st.sampled_from(FEEDS), damages=st.lists(fuzzing.DAMAGES, min_size=1, max_size=2), named=st.booleans())
def test_a_damaged_checkpoint(feed, damages, named):
    check_start(feed, damages, named)


@pytest.mark.slow
@fuzzing.many(1500)
@given(feed=st.sampled_from(FEEDS), damages=st.lists(fuzzing.DAMAGES, min_size=1, max_size=3), named=st.booleans())
def test_many_damaged_checkpoints(feed, damages, named):
    check_start(feed, damages, named)


@example("cached", [("unreadable", 0.99, NOTHING)])  # an error of the file system where a file is written
@fuzzing.few(1)
@given(feed=st.sampled_from(FEEDS), damages=st.lists(fuzzing.DAMAGES, min_size=1, max_size=3))
def test_a_damaged_folder_is_resumed(feed, damages):
    check_resume(feed, damages)


@pytest.mark.slow
@fuzzing.many(300)
@given(feed=st.sampled_from(FEEDS), damages=st.lists(fuzzing.DAMAGES, min_size=1, max_size=4))
def test_many_damaged_folders_are_resumed(feed, damages):
    check_resume(feed, damages)
