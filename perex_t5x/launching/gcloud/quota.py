"""The project's quota of chips in a zone, if gcloud can read it: a note before anything is requested.

The numbers come from the Cloud Quotas API, which has to be enabled; gcloud needs its beta commands. They do not include what
is in use, so a quota that is large enough is no guarantee; the cloud decides when the slices are requested.
"""

from __future__ import annotations

import json
from typing import Any

from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands, say


def look(request: Request, commands: Commands) -> None:
    """Prints a note if the quota is too small or cannot be read. Reserved slices do not count against it."""
    if request.reservation or request.reserved:
        return
    name = request.slice.quota_id(request.spot)
    if name is None:
        return
    argv = ["gcloud", "beta", "quotas", "info", "describe", name, "--service=tpu.googleapis.com"]
    done = commands.run([*argv, f"--project={request.project}", "--format=json", "--quiet"], check=False, timeout=60)
    if commands.dry_run:
        return
    if done.returncode != 0:
        reason = done.said.strip().splitlines()[-1].strip()
        say(
            f"note: the quota {name} cannot be read ({reason}); whether it is sufficient shows when the slices are created."
        )
        return
    limit, wanted = limit_in(json.loads(done.stdout), request.zone), request.slice.chips * request.slices
    if limit is not None and 0 <= limit < wanted:
        say(
            f"note: the quota {name} is {limit} in {request.zone}, and {wanted} chips would be requested. Request more at "
            "https://console.cloud.google.com/iam-admin/quotas, service tpu.googleapis.com"
        )


def limit_in(info: dict[str, Any], zone: str) -> int | None:
    """The limit for a zone; one for this zone alone precedes one for several.

    >>> many = {"applicableLocations": ["a", "b"], "details": {"value": "8"}}
    >>> one = {"applicableLocations": ["a"], "dimensions": {"zone": "a"}, "details": {"value": "16"}}
    >>> [limit_in({"dimensionsInfos": [many, one]}, zone) for zone in ("a", "b", "c")]
    [16, 8, None]
    """
    infos = [i for i in info.get("dimensionsInfos", []) if zone in i.get("applicableLocations", [])]
    infos.sort(key=lambda info: info.get("dimensions", {}).get("zone") != zone)
    values = [info["details"]["value"] for info in infos if "value" in info.get("details", {})]
    return int(values[0]) if values else None
