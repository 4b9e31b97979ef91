"""Whole and damaged checkpoints: found, moved aside, and never in the way of a save."""

import json
import os
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import buckets, checkpoint_files, checkpoints, checksums
from perex_t5x.errors import ConfigError
from perex_t5x.train_state import TrainState
from perex_t5x.utils import SaveCheckpointConfig


def state(step: int) -> TrainState:
    rng = np.random.default_rng(step)
    params = {"w": jnp.asarray(rng.normal(size=(64, 8)), jnp.float32), "b": jnp.full((7,), -step, jnp.float32)}
    return TrainState(jnp.int32(step), params, {"w": params["w"] + 1}, jax.random.key_data(jax.random.key(step)))


class Feed:
    """Something that writes a state of its own, as a stream does."""

    def save_state(self, directory: str, step: int) -> None:
        with open(os.path.join(directory, "process_0.json"), "w", encoding="utf-8") as f:
            f.write(json.dumps({"step": step, "ahead": list(range(100))}))


def save(folder, *steps: int) -> None:
    checkpointer = checkpoints.Checkpointer(str(folder), SaveCheckpointConfig(period=1))
    for step in steps:
        feed = None if str(folder).startswith("gs://") else Feed()
        checkpointer.save(state(step), {"data": {"step": step, "seed": 3}, "random_seed": 7}, feed)
    checkpointer.close()


def restore(path) -> TrainState:
    shapes = jax.eval_shape(lambda: state(1))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return checkpoints.merge(shapes, checkpoints.restore(str(path), shapes, jax.tree.map(lambda _: sharding, shapes)))


