"""T5X's first format, read: every version and kind of leaf, and everything that may be wrong with one."""

import os
import shutil

import msgpack
import numpy as np
import pytest
from flax import serialization

from perex_t5x import checkpoint_files, checkpoints
from perex_t5x.checkpoint_files import DamagedError
from perex_t5x.checkpoint_formats import legacy, open_checkpoint
from perex_t5x.errors import ConfigError
from tests.checkpoint_formats import support


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint with arrays in both places, of several dtypes, and its leaves."""
    params = support.t5_params(support.BF16)
    leaves = support.state_dict(params, support.adam(params))
    leaves |= {
        "flax_mutables/cache": support.numbers((9, 4), 1),
        "state/param_states/1": {},
        "state/param_states/2": None,
    }
    return support.write_legacy(tmp_path_factory.mktemp("legacy") / "checkpoint_7", leaves), leaves


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copytree(written[0], tmp_path / "checkpoint_7")


def test_is_read(written):
    path, leaves = written
    contents = open_checkpoint(path)
    assert (contents.format, contents.version) == ("legacy", "3")
    support.assert_same(contents, leaves)
    stored = {leaf.stored for leaf in contents.leaves.values()}
    assert stored == {"msgpack", "zarr"}
    support.assert_same(open_checkpoint(f"{path}/checkpoint"), leaves)  # T5X takes the file's path, too
    assert checkpoint_files.verify(path) == ("valid", "written without checksums; every leaf was read")


def test_version_2_has_bfloat16_as_integers(tmp_path):
    leaves = support.state_dict(support.t5_params(support.BF16))
    path = support.write_legacy(tmp_path / "checkpoint_7", leaves, version=2)
    contents = open_checkpoint(path)
    assert contents.version == "2"
    support.assert_same(contents, leaves)
    half = contents.leaves["target/decoder/logits_dense/kernel"].read((slice(2, 4), slice(None)))
    np.testing.assert_array_equal(half, leaves["target/decoder/logits_dense/kernel"][2:4])


def rewrite(path, change):
    """Changes the dictionary of a msgpack file."""
    file = f"{path}/checkpoint"
    tree = serialization.msgpack_restore(open(file, "rb").read())
    tree = change(tree) or tree
    with open(file, "wb") as f:
        f.write(serialization.msgpack_serialize(tree))


def spec_of(tree, name="target/token_embedder/embedding"):
    for part in ["optimizer", *name.split("/")]:
        tree = tree[part]
    return tree


@pytest.mark.parametrize("how", ["path outside of kvstore", "gcs", "dtype in metadata"])
def test_specs_of_other_times(written, copied, how):
    def change(tree):
        spec = spec_of(tree)
        if how == "path outside of kvstore":  # TensorStore before 0.1.14
            spec["path"] = spec["kvstore"].pop("path")
        elif how == "gcs":
            spec["kvstore"] |= {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
        else:
            spec["metadata"]["dtype"] = "<f4"
            spec.pop("dtype")

    rewrite(copied, change)
    if how == "dtype in metadata":  # is what the checkpoint says of the leaf; what is stored is bfloat16
        assert open_checkpoint(str(copied)).leaves["target/token_embedder/embedding"].dtype == np.float32
    else:
        support.assert_same(open_checkpoint(str(copied)), written[1])


def test_orbax_wrote_such_a_file_once(tmp_path):
    """`_optimizer` in a file of placeholders, with a zarr folder for each."""
    leaves = support.state_dict(support.t5_params())
    path = support.write_legacy(tmp_path / "checkpoint_7", leaves, in_msgpack=0)

    def change(tree):
        def placed(tree, prefix):
            if legacy._is_spec(tree):
                return f"PLACEHOLDER://{prefix}"
            return {key: placed(value, f"{prefix}.{key}" if prefix else key) for key, value in tree.items()}

        return {"_optimizer": placed(tree["optimizer"], ""), "flax_mutables": None}

    rewrite(path, change)
    contents = open_checkpoint(path)
    assert contents.version == "Orbax's, aggregated" and contents.empty.pop("flax_mutables") is None
    support.assert_same(contents, leaves)


# --- what is wrong ----------------------------------------------------------------------------------------------------

NAME = "target/token_embedder/embedding"
CHUNK = "target.token_embedder.embedding/1.0"


def truncated(path):
    os.truncate(path, os.path.getsize(path) // 2)


HARMS = {
    "unknown version": (
        lambda p: rewrite(p, lambda t: {**t, "version": 4}),
        "has version 4. T5X's versions 2 and 3 are",
    ),
    "version 1": (lambda p: rewrite(p, lambda t: {**t, "version": 1}), "has version 1"),
    "no version": (lambda p: rewrite(p, lambda t: t["optimizer"]), "names no version: an early one of Flax"),
    "no leaves": (lambda p: rewrite(p, lambda t: {**t, "optimizer": {}}), "there is no array"),
    "no optimizer": (lambda p: rewrite(p, lambda t: {"version": 3}), "holds no 'optimizer'"),
    "text as a leaf": (lambda p: rewrite(p, lambda t: t["optimizer"].update(x="y")), "x is a str, and no array"),
    "truncated msgpack": (lambda p: truncated(f"{p}/checkpoint"), "checkpoint .* cannot be read: checkpoint: "),
    "empty msgpack": (lambda p: open(f"{p}/checkpoint", "w").close(), "cannot be read: checkpoint: "),
    "not msgpack": (lambda p: open(f"{p}/checkpoint", "w").write("hello there" * 9), "cannot be read|holds a int"),
    "a list": (lambda p: open(f"{p}/checkpoint", "wb").write(msgpack.packb([1, 2])), "holds a list"),
    "TensorFlow's": (
        lambda p: open(f"{p}/checkpoint", "w").write('model_checkpoint_path: "model.ckpt-0"'),
        "is a checkpoint of TensorFlow",
    ),
    "outside": (
        lambda p: rewrite(p, lambda t: spec_of(t)["kvstore"].update(path="../../secret/")),
        f"{NAME} is said to be in '../../secret/', outside of it",
    ),
    "absolute": (lambda p: rewrite(p, lambda t: spec_of(t)["kvstore"].update(path="/etc")), "outside of it"),
    "another driver": (lambda p: rewrite(p, lambda t: spec_of(t).update(driver="json")), "its driver is 'json'"),
    "another shape": (
        lambda p: rewrite(p, lambda t: spec_of(t)["metadata"].update(shape=[5, 8])),
        rf"{NAME} has shape \(24, 8\) in its files, and \(5, 8\)",
    ),
    "no folder": (lambda p: shutil.rmtree(os.path.dirname(f"{p}/{CHUNK}")), f"{NAME}: .*does not exist"),
    "missing chunk": (lambda p: os.unlink(f"{p}/{CHUNK}"), f"{NAME}: .*is missing"),
    "truncated chunk": (lambda p: truncated(f"{p}/{CHUNK}"), f"{NAME}: .*truncated"),
    "empty chunk": (lambda p: os.truncate(f"{p}/{CHUNK}", 0), f"{NAME}: "),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_wrong_is_named(copied, harm):
    do, message = HARMS[harm]
    do(str(copied))
    with pytest.raises(ConfigError, match=message) as caught:
        contents = open_checkpoint(str(copied))
        for leaf in contents.leaves.values():
            leaf.read()
    assert "\n" not in str(caught.value) and str(copied) in str(caught.value)
    # What has to do with the files is damage; what is no checkpoint of T5X, or too old, is not.
    if isinstance(caught.value, DamagedError):
        status, detail = checkpoint_files.verify(str(copied))
        assert status == "damaged" and detail


def test_a_part_is_read_without_the_rest(copied):
    """Each process reads what its devices hold: a chunk that is missing elsewhere is not looked at."""
    os.unlink(f"{copied}/{CHUNK}")
    leaf = open_checkpoint(str(copied)).leaves[NAME]
    assert leaf.read((slice(0, 12), slice(None))).shape == (12, support.D)
    with pytest.raises(DamagedError):
        leaf.read((slice(0, 13), slice(None)))


def test_paths_and_modes(written, tmp_path):
    run = tmp_path / "run"
    for step in (7, 20, 100):
        shutil.copytree(written[0], run / f"checkpoint_{step}")
    os.makedirs(run / "checkpoint_200.tmp-1700000000")  # T5X's, of a save that was killed
    steps = [f"{run}/checkpoint_{step}" for step in (7, 20, 100)]
    assert checkpoints.checkpoint_paths(str(run), "all") == steps
    assert checkpoints.checkpoint_paths(str(run), "latest") == steps[-1:]
    assert checkpoints.checkpoint_paths(steps[0], "specific") == steps[:1]
    assert checkpoints.checkpoint_paths(f"{steps[0]}/checkpoint", "specific") == steps[:1]
    with pytest.raises(ConfigError, match="mode 'specific' is not a checkpoint.* It holds checkpoint_7, checkpoint_20"):
        checkpoints.checkpoint_paths(str(run), "specific")
    # A run cannot resume from them, and does not move them away either.
    for call in (checkpoint_files.newest_valid, checkpoint_files.tidy):
        if call is checkpoint_files.newest_valid:
            with pytest.raises(ConfigError, match=r"checkpoint_100 was written by T5X.*RestoreCheckpointConfig.path"):
                call(str(run))
        else:
            call(str(run))
        assert {f"checkpoint_{step}" for step in (7, 20, 100)} <= set(os.listdir(run))
    assert checkpoint_files.refusal(steps[0]) == ""
    shutil.rmtree(f"{steps[0]}/target.token_embedder.embedding")
    assert "newest valid one beside it is" in checkpoint_files.refusal(steps[0])
