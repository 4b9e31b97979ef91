"""Threads enough for fake CPU devices.

XLA runs each device's part of a program in a thread of one pool, and the parts wait for each other in collectives. The pool
has as many threads as the machine has cores, or as there are devices if these are more: then a single thread that does
anything else keeps the last device away, and after 40 seconds XLA ends the process ("only 7 of them arrived on time").
Seen with 8 devices on 2 cores and 8 or 9 threads; not with 16.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def reserve_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks for two threads a device, where the environment asks for several devices. Before JAX uses the first.

    >>> environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=512"}
    >>> reserve_threads(environment)
    >>> environment["PJRT_NPROC"]
    '1024'
    """
    found = _COUNT.findall(environment.get("XLA_FLAGS", "")) or [environment.get("JAX_NUM_CPU_DEVICES", "")]
    devices = int(found[-1]) if found[-1].isdigit() else 1
    if devices > 1:
        environment.setdefault("PJRT_NPROC", str(max(2 * devices, os.cpu_count() or 1)))