def assert_is_state(path, step: int) -> None:
    jax.tree.map(np.testing.assert_array_equal, restore(path), state(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 10, 20, 30)
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A copy of three checkpoints: 10, 20, 30."""
    return shutil.copytree(saved, tmp_path / "run")


def largest(folder, *names: str):
    """The largest file of that kind: where the arrays are, and not another description of them."""
    found = [p for p in folder.rglob("*") if p.is_file() and any(p.match(name) for name in names)]
    return max(found, key=lambda p: p.stat().st_size)


KINDS = {
    "array": ("d/*",),
    "manifest": ("manifest.ocdbt",),
    "sharding": ("_sharding",),
    "names of arrays": ("state/_METADATA",),
    "metadata": ("_CHECKPOINT_METADATA",),
    "run": ("run/metadata",),
    "stream": ("data/*",),
    "checksums": ("checksums.json",),
}


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def delete(path):
    path.unlink()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, empty, delete, flip])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_and_the_one_before_is_used(run, kind, harm, caplog):
    harm(largest(run / "checkpoint_30", *KINDS[kind]))
    assert checkpoint_files.verify(str(run / "checkpoint_30"))[0] == "damaged"
    assert "newest valid one beside it is" in checkpoint_files.refusal(str(run / "checkpoint_30"))
    assert checkpoint_files.newest_valid(str(run)) == str(run / "checkpoint_20")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "checkpoint_30 (now checkpoint_30.damaged)" in warning and "10 steps are lost" in warning
    assert sorted(os.listdir(run)) == ["checkpoint_10", "checkpoint_20", "checkpoint_30.damaged"]
    assert_is_state(run / "checkpoint_20", 20)
    save(run, 30)  # under its own name, whatever is beside it
    assert checkpoint_files.newest_valid(str(run)) == str(run / "checkpoint_30")
    assert_is_state(run / "checkpoint_30", 30)


def test_no_damage(run, caplog):
    assert checkpoint_files.newest_valid(str(run)) == str(run / "checkpoint_30")
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    recorded = json.loads((run / "checkpoint_30" / "checksums.json").read_text())["files"]
    everything = {
        p.relative_to(run / "checkpoint_30").as_posix() for p in (run / "checkpoint_30").rglob("*") if p.is_file()
    }
    assert everything - set(recorded) == {"checksums.json", "commit_success.txt"}


def test_all_damaged(run, caplog):
    for step in (10, 20, 30):
        flip(largest(run / f"checkpoint_{step}", "d/*"))
    assert checkpoint_files.newest_valid(str(run), dry_run=True) is None and "checkpoint_30" in os.listdir(run)
    caplog.clear()
    assert checkpoint_files.newest_valid(str(run)) is None
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "from the beginning" in warning and "30 steps are lost" in warning
    assert checkpoint_files.newest_valid(str(run)) is None  # and nothing is left to warn of
    assert {f"checkpoint_{step}.damaged" for step in (10, 20, 30)} == set(os.listdir(run))


def test_moving_aside_twice(run):
    assert checkpoint_files.set_aside(str(run / "checkpoint_30")).endswith("checkpoint_30.damaged")
    save(run, 30)
    assert checkpoint_files.set_aside(str(run / "checkpoint_30")).endswith("checkpoint_30.damaged_2")


def test_a_checkpoint_without_checksums_can_be_restored(run, caplog):
    """As earlier versions wrote them."""
    caplog.set_level("INFO", logger="absl")
    (run / "checkpoint_30" / "checksums.json").unlink()
    metadata = run / "checkpoint_30" / "_CHECKPOINT_METADATA"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "custom_metadata": {}}))
    assert checkpoint_files.verify(str(run / "checkpoint_30")) == ("unknown", "written without checksums")
    assert checkpoint_files.newest_valid(str(run)) == str(run / "checkpoint_30")
    assert "whether it is damaged is not known" in caplog.text
    assert_is_state(run / "checkpoint_30", 30)
    truncate(largest(run / "checkpoint_30", "d/*"))
    with pytest.raises(checkpoint_files.DamagedError, match="cannot be read.*move the folder away"):
        restore(run / "checkpoint_30")
    # The position in the data is needed to resume: without it the order would change unseen.
    for content in ("", "[]", "{}", None):
        folder = shutil.copytree(run / "checkpoint_30", run.parent / f"old_{content}" / "checkpoint_30")
        (folder / "run" / "metadata").unlink()
        if content is not None:
            (folder / "run" / "metadata").write_text(content)
        assert checkpoint_files.newest_valid(str(folder.parent)) is None
        assert os.listdir(folder.parent) == ["checkpoint_30.damaged"]


@pytest.mark.parametrize("content", [(), ("state/",), ("state/d/0f",), ("note",)])
def test_a_folder_with_the_name_of_a_checkpoint_is_not_in_the_way(run, content):
    shutil.rmtree(run / "checkpoint_30")
    os.makedirs(run / "checkpoint_30")
    for name in content:
        os.makedirs((run / "checkpoint_30" / name).parent, exist_ok=True)
        (run / "checkpoint_30" / name).mkdir() if name.endswith("/") else (run / "checkpoint_30" / name).write_text("x")
    assert checkpoints.newest(str(run)) == checkpoint_files.newest_valid(str(run)) == str(run / "checkpoint_20")
    save(run, 30)
    assert checkpoints.newest(str(run)) == str(run / "checkpoint_30")
    assert_is_state(run / "checkpoint_30", 30)
    assert ("checkpoint_30.damaged" in os.listdir(run)) == bool(content)  # what is not empty is kept


def test_a_checkpoint_that_vanishes_is_saved_again(run):
    checkpointer = checkpoints.Checkpointer(str(run), SaveCheckpointConfig(period=1))
    shutil.rmtree(run / "checkpoint_30")
    os.makedirs(run / "checkpoint_30")
    checkpointer.save(state(30), {"data": {}}, None)
    checkpointer.close()
    assert_is_state(run / "checkpoint_30", 30)


def test_what_killed_processes_leave_is_removed(run):
    os.makedirs(run / "checkpoint_40.orbax-checkpoint-tmp" / "state")
    (run / "metrics.jsonl.123.456.tmp").write_text("half")
    (run / "mine.tmp").write_text("mine")
    save(run, 50)
    names = {"checkpoint_10", "checkpoint_20", "checkpoint_30", "checkpoint_50", "mine.tmp"}
    assert set(os.listdir(run)) == names


@pytest.mark.parametrize("gone", ["state/_METADATA", "run/metadata", "checksums.json"])
def test_a_checkpoint_that_was_half_removed(run, gone):
    """By a process that was killed while it removed the oldest."""
    (run / "checkpoint_10" / gone).unlink()
    checkpoints.Checkpointer(str(run), SaveCheckpointConfig(period=1, keep=3)).close()
    assert sorted(os.listdir(run)) == ["checkpoint_20", "checkpoint_30"]


@pytest.mark.parametrize("keep", [3, None])
def test_what_is_no_folder_is_not_in_the_way(run, keep):
    (run / "checkpoint_5").write_text("a file")
    (run / "checkpoint_6").symlink_to(run.parent)
    (run / "checkpoint_7").symlink_to(run / "nowhere")
    checkpointer = checkpoints.Checkpointer(str(run), SaveCheckpointConfig(period=1, keep=keep))
    checkpointer.save(state(40), {"data": {}}, None)
    checkpointer.close()
    assert_is_state(run / "checkpoint_40", 40)
    assert run.parent.is_dir() and not {"checkpoint_5", "checkpoint_6", "checkpoint_7"} & set(os.listdir(run))


@pytest.mark.parametrize("harm", [truncate, delete])
@pytest.mark.parametrize("kind", KINDS)
def test_an_older_checkpoint_that_is_damaged_is_not_in_the_way(run, kind, harm):
    harm(largest(run / "checkpoint_10", *KINDS[kind]))
    assert checkpoint_files.newest_valid(str(run)) == str(run / "checkpoint_30")
    save(run, 40)
    assert_is_state(run / "checkpoint_40", 40)


def test_the_command(run, capsys):
    def verify(*paths, json=False):
        code = checkpoint_files.command(types.SimpleNamespace(json=json), ["verify", *map(str, paths)])
        return code, capsys.readouterr().out.splitlines()

    assert verify(run) == (0, [f"{run}/checkpoint_{step}: valid" for step in (10, 20, 30)])
    flip(largest(run / "checkpoint_20", "d/*"))
    code, lines = verify(run / "checkpoint_10", run / "checkpoint_20", json=True)
    assert code == 1 and [json.loads(line)["status"] for line in lines] == ["valid", "damaged"]
    assert "its content has changed" in json.loads(lines[1])["detail"]
    assert verify(run / "checkpoint_10")[0] == 0
    os.makedirs(run / "checkpoint_40")
    assert verify(run)[1][-1] == f"{run}/checkpoint_40: unfinished (not a whole checkpoint)"
    for words in ([], ["verify"], ["verify", str(run / "none")], ["verify", str(run.parent)]):
        with pytest.raises(ConfigError):
            checkpoint_files.command(types.SimpleNamespace(json=False), words)


def test_in_a_bucket(cloud_storage_in_process, caplog):
    """Checksums are the store's own: no object is read to record or to verify them."""
    buckets.client.cache_clear()
    cloud = cloud_storage_in_process
    folder = f"{cloud.bucket}/run"
    save(folder, 10, 20, 30)
    recorded = json.loads(cloud.get("run/checkpoint_30/checksums.json"))["files"]
    assert {"_CHECKPOINT_METADATA", "run/metadata", "state/_METADATA"} < set(recorded)
    assert checkpoint_files.newest_valid(folder) == f"{folder}/checkpoint_30"
    array = max((n for n in recorded if "/d/" in n), key=lambda n: recorded[n][0])
    content = bytearray(cloud.get(f"run/checkpoint_30/{array}"))
    content[len(content) // 2] ^= 1
    cloud.put(f"run/checkpoint_30/{array}", bytes(content))
    assert checksums.problems(f"{folder}/checkpoint_30") == [f"{array}: its content has changed"]
    cloud.put("run/checkpoint_40/state/_METADATA", b"")  # never committed
    assert checkpoint_files.newest_valid(folder) == f"{folder}/checkpoint_20"
    assert "checkpoint_30 (now checkpoint_30.damaged)" in caplog.text
    assert {name.split("/")[1] for name in cloud.objects() if "checkpoint_3" in name} == {"checkpoint_30.damaged"}
    save(folder, 30)
    assert checkpoint_files.newest_valid(folder) == f"{folder}/checkpoint_30"
    assert not [name for name in cloud.objects() if "checkpoint_40" in name]
