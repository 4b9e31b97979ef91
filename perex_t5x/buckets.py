"""Folders in Cloud Storage (gs://...): whether this process can use one, found out before anything is compiled.

TensorFlow, TensorStore and Orbax each speak to Cloud Storage by themselves, and each fails in its own way, some after
minutes. Here it is asked once, by its client library, with time-outs of seconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perex_t5x import extras, files
from perex_t5x.errors import ConfigError, UnreachableError, first_line

SECONDS = 20.0  # for one request; all of its retries together have three times that
# By cloud.google.com/storage/docs/access-control/iam-roles: objectAdmin does not hold storage.buckets.get, which both
# TensorFlow (to make a folder) and Orbax (to learn the kind of the bucket) ask for. Who only reads does without.
_OBJECT_ROLE, _BUCKET_ROLE = "roles/storage.objectAdmin", "roles/storage.legacyBucketReader"
_ROLES = {
    "storage.objects.create": _OBJECT_ROLE,
    "storage.objects.get": _OBJECT_ROLE,
    "storage.objects.list": _OBJECT_ROLE,
    "storage.objects.delete": _OBJECT_ROLE,
    "storage.buckets.get": _BUCKET_ROLE,
}
_READ_ROLES = {
    "storage.objects.get": "roles/storage.objectViewer",
    "storage.objects.list": "roles/storage.objectViewer",
}
_WELL_KNOWN = "application_default_credentials.json"
_NO_CREDENTIALS = (
    "no GOOGLE_APPLICATION_CREDENTIALS, no `gcloud auth application-default login`, and this is not a machine of Google "
    "Cloud. Run that command once."
)


# For the libraries that write checkpoints and metrics; variables that are set stay.
_OPTIONS = {
    # TensorFlow: a connection that moves nothing for a minute is given up (its default), and what fails is tried for about
    # five minutes, with pauses of at most 32 s, rather than for one.
    "GCS_REQUEST_CONNECTION_TIMEOUT_SECS": "30",
    "GCS_REQUEST_IDLE_TIMEOUT_SECS": "60",
    "GCS_RETRY_CONFIG_MAX_RETRIES": "16",
    # It would remember for five seconds that a folder exists, also one that is removed: Orbax then fails to make it.
    "GCS_STAT_CACHE_MAX_AGE": "0",
    # TensorStore tries 32 times, but waits without an end for an answer: github.com/google/tensorstore/issues/291.
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def set_library_options() -> None:
    """Sets how TensorFlow and TensorStore use Cloud Storage; before they are imported."""
    for name, value in _OPTIONS.items():
        os.environ.setdefault(name, value)


def split(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Bucket and name.

    >>> split("gs://bucket/a/b/")
    ('bucket', 'a/b')
    """
    bucket, _, name = os.fspath(path).removeprefix("gs://").partition("/")
    return bucket, name.strip("/")


def check(path: str, setting: str, *, writes: bool = True, public: bool = False) -> None:
    """Raises `ConfigError` if a folder in Cloud Storage cannot be used, and `UnreachableError` if that cannot be found out.

    Nothing is left behind. Paths elsewhere are not looked at.

    Args:
      path: the folder; it need not exist.
      setting: what a user wrote to name it, such as "MODEL_DIR"; for the message.
      writes: whether it will be written, too; then an object is really made there, and removed.
      public: whether it may be anybody's, to read; that needs no credentials.
    """
    files.check_path(path, setting)
    if not os.fspath(path).startswith("gs://"):
        return
    setting = f"{setting} = {os.fspath(path)!r}"
    extras.require("gcs", setting)
    bucket_name, folder = split(path)
    with _explained(setting, bucket_name):
        bucket = client(public).bucket(bucket_name)
        options = request_options()
        roles = _ROLES if writes else _READ_ROLES
        granted = bucket.test_iam_permissions(list(roles), **options) if has_credentials() else roles
        missing = {permission: role for permission, role in roles.items() if permission not in granted}
        try:
            if writes:
                if "storage.buckets.get" in missing:  # of a bucket: no folder's policy can grant it
                    raise _denied(setting, bucket_name, missing)
                bucket.reload(**options)
                _check_kind(setting, bucket)
                _try(bucket, folder, options)
            else:
                next(iter(bucket.list_blobs(prefix=f"{folder}/" if folder else None, max_results=1, **options)), None)
        except _forbidden() as e:
            if not has_credentials():
                raise
            named = {permission: role for permission, role in roles.items() if permission in str(e)}
            raise _denied(setting, bucket_name, missing or named or roles, first_line(e)) from e


def _try(bucket: Any, folder: str, options: dict[str, Any]) -> None:
    """Makes an object, reads it, sees it in the list, and removes it."""
    name = f"{folder}/.access_{uuid.uuid4().hex}".lstrip("/")
    blob = bucket.blob(name)
    blob.upload_from_string(b"", if_generation_match=0, **options)
    blob.download_as_bytes(**options)
    list(bucket.list_blobs(prefix=name, **options))
    blob.delete(**options)


def _check_kind(setting: str, bucket: Any) -> None:
    if bucket.hierarchical_namespace_enabled and not extras.is_installed("google.cloud.storage_control_v2"):
        raise extras.MissingExtraError(
            f"{setting}: gs://{bucket.name} has a hierarchical namespace, where old checkpoints are removed with a further "
            "client: pip install 'perex_t5x[gcs_hns]' (missing: google-cloud-storage-control), or use a bucket without one."
        )


