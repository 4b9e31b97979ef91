"""How many chips the project may have in a zone, where gcloud can tell: a note before anything is asked for.

The numbers are those of the Cloud Quotas API, which has to be enabled; gcloud needs its beta commands. What is in use is
not in them, so a quota that is large enough promises nothing, and whether it is refused is the cloud's to say.
"""

from __future__ import annotations

import json
from typing import Any

from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands, say


def look(request: Request, commands: Commands) -> None:
    """Says where the quota is too small, and where it cannot be looked at. Reserved slices are not counted in it."""
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
        say(f"note: the quota {name} cannot be looked at ({reason}); whether it is enough is seen when creating.")
        return
    limit, wanted = limit_in(json.loads(done.stdout), request.zone), request.slice.chips * request.slices
    if limit is not None and 0 <= limit < wanted:
        say(
            f"note: the quota {name} is {limit} in {request.zone}, and {wanted} chips would be asked for. More: "
            "https://console.cloud.google.com/iam-admin/quotas, service tpu.googleapis.com"
        )


def limit_in(found: dict[str, Any], zone: str) -> int | None:
    """The limit that holds for a zone; that of the zone by name comes before one for many.

    >>> many = {"applicableLocations": ["a", "b"], "details": {"value": "8"}}
    >>> one = {"applicableLocations": ["a"], "dimensions": {"zone": "a"}, "details": {"value": "16"}}
    >>> [limit_in({"dimensionsInfos": [many, one]}, zone) for zone in ("a", "b", "c")]
    [16, 8, None]
    """
    infos = [i for i in found.get("dimensionsInfos", []) if zone in i.get("applicableLocations", [])]
    infos.sort(key=lambda info: info.get("dimensions", {}).get("zone") != zone)
    values = [info["details"]["value"] for info in infos if "value" in info.get("details", {})]
    return int(values[0]) if values else None
