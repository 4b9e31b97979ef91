"""The files of a launch in a ConfigMap: what to run, and the user's own Gin files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from perex_t5x.errors import ConfigError

MOUNTED_AT = "/etc/perex"
MOST_BYTES = 1 << 20  # Kubernetes refuses more in one ConfigMap


def config_map_name(jobset: str, launch: str) -> str:
    """Of one launch alone: what an earlier one of the same name has left must neither stand in the way nor be mounted.

    >>> config_map_name("sqrt-lr", "00c0ffee")
    'sqrt-lr-00c0ffee'
    """
    return f"{jobset}-{launch}"


def config_map(
    jobset: str,
    launch: str,
    namespace: str,
    labels: Mapping[str, str],
    files: Mapping[str, str],
    owner: str | None = None,
) -> dict[str, Any]:
    """The ConfigMap that holds `files` (path -> text) for a JobSet.

    Keys may not hold a slash, so they are numbered, and `mounted_items` puts each where it belongs.

    Args:
      jobset: name of the JobSet.
      launch: the launch that makes both.
      namespace: its namespace.
      labels: the JobSet's own.
      files: path under `MOUNTED_AT` -> text.
      owner: uid of the JobSet, with which the ConfigMap is deleted; None in a manifest that is written out.
    """
    for path in files:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ConfigError(
                f"the file {path!r} cannot travel to the cluster: a path below the working directory can."
            )
    size = sum(len(text.encode()) for text in files.values())
    if size > MOST_BYTES - 16 * 1024:  # the rest for keys, labels and the JSON around them
        largest = ", ".join(sorted(files, key=lambda path: -len(files[path]))[:3])
        raise ConfigError(
            f"the runs' descriptions and Gin files come to {size:,} bytes; Kubernetes takes {MOST_BYTES:,} in one "
            f"ConfigMap. The largest: {largest}. Share the runs out with a larger --jobsets, launch a part of them with "
            "--only=..., or build your Gin files into the image."
        )
    name = config_map_name(jobset, launch)
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "labels": dict(labels)}
    if owner:
        metadata["ownerReferences"] = [
            {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": jobset, "uid": owner}
        ]
    data = {_key(number): files[path] for number, path in enumerate(files)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "data": data}


def mounted_items(paths: Sequence[str]) -> list[dict[str, str]]:
    """Which key of the ConfigMap becomes which file.

    >>> mounted_items(["jobs.json", "gin/runs/mine.gin"])
    [{'key': 'file-0', 'path': 'jobs.json'}, {'key': 'file-1', 'path': 'gin/runs/mine.gin'}]
    """
    return [{"key": _key(number), "path": path} for number, path in enumerate(paths)]


def _key(number: int) -> str:
    return f"file-{number}"
