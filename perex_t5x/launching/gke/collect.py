"""`collect`: downloads metrics, logs and results from the bucket, for reports."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from perex_t5x.errors import ConfigError
from perex_t5x.launching import collect as bucket_files
from perex_t5x.launching.gke.cluster import Cluster
from perex_t5x.launching.gke.create import JOBS_FILE
from perex_t5x.launching.gke.manifest import LAUNCH_LABEL, NAME_LABEL
from perex_t5x.launching.shell import Commands
from perex_t5x.launching.spec import Work


def work_of(cluster: Cluster, group: str) -> Work:
    """What a launch runs, read from its ConfigMaps, which exist as long as its JobSets."""
    maps = cluster.get("configmaps", f"{NAME_LABEL}={group}")
    if not maps:
        raise ConfigError(
            f"there is no launch {group} on the cluster (any more). Its results are in the bucket: give `collect` the flags "
            "of the launch, including --sweep or --gin_file."
        )
    # A ConfigMap that no JobSet owns (it was created from a manifest) may be left from an earlier launch.
    newest = max(maps, key=lambda one: one["metadata"].get("creationTimestamp", ""))
    launch = newest["metadata"]["labels"].get(LAUNCH_LABEL)
    maps = [one for one in maps if one["metadata"]["labels"].get(LAUNCH_LABEL) == launch]
    return joined([Work.from_json(one["data"]["file-0"]) for one in maps])


def joined(parts: Sequence[Work]) -> Work:
    """The work of several JobSets."""
    return dataclasses.replace(parts[0], jobs=tuple(job for part in parts for job in part.jobs))


def collect(work: Work, name: str, out: str, commands: Commands) -> None:
    """Downloads all but checkpoints to `out`; for a sweep also writes what `perex_t5x.experiments.report` reads."""
    if not commands.dry_run:
        kept = os.path.join(out, ".launch", name)
        os.makedirs(kept, exist_ok=True)
        with open(os.path.join(kept, JOBS_FILE), "w", encoding="utf-8") as f:
            f.write(work.to_json())
    bucket_files.collect(work.root, name, out, commands)
