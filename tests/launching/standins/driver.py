"""Launches what $STANDIN_DIR/work.json describes, without Gin files and without building a wheel."""

import dataclasses
import json
import os
import sys
import time

from perex_t5x import cli
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import bundle, checks
from perex_t5x.launching.gcloud import command, session
from perex_t5x.launching.gcloud.resource import Resource
from perex_t5x.launching.gcloud.session import Options
from perex_t5x.launching.gcloud.steps import Steps
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands
from perex_t5x.launching.spec import Job, Work


def copy_source(files, target, source, commands):
    if not commands.dry_run:
        os.makedirs(f"{source}/launch")
        for name in ("constraints.txt", *bundle.REQUIREMENTS):
            open(f"{source}/{name}", "w").close()


def main():
    given = json.load(open(f"{os.environ['STANDIN_DIR']}/work.json"))
    bundle._copy_source = copy_source
    local = f"{os.environ['STANDIN_DIR']}/bucket/"  # what gs:// is on the hosts
    to_json = Work.to_json
    Work.to_json = lambda self, indent=1: to_json(
        dataclasses.replace(self, root=self.root.replace("gs://", local)), indent
    )
    bundle._wheel = lambda source, target, commands: None
    bundle.checkout = lambda allow=False, root=None: bundle.Checkout("/checkout", "0123456789ab")
    session._MOST_CHECKS = 3
    checks.check_gin = lambda request, commands, checklist=None: None
    jobs = tuple(Job(**{**job, "arguments": tuple(job["arguments"])}) for job in given["jobs"])
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    request = Request(
        name=options.get("name", "run"),
        work=Work(
            "run",
            given["root"],
            jobs,
            given.get("sweep"),
            given.get("twins", {}),
            secrets=tuple(options.get("secrets", {})),
            launch=options.get("name", "run"),
            launch_id=f"id{time.time_ns()}",
        ),
        slice=Slice.of("v5e-16"),
        slices=options.get("slices", 1),
        project="my-project",
        zone="us-west4-a",
        spot=options.get("spot", False),
        reservation=None,
        skip_preflight=True,
        yes=options.get("yes", True),
        keep=options.get("keep", False),
        allow_uncommitted=False,
        max_restarts=options.get("max_restarts", 10),
        with_package=(),
        dry_run=options.get("dry_run", False),
        secrets=options.get("secrets", {}),
    )
    todo = Steps(
        Resource(request.name, request.project, request.zone, request.slices), Commands(dry_run=request.dry_run)
    )
    out = Options(
        f"{os.environ['STANDIN_DIR']}/out", options.get("wait_hours", 1.0), detach=options.get("detach", False)
    )
    sys.exit(cli.guarded(lambda: command._launch(request, todo, out), (OSError,)))


if __name__ == "__main__":
    main()