@functools.cache
def client(public: bool = False) -> Any:
    """The client of Cloud Storage. Without credentials: one for `public` data, such as T5X's checkpoints, else an error."""
    from google.cloud import storage

    if has_credentials():
        return storage.Client()
    if not public:
        raise ConfigError(f"gs:// needs credentials, and there are none: {_NO_CREDENTIALS}")
    from absl import logging

    os.environ.setdefault("NO_GCE_CHECK", "true")  # TensorFlow would look for a metadata server, again and again
    logging.info("gs:// is read without credentials, as public data.")
    return storage.Client.create_anonymous_client()


def has_credentials() -> bool:
    """Whether there may be some. The libraries' own search waits for a metadata server, on a laptop for minutes."""
    if os.environ.get("STORAGE_EMULATOR_HOST") or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return True
    folder = os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud"
    return (Path(folder) / _WELL_KNOWN).exists() or _on_google_cloud(
        os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    )


@functools.cache
def _on_google_cloud(metadata_host: str) -> bool:
    with contextlib.suppress(OSError):
        if Path("/sys/class/dmi/id/product_name").read_text().startswith("Google"):
            return True
    request = urllib.request.Request(f"http://{metadata_host}/", headers={"Metadata-Flavor": "Google"})
    with contextlib.suppress(OSError):
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2) as answer:
            return answer.headers.get("Metadata-Flavor") == "Google"
    return False


def request_options() -> dict[str, Any]:
    """Of every request of `client`: its time-out, and how long it is tried again."""
    from google.cloud.storage import retry

    return {"timeout": SECONDS, "retry": retry.DEFAULT_RETRY.with_timeout(3 * SECONDS)}


def copy_folder(source: str, target: str, leave_out: str) -> None:
    """Copies a folder's objects to another, in place of what is there; without names in it that match `leave_out`."""
    (from_bucket, prefix), (to_bucket, to_prefix) = split(source), split(target)
    here, there = client().bucket(from_bucket), client().bucket(to_bucket)
    options = request_options()
    for old in list(there.list_blobs(prefix=f"{to_prefix}/", **options)):
        old.delete(**options)
    for blob in list(here.list_blobs(prefix=f"{prefix}/", **options)):
        name = blob.name.removeprefix(f"{prefix}/")
        if not re.match(leave_out, name):
            here.copy_blob(blob, there, f"{to_prefix}/{name}", **options)


def _forbidden() -> Any:
    from google.api_core import exceptions

    return exceptions.Forbidden


@contextlib.contextmanager
def _explained(setting: str, bucket: str) -> Iterator[None]:
    """Errors of the client library, as ours: what to do about it, or that the same may work later."""
    from google.api_core import exceptions
    from google.auth import exceptions as auth

    login = "Run `gcloud auth application-default login`, or attach a service account with the scope cloud-platform."
    try:
        yield
    except exceptions.NotFound as e:
        raise ConfigError(
            f"{setting}: there is no bucket gs://{bucket}. Make it near the machines: gcloud storage buckets create "
            f"gs://{bucket} --location=REGION --uniform-bucket-level-access"
        ) from e
    except (exceptions.Unauthorized, exceptions.Forbidden) as e:
        if not has_credentials():
            raise ConfigError(f"{setting}: it is not public, and there are no credentials: {_NO_CREDENTIALS}") from e
        said = "the credentials are not accepted" if isinstance(e, exceptions.Unauthorized) else "Cloud Storage refuses"
        raise ConfigError(f"{setting}: {said}: {first_line(e)}. {login}") from e
    except (auth.RefreshError, auth.DefaultCredentialsError) as e:
        raise ConfigError(f"{setting}: the credentials are not accepted: {first_line(e)}. {login}") from e
    except exceptions.ClientError as e:
        if isinstance(e, exceptions.TooManyRequests):
            raise _unreachable(setting, e) from e
        raise ConfigError(f"{setting}: Cloud Storage refuses: {first_line(e)}") from e
    except (exceptions.GoogleAPIError, auth.TransportError, OSError) as e:  # requests' errors are OSErrors
        raise _unreachable(setting, e) from e


def _unreachable(setting: str, error: Exception) -> UnreachableError:
    return UnreachableError(
        f"{setting}: Cloud Storage did not answer within {3 * SECONDS:.0f} s: {first_line(error)}. Nothing was begun; the "
        "same command may work later. Is there a way to storage.googleapis.com (network, proxy, Private Google Access)?"
    )


def _denied(setting: str, bucket: str, missing: Mapping[str, str], reason: str = "") -> ConfigError:
    account = getattr(getattr(client(), "_credentials", None), "service_account_email", "") or ""
    member = f"serviceAccount:{account if '@' in account else 'SERVICE_ACCOUNT_OF_THE_HOSTS'}"
    grants = "".join(
        f"\n  gcloud storage buckets add-iam-policy-binding gs://{bucket} --member={member} --role={role}"
        for role in dict.fromkeys(missing.values())
    )
    return ConfigError(
        f"{setting}: this process lacks {', '.join(missing)} on gs://{bucket}{f' ({reason})' if reason else ''}. Grant it "
        f"(to a person with --member=user:EMAIL):{grants}"
    )
