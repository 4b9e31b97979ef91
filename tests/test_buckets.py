"""Folders in Cloud Storage: what is refused before anything is compiled, and how it is said."""

import time

import pytest

from perex_t5x import buckets, extras, run_dir
from perex_t5x.errors import ConfigError, Reason, UnreachableError


@pytest.fixture(autouse=True)
def _new_client():
    buckets.client.cache_clear()
    yield
    buckets.client.cache_clear()


def test_a_good_bucket_is_left_as_it_was(cloud_storage_in_process):
    cloud = cloud_storage_in_process
    cloud.put("run/config.gin", b"")
    run_dir.prepare(f"{cloud.bucket}/run", dry_run=True)
    buckets.check(f"{cloud.bucket}/run", "--dir", writes=False)
    buckets.check("/tmp/run", "MODEL_DIR")
    assert cloud.objects() == ["run/config.gin"]
    assert {"insert", "read", "list", "delete", "bucket"} <= set(cloud.stats()["operations"])


@pytest.mark.parametrize("permission", ["create", "get", "list", "delete"])
def test_a_missing_permission_is_named_with_its_grant(permission, cloud_storage_in_process):
    cloud = cloud_storage_in_process
    cloud.faults(deny=[f"storage.objects.{permission}"])
    with pytest.raises(ConfigError) as error:
        run_dir.prepare(f"{cloud.bucket}/run", binding="EVAL_OUTPUT_DIR")
    message = str(error.value)
    assert f"EVAL_OUTPUT_DIR = '{cloud.bucket}/run': this process lacks storage.objects.{permission} on " in message
    assert f"gcloud storage buckets add-iam-policy-binding {cloud.bucket} --member=serviceAccount:" in message
    assert message.endswith("--role=roles/storage.objectAdmin")


def test_object_admin_alone_is_not_enough(cloud_storage_in_process):
    cloud = cloud_storage_in_process
    cloud.faults(deny=["storage.buckets.get"])
    with pytest.raises(ConfigError, match=r"lacks storage\.buckets\.get on") as error:
        run_dir.prepare(f"{cloud.bucket}/run")
    assert str(error.value).endswith("--role=roles/storage.legacyBucketReader") and cloud.objects() == []


def test_a_missing_bucket_and_misspelled_ones(cloud_storage_in_process):
    with pytest.raises(ConfigError, match="there is no bucket gs://no-such-bucket.* gcloud storage buckets create"):
        buckets.check("gs://no-such-bucket/run", "MODEL_DIR")
    for path in ("gs:/bucket/run", "gs:bucket/run", "gs:///bucket/run"):
        with pytest.raises(ConfigError, match=f"MODEL_DIR = '{path}': a bucket is written gs://bucket/run"):
            buckets.check(path, "MODEL_DIR")


def test_a_hierarchical_bucket_needs_a_further_client(cloud_storage_in_process, _cloud_storage_buckets, monkeypatch):
    bucket = _cloud_storage_buckets(hierarchical=True).bucket
    buckets.check(f"{bucket}/run", "MODEL_DIR")
    installed = extras.is_installed
    monkeypatch.setattr(extras, "is_installed", lambda name: "storage_control" not in name and installed(name))
    with pytest.raises(extras.MissingExtraError, match=r"hierarchical namespace.* pip install 'perex_t5x\[gcs_hns\]'"):
        buckets.check(f"{bucket}/run", "MODEL_DIR")
    monkeypatch.setattr(extras, "is_installed", lambda name: "google" not in name)
    with pytest.raises(extras.MissingExtraError, match=r"MODEL_DIR = .* needs the extra \[gcs\]: pip install"):
        buckets.check(f"{bucket}/run", "MODEL_DIR")


def test_an_outage_is_retried_then_said_and_may_end_by_itself(cloud_storage_in_process, monkeypatch):
    cloud = cloud_storage_in_process
    monkeypatch.setattr(buckets, "SECONDS", 1.0)
    cloud.faults(rules=[{"action": "answer", "code": 503, "times": 2}])
    buckets.check(f"{cloud.bucket}/run", "MODEL_DIR")
    assert cloud.stats()["codes"][503] == 2
    for fault in (
        {"action": "hang", "seconds": 10},
        {"action": "answer", "code": 503},
        {"action": "answer", "code": 429},
    ):
        cloud.faults(rules=[fault])
        begun = time.monotonic()
        with pytest.raises(UnreachableError, match="MODEL_DIR = .*did not answer within 3 s") as error:
            buckets.check(f"{cloud.bucket}/run", "MODEL_DIR")
        assert error.value.reason is Reason.UNREACHABLE and error.value.reason.retryable
        assert time.monotonic() - begun < 30


def test_without_credentials_nobody_waits_for_a_metadata_server(tmp_path, monkeypatch):
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    with pytest.raises(ConfigError, match="gcloud auth application-default login"):
        buckets.check("gs://some-bucket/run", "MODEL_DIR")


def test_public_data_is_read_without_credentials(cloud_storage_in_process, monkeypatch):
    """And by whoever may read objects alone, as of the buckets with T5X's checkpoints."""
    cloud = cloud_storage_in_process
    folder = f"{cloud.bucket}/pretrained/checkpoint_1"
    cloud.faults(deny=["storage.buckets.get", "storage.objects.create"])
    buckets.check(folder, "CHECKPOINT_PATH", writes=False, public=True)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setattr(buckets, "has_credentials", lambda: False)
    buckets.client.cache_clear()
    buckets.check(folder, "CHECKPOINT_PATH", writes=False, public=True)
    with pytest.raises(ConfigError, match="gs:// needs credentials"):
        buckets.check(folder, "MODEL_DIR")
    cloud.faults(deny=["storage.objects.list"])
    with pytest.raises(ConfigError, match="it is not public, and there are no credentials.* application-default login"):
        buckets.check(folder, "CHECKPOINT_PATH", writes=False, public=True)
    buckets.client.cache_clear()


def test_what_tensorflow_alone_may_not_do(cloud_storage_in_process):
    """It has credentials of its own; here, for the mark of a folder, which it alone makes."""
    cloud = cloud_storage_in_process
    cloud.faults(rules=[{"action": "answer", "code": 403, "name": "/run/$"}])
    with pytest.raises(ConfigError, match="MODEL_DIR = .*TensorFlow may not write there, though"):
        run_dir.prepare(f"{cloud.bucket}/run")
