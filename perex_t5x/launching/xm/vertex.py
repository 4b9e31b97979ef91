"""--executor=vertex: every run a custom job of Vertex AI on a TPU v2-8 or v3-8, the ones that XManager's executor knows."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.launching import bundle, checks, image, names, spec
from perex_t5x.launching.shell import Commands
from perex_t5x.launching.xm import custom_jobs, experiment, handover
from perex_t5x.launching.xm.custom_jobs import CORES, REGION

_KNOWN = {"v2-8": "tpu_v2", "v3-8": "tpu_v3"}


def launch(args: Any) -> int:
    """Checks, builds the image if none is given, asks, and creates a job for every run; does not wait for them."""
    if args.topology:
        kind_of(args.topology, args)
    work = spec.make(args)
    kind = kind_of(args.topology or work.topology, args)
    name = names.check_name(args.name or names.suggestion(work.name) or work.name)
    _check_work(args, work)
    modules = experiment.modules()
    commands = Commands(args.dry_run)
    # As the checks of all launchers want it; the slices that they know begin with v4.
    asked = SimpleNamespace(
        work=work,
        slice=SimpleNamespace(chips=CORES),
        slices=1,
        with_package=args.with_package,
        project=args.project,
        zone=f"{REGION}-a",
    )
    checks.check_gin(asked, commands)
    if args.project:
        checks.bucket(asked, commands)
    used, build = _image(args, name, work, commands)
    made = custom_jobs.make(modules, work, used, kind)
    checks.confirm(_summary(args, name, work, used), args)
    build()
    if args.dry_run:
        for job in made:
            print(f"a custom job: {job.name}, {job.executor.requirements}", file=sys.stderr)
        return 0
    return custom_jobs.create(modules[1], f"{name} {work.root}"[:255], work.root, made, commands, args.project)


def kind_of(topology: str | None, args: Any) -> str:
    """XManager's name of the chip; for others the way out."""
    if topology is None:
        raise ConfigError("on which TPU? Vertex through XManager has --topology=v2-8 and --topology=v3-8.")
    if topology in _KNOWN:
        return _KNOWN[topology]
    if re.match(r"v[23]\b", topology):
        raise ConfigError(f"--topology={topology}: of v2 and v3, one host is supported: v2-8 or v3-8.")
    raise ConfigError(
        f"--topology={topology}: XManager 0.8.5's Vertex executor knows TPU v2-8 and v3-8 alone. The same on {topology}, "
        f"as TPU VMs or on a GKE cluster:\n{handover.other_ways(args)}"
    )


def _check_work(args: Any, work: spec.Work) -> None:
    flag = "--dir" if work.sweep else "--gin.MODEL_DIR"
    for path in {work.root, *(job.model_dir for job in work.jobs)}:
        names.check_bucket_path(path, flag)
    if args.project:
        names.check_project(args.project)
    for job in work.jobs:
        if found := next((a for a in job.arguments if "$(" in a), None):
            raise ConfigError(f"{found!r}: Vertex AI would replace $(...) in it by a variable of the container.")
    if args.image and work.gin_files:
        raise ConfigError(
            f"--image: it does not hold your own Gin files, {', '.join(work.gin_files)}. Give --repository instead: the "
            "image that is built then does."
        )
    for name in ("spot", "reservation", "slices", "zone"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is not for --executor=vertex: XManager asks for one TPU a run, in {REGION}.")


def _image(args: Any, name: str, work: spec.Work, commands: Commands) -> tuple[str, Callable[[], Any]]:
    """Its name, and what makes it once that is confirmed."""
    if args.image:
        return image.check_image(args.image), lambda: None
    if not args.repository:
        raise ConfigError(
            "--image=HOST/PROJECT/REPOSITORY/NAME:TAG is not given; nor is --repository, where one of this checkout would "
            "be put (./launch/build_image.py does it by itself)."
        )
    repository = image.check_repository(args.repository)
    files = bundle.checkout(args.allow_uncommitted)
    # The Gin files that travel along are part of it.
    tag = f"{files.commit}-{work.fingerprint}" if work.gin_files else files.commit

    def build() -> None:
        target = bundle.folder(f"image-{name}-{files.commit}")
        with bundle.alone(target, args.dry_run):
            folder = image.context(target, files, commands, args.with_package, args.allow_uncommitted, work.gin_files)
            image.build(folder, f"{repository}:{tag}", files, commands)

    return f"{repository}:{tag}", build


def _summary(args: Any, name: str, work: spec.Work, used: str) -> str:
    runs = f"{len(work.jobs)} runs, all at once, each on one" if len(work.jobs) > 1 else "one run on one"
    topology = args.topology or work.topology
    return "\n".join(
        [
            "",
            f"name      {name}",
            f"runs      {runs} TPU {topology}, into {work.root}",
            f"where     Vertex AI, {REGION}, project {args.project or '(that of your credentials)'}",
            f"image     {used}",
            "cost      not known here: there is no preflight for v2 and v3; see https://cloud.google.com/vertex-ai/pricing",
            "",
        ]
    )
