"""The flags of launch/gke.py alone, and the JobSets that they and the request describe."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from perex_t5x.errors import ConfigError
from perex_t5x.launching import gin_files
from perex_t5x.launching.gke import files, manifest
from perex_t5x.launching.gke.shape import Shape
from perex_t5x.launching.request import Request

JOBS_FILE = "jobs.json"
# The folder of jobs.json is mounted for reading only.
COMMAND = (
    "python",
    "-m",
    "perex_t5x.launching.worker",
    f"--jobs={files.MOUNTED_AT}/{JOBS_FILE}",
    "--log_dir=/tmp/perex-logs",
    "--lock=/tmp/perex-worker.lock",
)


def define_flags() -> None:
    """On top of `request.define_flags`."""
    flags.DEFINE_string("image", None, "The container, such as europe-docker.pkg.dev/PROJECT/perex/perex:TAG.")
    flags.DEFINE_integer("jobsets", 1, "Share the runs of a sweep out over so many JobSets, which run side by side.")
    flags.DEFINE_string("context", None, "kubectl's context; default: the current one.")
    flags.DEFINE_string("namespace", "default", "The cluster's namespace.")
    flags.DEFINE_string("queue", None, "Kueue's LocalQueue; on clusters made by xpk: multislice-queue.")
    flags.DEFINE_string("priority", None, "PriorityClass of the pods; on clusters made by xpk: very-low to very-high.")
    flags.DEFINE_string("service_account", None, "Kubernetes service account that may write to the bucket.")
    flags.DEFINE_integer(
        "chips_per_host", None, "Where the node pool is made of other machines than usual, such as v5e-8 of two hosts."
    )
    flags.DEFINE_integer("grace_seconds", 600, "How long a run has to save when it is stopped.")
    flags.DEFINE_float("ttl_hours", 72, "A finished JobSet is deleted after so long, and with it the pods' logs.")
    flags.DEFINE_bool(
        "host_network", False, "Pods on the nodes' own network: faster between slices, without Workload Identity."
    )
    flags.DEFINE_bool(
        "privileged", True, "Privileged containers, as xpk's; --noprivileged where the cluster forbids them."
    )
    flags.DEFINE_string("out", None, "For `manifest` the file, default stdout; for `collect` the folder.")
    flags.DEFINE_bool("all", False, "For `stop`: every launch of the namespace.")
    flags.DEFINE_float("poll_seconds", 10, "For following: how often the cluster is asked.")


@dataclass(frozen=True)
class Planned:
    """One JobSet that is to be created, and the files of its ConfigMap."""

    shape: Shape
    files: Mapping[str, str]

    def jobset(self) -> dict[str, Any]:
        return manifest.jobset(self.shape, COMMAND, list(self.files))

    def config_map(self, owner: str | None = None) -> dict[str, Any]:
        shape = self.shape
        return files.config_map(shape.name, shape.launch, shape.namespace, manifest.labels(shape), self.files, owner)


def planned(request: Request, args: Any) -> list[Planned]:
    """All JobSets of a launch; raises `ConfigError` for what no cluster would take."""
    work, slice_ = request.work, request.slice
    if not args.image:
        raise ConfigError(
            "--image is not given: the container that the pods run. How to build one of this checkout: docs/launch_gke.md."
        )
    if request.with_package:
        raise ConfigError("--with_package: pods install nothing; build your packages into the --image.")
    count = args.jobsets
    if not 1 <= count <= len(work.jobs):
        raise ConfigError(f"--jobsets={count}: from 1 to {len(work.jobs)}, the number of runs.")
    chips_per_host = args.chips_per_host or slice_.chips_per_host
    if chips_per_host < 1 or slice_.chips % chips_per_host:
        raise ConfigError(f"--chips_per_host={chips_per_host}: {slice_.topology} has {slice_.chips} chips.")
    if not math.isfinite(args.ttl_hours):
        raise ConfigError(f"--ttl_hours={args.ttl_hours}: a number of hours.")
    launch = secrets.token_hex(4)
    gin = {f"{gin_files.FOLDER}/{name}": _text(path) for name, path in work.gin_files.items()}
    found = []
    for number in range(count):
        part = dataclasses.replace(work, jobs=work.jobs[number::count])
        shape = Shape(
            name=request.name if count == 1 else f"{request.name}-{number}",
            group=request.name,
            run=work.fingerprint,
            launch=launch,
            image=args.image,
            accelerator=slice_.gke_accelerator,
            topology=slice_.gke_topology,
            hosts=slice_.chips // chips_per_host,
            chips_per_host=chips_per_host,
            slices=request.slices,
            namespace=args.namespace,
            queue=args.queue,
            priority=args.priority,
            service_account=args.service_account,
            spot=request.spot,
            reservation=request.reservation,
            max_restarts=request.max_restarts,
            grace_seconds=args.grace_seconds,
            ttl_seconds=round(args.ttl_hours * 3600),
            host_network=args.host_network,
            privileged=args.privileged,
        )
        found.append(Planned(shape, {JOBS_FILE: part.to_json(), **gin}))
        found[-1].config_map()  # too large? before anything is created
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the Gin file {path} cannot be read: {e}") from e
