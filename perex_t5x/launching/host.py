"""Which host of a launch this is: the first one writes what all would write alike."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping

from perex_t5x.errors import ConfigError

INDEX = "PEREX_T5X_HOST"  # says it outright
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


def index(environ: Mapping[str, str] = os.environ) -> int:
    """0 for the first host of the first slice, and where there is one host; else larger.

    From the environment (`PEREX_T5X_HOST`, or what GKE sets), then from a TPU VM's metadata.

    >>> index({"TPU_WORKER_ID": "0", "MEGASCALE_SLICE_ID": "2"}) > 0, index({"PEREX_T5X_HOST": "0"})
    (True, 0)
    """
    if environ.get(INDEX):
        return _number(INDEX, environ[INDEX])
    if environ.get("TPU_WORKER_ID"):
        return _number("TPU_WORKER_ID", environ["TPU_WORKER_ID"]) + _slice(environ.get("MEGASCALE_SLICE_ID"))
    if not os.path.exists("/dev/accel0") and not os.path.exists("/dev/vfio/0"):
        return 0  # no TPU here: nobody to ask
    worker = _metadata("agent-worker-number")
    found = re.search(r"^MEGASCALE_SLICE_ID:\s*'?(\d+)", _metadata("tpu-env") or "", re.MULTILINE)
    return _number("agent-worker-number", worker or "0") + _slice(found and found[1])


def _slice(text: str | None) -> int:
    return 1_000_000 * _number("MEGASCALE_SLICE_ID", text) if text else 0


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} is not a number.")
    return int(text)


def _metadata(key: str) -> str | None:
    request = urllib.request.Request(_METADATA + key, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode().strip()
    except (urllib.error.URLError, OSError):
        return None
