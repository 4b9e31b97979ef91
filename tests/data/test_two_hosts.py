"""Two real processes: the same cached batch as one, a divided stream, one copy on disk."""

import hashlib
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import seqio

from perex_t5x.data import make_feed, tasks
from perex_t5x.errors import ConfigError

pytestmark = pytest.mark.slow  # two more processes that import TensorFlow


@pytest.fixture(scope="module")
def bucket(_cloud_storage_buckets):
    return _cloud_storage_buckets()


@pytest.fixture(scope="module")
def hosts(corpus, tmp_path_factory, bucket):
    folder = tmp_path_factory.mktemp("hosts")
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    script = os.path.join(os.path.dirname(__file__), "two_hosts.py")
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = {
        **os.environ,
        **bucket.environment,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": root,
    }
    command = [sys.executable, script, str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(i), f"{corpus}/*.txt", str(folder), bucket.bucket],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [p.communicate(timeout=120)[0] for p in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    lines = [[x for x in o.splitlines() if x.startswith("SEEN ")][-1] for o in outputs]
    return folder, [json.loads(line[5:]) for line in lines]


def by_row(rows_of):
    """Number of the first row -> hash, of pairs of rows: what the hosts print."""
    return {str(i): hashlib.sha256(np.stack([rows_of[i], rows_of[i + 1]])).hexdigest() for i in range(0, 8, 2)}


def test_two_hosts_see_the_cached_batch_of_one(hosts, corpus, config, converter):
    folder, (first, second) = hosts
    tasks.register_text_files(glob=f"{corpus}/*.txt", name="hosts_lm")
    alone = make_feed(config(mixture_or_task_name="hosts_lm", pack=False), converter)
    rows = alone.batch(5, None)["decoder_target_tokens"]
    expected = {str(i): hashlib.sha256(rows[i : i + 2]).hexdigest() for i in range(0, 8, 2)}
    assert {**first["cached"], **second["cached"]} == expected
    assert not set(first["cached"]) & set(second["cached"])
    assert first["drawn_seed"] == second["drawn_seed"]
    assert len(os.listdir(folder / "rows")) == 1


def test_a_stream_is_divided_and_resumed(hosts, config, converter):
    folder, (first, second) = hosts
    assert not set(first["streamed"][0].values()) & set(second["streamed"][0].values())
    for host in (first, second):
        assert host["resumed"] == host["streamed"][1:]
    assert sorted(os.listdir(folder / "state")) == ["process_0-of-2", "process_1-of-2"]
    with pytest.raises(ConfigError, match="saved by 2 processes and this run has 1"):
        make_feed(config(feed="streaming"), converter).restore(str(folder / "state"))


def test_hosts_whose_rows_interleave_stream_what_one_process_sees(hosts, corpus):
    """Each host's stream is its shard of the source, and fills its own rows in ascending order."""
    _, (first, second) = hosts
    tasks.register_text_files(glob=f"{corpus}/*.txt", name="hosts_lm")
    streams = []
    for index in range(2):
        lengths, shard = {"targets": 32}, seqio.ShardInfo(index=index, num_shards=2)
        ds = seqio.get_mixture_or_task("hosts_lm").get_dataset(
            lengths,
            split="train",
            use_cached=False,
            shuffle=True,
            seed=3,
            shard_info=shard,
            num_epochs=None,
            try_in_mem_cache=False,
        )
        streams.append(seqio.LMFeatureConverter(pack=False)(ds, lengths).batch(4).as_numpy_iterator())
    for step in range(3):
        parts = [next(stream)["decoder_target_tokens"] for stream in streams]
        rows = dict(zip([0, 1, 6, 7], parts[0], strict=True)) | dict(zip([2, 3, 4, 5], parts[1], strict=True))
        expected = by_row(rows)
        assert first["interleaved"][step] == {i: expected[i] for i in ("0", "6")}
        assert second["interleaved"][step] == {i: expected[i] for i in ("2", "4")}
    for host in (first, second):
        assert host["interleaved_resumed"] == host["interleaved"][1:]
    assert "read data shard 0 of 2 for rows 0-1, 6-7, and with this mesh it would read" in first["refused"]
    assert "data shard 1 of 2 for rows 2-5, and with this mesh it would read" in second["refused"]


def test_a_cached_feed_reads_only_the_rows_of_its_devices_each_once(hosts):
    _, (first, second) = hosts
    assert sorted(map(tuple, first["reads"])) == [(0, 2), (6, 8)]
    assert sorted(map(tuple, second["reads"])) == [(2, 4), (4, 6)]
    both = {**first["cached"], **second["cached"]}
    assert {**first["cached_interleaved"], **second["cached_interleaved"]} == both
    assert set(first["cached_interleaved"]) == {"0", "6"}


def test_a_copy_in_a_bucket_is_written_once_and_each_host_reads_only_its_rows(hosts, bucket):
    folder, (first, second) = hosts
    both = {**first["cached"], **second["cached"]}
    assert {**first["bucket"], **second["bucket"]} == both and set(second["bucket"]) == {"2", "4"}
    parts = [name for name in bucket.objects("copies/") if "/rows/c/" in name]
    writes = bucket.stats()["writes"]
    assert parts and all(writes[name] == 1 for name in parts)
    blocks = [{p.name for p in (folder / f"disk_{i}").rglob("0*") if p.is_file()} for i in range(2)]
    assert [len(b) for b in blocks] == [4, 4] and not blocks[0] & blocks[1]
