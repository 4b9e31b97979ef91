"""Copies in a bucket: what is written, what is read, and what happens when the bucket or the local disk is not well."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from perex_t5x.data import bucket_rows, make_feed
from perex_t5x.data.bucket_rows import BlockCache, BucketStore
from perex_t5x.errors import ConfigError

DTYPE = np.dtype([("x", np.uint16, (10,)), ("y", np.uint8, (5,))])
ROWS = np.frombuffer(np.random.default_rng(0).bytes(DTYPE.itemsize * 100), DTYPE)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Four rows a block, four blocks a part; a local disk of the test's own."""
    monkeypatch.setattr(bucket_rows, "_BLOCK_BYTES", 4 * DTYPE.itemsize)
    monkeypatch.setattr(bucket_rows, "_PART_BYTES", 16 * DTYPE.itemsize)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "perex_t5x" / "rows"


@pytest.fixture
def copy(cloud_storage_in_process, small):
    folder = f"{cloud_storage_in_process.bucket}/copies/a"
    assert not bucket_rows.exists(folder)
    bucket_rows.write(folder, (ROWS[i : i + 7] for i in range(0, 100, 7)), DTYPE)
    return cloud_storage_in_process, folder


def reads(cloud):
    return [r for r in cloud.requests() if r["operation"] == "read" and "/rows/c/" in r["name"]]


def test_rows_are_read_by_number_and_only_their_blocks(copy, small):
    cloud, folder = copy
    parts = [name for name in cloud.objects() if "/rows/c/" in name]
    assert len(parts) == 7 and bucket_rows.exists(folder)
    store = BucketStore(folder, DTYPE, cache_bytes=1 << 20)
    assert len(store) == 100 and store.num_bytes == ROWS.nbytes
    numbers = np.array([99, 0, 1, 17, 99, 50])
    assert np.array_equal(store.read(numbers), ROWS[numbers])
    blocks = sorted(int(p.name) for p in small.glob("*/*/*"))
    assert blocks == [0, 4, 12, 24]
    assert {r["name"].split("/c/")[1] for r in reads(cloud)} == {"0/0", "1/0", "3/0", "6/0"}
    # The next time, from the local disk: nothing is asked of the bucket.
    before = len(reads(cloud))
    again = BucketStore(folder, DTYPE, cache_bytes=1 << 20)
    assert np.array_equal(again.read(numbers), ROWS[numbers]) and len(reads(cloud)) == before
    # A damaged block there is read again.
    for path in small.glob("*/*/*"):
        path.write_bytes(path.read_bytes()[:-6] + b"damage")
    assert np.array_equal(again.read(numbers), ROWS[numbers]) and len(reads(cloud)) > before


def test_a_damaged_or_missing_part_is_named(copy):
    cloud, folder = copy
    name = "copies/a/rows/c/1/0"
    whole = cloud.get(name)
    cases = {"flipped": whole[:3] + bytes([whole[3] ^ 1]) + whole[4:], "short": whole[:20], "of another size": b""}
    for damaged in cases.values():
        cloud.put(name, damaged)
        with pytest.raises(ConfigError, match=r"copies/a is damaged: .*c/1/0(.|\n)*gcloud storage rm --recursive"):
            BucketStore(folder, DTYPE).read(np.array([16]))
    _delete(cloud, name)
    with pytest.raises(ConfigError, match=r"is damaged: NOT_FOUND: .*c/1/0"):
        BucketStore(folder, DTYPE).read(np.array([16]))
    assert np.array_equal(BucketStore(folder, DTYPE).read(np.array([0, 40])), ROWS[[0, 40]])
    # Without copy.json there is no copy, whatever lies there; writing again overwrites it.
    _delete(cloud, "copies/a/copy.json")
    assert not bucket_rows.exists(folder)
    with pytest.raises(ConfigError, match="there is no copy.json"):
        BucketStore(folder, DTYPE)
    bucket_rows.write(folder, [ROWS], DTYPE)
    assert np.array_equal(BucketStore(folder, DTYPE).read(np.arange(100)), ROWS)


def _delete(cloud, name):
    from perex_t5x import buckets

    buckets.client().bucket(cloud.bucket[5:]).blob(name).delete()


def test_passing_failures_are_retried_and_others_are_said(copy):
    cloud, folder = copy
    cloud.faults(rules=[{"action": "answer", "code": 503, "every": 2, "times": 3}])
    bucket_rows.write(f"{folder}b", [ROWS], DTYPE)
    assert np.array_equal(BucketStore(f"{folder}b", DTYPE).read(np.arange(0, 100, 9)), ROWS[::9])
    cloud.faults(deny=["storage.objects.get"])
    with pytest.raises(ConfigError, match="DatasetConfig.cache_dir: .*copies/a cannot be used: PERMISSION_DENIED"):
        BucketStore(folder, DTYPE)


def test_the_local_cache_is_bounded_and_cleaned(tmp_path):
    block = b"x" * 100
    old = BlockCache(tmp_path, "old", 10, limit=1000)
    for i in range(5):
        old.write(i, block)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getpid()):
        (tmp_path / "old" / "000000" / f"0000000009.{pid}.1.tmp").write_bytes(b"half")
    os.utime(tmp_path / "old", (1, 1))
    new = BlockCache(tmp_path, "new", 10, limit=1000)
    left = [p.name.split(".")[1] for p in tmp_path.rglob("*.tmp")]
    assert left == [str(os.getpid())]  # the process that writes it lives
    assert old.read(0, 10) == block and old.read(0, 9) is None
    for i in range(9):
        new.write(i, block)
    assert sum(new.read(i, 10) is not None for i in range(9)) == 4  # no more than the limit allows beside the old ones
    time.sleep(0.01)
    BlockCache(tmp_path, "third", 10, limit=700)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "third"]  # the one opened longest ago was removed
    assert old.read(0, 10) is None


def test_a_full_disk_costs_only_the_cache(tmp_path, monkeypatch):
    cache = BlockCache(tmp_path, "a", 10, limit=1000)
    monkeypatch.setattr(bucket_rows.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    cache.write(0, b"x" * 100)
    assert cache.read(0, 10) is None and not list(tmp_path.rglob("*.tmp"))


def test_a_feed_with_its_copy_in_a_bucket(cloud_storage_in_process, monkeypatch, tmp_path, config, converter):
    cloud = cloud_storage_in_process
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    in_memory = make_feed(config(feed="cached"), converter)
    feed = make_feed(config(feed="cached", cache_dir=f"{cloud.bucket}/rows/"), converter)
    assert feed.fingerprint == in_memory.fingerprint and cloud.bucket in feed.description
    written = len(cloud.stats()["writes"])
    again = make_feed(config(feed="cached", cache_dir=f"{cloud.bucket}/rows"), converter)
    assert len(cloud.stats()["writes"]) == written  # found again
    for step in (0, 7):
        expected = in_memory.batch(step)
        for other in (feed, again):
            assert all(np.array_equal(expected[k], v) for k, v in other.batch(step).items())
    with pytest.raises(ConfigError, match="a bucket is written gs://x/y"):
        make_feed(config(feed="cached", cache_dir="gs:/x/y"), converter)
