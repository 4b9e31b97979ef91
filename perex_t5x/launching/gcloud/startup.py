"""The start-up script of a detached launch: settings, then startup.sh. The hosts need nothing else, and no launcher.

    ROOT/.launch/NAME/detached.json          how far the launch is, see `gcloud.detached`
    ROOT/.launch/NAME/ended/ID.ATTEMPT.HOST  every host whose work has ended, once its logs are stored

The queued resource of attempt 0 has the launch's name; spot slices that are preempted are replaced by NAME-r1, NAME-r2, ...
All are created with this same script, which finds its attempt in the metadata of its host.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib import resources

from perex_t5x.errors import ConfigError
from perex_t5x.launching.gcloud import remote
from perex_t5x.launching.gcloud.resource import LABEL_ATTEMPT, METADATA_ATTEMPT, METADATA_ROOT, Resource
from perex_t5x.launching.gcloud.steps import Bundle
from perex_t5x.launching.request import Request

_MOST_BYTES = 256 * 1024  # of a value of metadata
_NAME, _ATTEMPT = "PEREX@NAME@", "PEREX@ATTEMPT@"


def resource_name(launch: str, attempt: int) -> str:
    """
    >>> resource_name("a", 0), resource_name("a", 2)
    ('a', 'a-r2')
    """
    return f"{launch}-r{attempt}" if attempt else launch


def create(target: Resource, request: Request, commit: str, more: Sequence[str], attempt: str, files: str) -> list[str]:
    """The command that requests a detached launch's queued resource, with the scripts in the folder `files`."""
    values = {METADATA_ATTEMPT: attempt, METADATA_ROOT: request.work.root}
    scripts = {"startup-script": f"{files}startup.sh", "shutdown-script": f"{files}shutdown.sh"}
    metadata = [
        # Another delimiter than the comma, which paths may have.
        "--metadata=^;^" + ";".join(f"{key}={value}" for key, value in values.items()),
        "--metadata-from-file=^;^" + ";".join(f"{key}={value}" for key, value in scripts.items()),
    ]
    return target.create(request, commit, [*metadata, *more], {LABEL_ATTEMPT: attempt})


def shutdown_script(launch: str) -> str:
    home = '$(getent passwd "$(id -u)" | cut -d: -f6)'
    return f'#!/bin/bash\nexec bash "{home}"/perex/{shlex.quote(launch)}/startup.sh shutdown\n'


def script(
    request: Request,
    target: Resource,
    bundle: Bundle,
    commit: str,
    python: str | None = None,
    more: Sequence[str] = (),
) -> str:
    """The start-up script. It contains names of secrets, and no value of one.

    Raises:
      ConfigError: it is longer than the cloud accepts.
    """
    secrets = remote.parse_secrets(request.secrets, target.project)
    settings = {
        "name": request.name,
        "launch_id": request.work.launch_id,
        "url": bundle.folder,
        "project": target.project,
        "zone": target.zone,
        "slices": target.slices,
        "hosts": target.slices * request.slice.hosts,
        "max_restarts": request.max_restarts,
        "keep": int(request.keep),
        "copy": remote.copy(request.name, bundle.url, bundle.sha256),
        "install": remote.install(request.name, python),
        "worker": remote.worker(secrets),
        "shutdown_script": shutdown_script(request.name),
    }
    successor = create(target.renamed(_NAME), request, commit, [*more, "--async"], _ATTEMPT, "")
    text = "\n".join(
        [
            "#!/bin/bash",
            f"# Start-up script of the launch {request.name}, commit {commit}; see docs/launch.md of perex_t5x.",
            *(f"{key}={shlex.quote(str(value))}" for key, value in settings.items()),
            f"create() {{ # RESOURCE ATTEMPT\n  {' '.join(map(_quoted, successor))}\n}}",
            resources.files("perex_t5x.launching.gcloud").joinpath("startup.sh").read_text(encoding="utf-8"),
        ]
    )
    if len(text.encode()) > _MOST_BYTES:
        raise ConfigError(
            f"the start-up script has {len(text.encode()):,} bytes, and the cloud accepts {_MOST_BYTES:,}."
        )
    return text


def _quoted(word: str) -> str:
    """A word of the command for bash, with the function's arguments in the place of the two names."""
    quoted = "'" + word.replace("'", "'\\''") + "'"
    return quoted.replace(_NAME, "'\"$1\"'").replace(_ATTEMPT, "'\"$2\"'")
