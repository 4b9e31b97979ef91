"""What the cloud says when it refuses, and what to do about it."""

from __future__ import annotations

import re

_STOCKOUT = (
    "no more capacity|Insufficient (reserved )?capacity|does not have enough resources|STOCKOUT|ZONE_RESOURCE_POOL"
)
_KNOWN = (
    (
        r"[Qq]uota .*(exceeded|exhausted)|exceeded quota|QUOTA_EXCEEDED|[Qq]uota limit",
        "the project's quota is too small for these slices (or other queued resources, also suspended and failed ones, use "
        "it up: launch/gcloud_tpu.py list). Ask for more at https://console.cloud.google.com/iam-admin/quotas, service "
        "tpu.googleapis.com, in this zone; spot and on-demand slices have quotas of their own. Or take a smaller "
        "--topology.",
    ),
    (
        _STOCKOUT,
        "the zone has no such slices free. Try again later, with --spot, in another --zone, or with a smaller --topology.",
    ),
    (
        r"has not been used in project|SERVICE_DISABLED|it is disabled|API \[tpu",
        "the Cloud TPU API is not enabled: gcloud services enable tpu.googleapis.com --project=PROJECT",
    ),
    (
        r"PERMISSION_DENIED|does not have permission|[Pp]ermission .*denied|403",
        "this account may not do that: it needs the roles roles/tpu.admin, roles/iam.serviceAccountUser and "
        "roles/storage.admin in the project, see docs/launch.md.",
    ),
    (
        r"Network is unreachable|Failed to resolve|Name or service not known|Max retries exceeded|name resolution",
        "this machine has no way to the cloud: is its network there?",
    ),
    (
        r"There was a problem refreshing your current auth tokens|do not currently have an active account|gcloud auth login",
        "this machine is not logged in: gcloud auth login",
    ),
    (r"RESOURCE_EXHAUSTED", "quota or capacity are used up: see docs/launch.md, usual failures."),
)


def explained(said: str) -> str:
    """What to do, for words that are known; else ''.

    >>> explained("Quota 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' exhausted. Limit 16 in zone us-west4-a")[:42]
    "the project's quota is too small for these"
    """
    return next((words for pattern, words in _KNOWN if re.search(pattern, said)), "")


def is_stockout(said: str) -> bool:
    return re.search(_STOCKOUT, said) is not None


def message(begin: str, said: str) -> str:
    """A beginning, the cloud's own words, and what to do."""
    what_to_do = explained(said)
    return f"{begin}:\n{said}" + (f"\n{what_to_do[0].upper()}{what_to_do[1:]}" if what_to_do else "")
