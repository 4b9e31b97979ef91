"""The stand-in for Cloud Storage, through the clients that the project uses."""

import contextlib

import pytest
from etils import epath

from perex_t5x import files


@pytest.fixture
def client(cloud_storage_in_process):
    from google.cloud import storage

    return storage.Client().bucket(cloud_storage_in_process.bucket[5:])


def test_three_clients_see_the_same_objects(cloud_storage_in_process, client):
    import tensorstore as ts

    folder = epath.Path(cloud_storage_in_process.bucket) / "a"
    folder.mkdir(parents=True)
    (folder / "tensorflow").write_text("x" * 100)
    client.blob("a/client").upload_from_string(b"y" * 9_000_000)  # more than one part: a resumable upload
    kv = ts.KvStore.open({"driver": "gcs", "bucket": client.name, "path": "a/b/"}).result()
    kv.write("tensorstore", b"z").result()
    assert cloud_storage_in_process.objects() == ["a/", "a/b/tensorstore", "a/client", "a/tensorflow"]
    assert sorted(p.name for p in folder.iterdir()) == ["b", "client", "tensorflow"]
    assert (folder / "b" / "tensorstore").read_bytes() == b"z"
    assert kv.read("tensorstore").result().value == b"z" and not kv.read("other").result().value
    assert client.blob("a/tensorflow").download_as_bytes() == b"x" * 100
    assert len((folder / "client").read_bytes()) == 9_000_000
    cloud_storage_in_process.faults(page_size=1)
    assert [b.name for b in client.list_blobs(prefix="a/b")] == ["a/b/tensorstore"]
    assert len(list(client.list_blobs())) == 4 and len(list(folder.iterdir())) == 3
    (folder / "client").rename(folder / "renamed")
    folder.rmtree()
    folder.rmtree(missing_ok=True)
    assert cloud_storage_in_process.objects() == []


def test_conditions_and_permissions(cloud_storage_in_process, client):
    from google.api_core import exceptions
    from google.cloud import storage

    blob = client.blob("lock")
    blob.upload_from_string("1", if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        client.blob("lock").upload_from_string("2", if_generation_match=0)
    blob.upload_from_string("2", if_generation_match=blob.generation)
    with pytest.raises(exceptions.NotFound):
        storage.Client().get_bucket("no-such-bucket-at-all")
    cloud_storage_in_process.faults(deny=["storage.objects.delete", "storage.buckets.get"])
    asked = ["storage.buckets.get", "storage.objects.delete", "storage.objects.create"]
    assert client.test_iam_permissions(asked) == ["storage.objects.create"]
    with pytest.raises(exceptions.Forbidden, match="storage.objects.delete"):
        blob.upload_from_string("3")  # to overwrite is to delete
    with pytest.raises(exceptions.Forbidden, match="storage.buckets.get"):
        storage.Client().get_bucket(client.name)
    cloud_storage_in_process.faults(deny=["storage.objects.list"])
    with pytest.raises(exceptions.Forbidden):
        client.blob("missing").download_as_bytes()
    assert cloud_storage_in_process.get("lock") == b"2"


def test_faults_strike_the_requests_they_name(cloud_storage_in_process, client):
    import requests
    from google.api_core import exceptions

    def upload(name, **options):
        client.blob(name).upload_from_string("x" * 100_000, retry=None, timeout=2, **options)

    cloud_storage_in_process.faults(writes_per_second=0.1)
    upload("a")
    with pytest.raises(exceptions.TooManyRequests):
        upload("a")
    cloud_storage_in_process.faults(rules=[{"action": "answer", "code": 503, "every": 2, "times": 1, "name": "/b"}])
    upload("b1")
    with pytest.raises(exceptions.ServiceUnavailable):
        upload("b2")
    upload("b3"), upload("b4")
    torn = {"action": "tear", "name": "/c$"}
    hung = {"action": "hang", "seconds": 30, "operation": "insert", "name": "/d$"}
    lost = {"action": "lose_answer", "name": "/e$"}
    cloud_storage_in_process.faults(rules=[torn, hung, lost])
    for name in "cde":
        with pytest.raises((requests.exceptions.ConnectionError, requests.exceptions.Timeout, ConnectionError)):
            upload(name)
    assert cloud_storage_in_process.objects() == ["a", "b1", "b3", "b4", "e"]
    assert cloud_storage_in_process.stats()["codes"][503] == 1 and cloud_storage_in_process.stats()["writes"]["a"] == 1


def test_a_file_is_one_upload(cloud_storage_in_process):
    path = f"{cloud_storage_in_process.bucket}/folder/a.json"
    files.write_atomically(path, '"ä"')
    assert cloud_storage_in_process.get("folder/a.json").decode() == '"ä"'
    with contextlib.suppress(RuntimeError), files.atomic_writer(path) as f:
        f.write("half")
        raise RuntimeError
    assert cloud_storage_in_process.get("folder/a.json").decode() == '"ä"'
    stats = cloud_storage_in_process.stats()
    assert stats["writes"] == {"folder/a.json": 1} and "rewrite" not in stats["operations"]
