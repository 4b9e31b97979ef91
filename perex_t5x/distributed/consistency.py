"""Finds a process that was started with something else than the others, before anything is compiled."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from perex_t5x.errors import ConfigError

_MOST = 8  # differences that a message names


def configuration_items() -> dict[str, str]:
    """Every binding of the parsed Gin configuration, as text."""
    import gin
    from gin import config_parser

    from perex_t5x import gin_utils

    items = {}
    text = gin.config_str(max_line_length=120)
    for statement in config_parser.ConfigParser(text, gin_utils.BindingNames()):
        if isinstance(statement, config_parser.BindingStatement):
            scope = f"{statement.scope}/" if statement.scope else ""
            argument = f".{statement.arg_name}" if statement.arg_name else ""
            items[f"{scope}{statement.selector}{argument}"] = repr(statement.value)
    return items


def software_items() -> dict[str, str]:
    """Versions, the package's own files, and the settings of JAX that change numbers."""
    import jaxlib

    import perex_t5x

    settings = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
    return {
        "version of perex_t5x": perex_t5x.__version__,
        "files of perex_t5x": _digest_of_sources(Path(perex_t5x.__file__).parent),
        "version of jax": jax.__version__,
        "version of jaxlib": jaxlib.version.__version__,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "byte order": sys.byteorder,
        **{name: str(getattr(jax.config, name)) for name in settings},
    }


def device_items() -> dict[str, str]:
    """This process's devices; their first use."""
    return {
        "local devices": str(jax.local_device_count()),
        "kind of device": ", ".join(sorted({d.device_kind for d in jax.local_devices()})),
    }


def _digest_of_sources(folder: Path) -> str:
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sha.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()[:12]


def check(store: Any, topic: str, items: Mapping[str, str], index: int, hosts: Sequence[str], seconds: float) -> None:
    """Raises `ConfigError`, the same in all processes, unless all of them have the same items.

    Only digests travel while all is well.
    """
    text = json.dumps(dict(sorted(items.items())))
    store.set(f"{topic}-items/{index}", text)
    store.set(f"{topic}/{index}", hashlib.sha256(text.encode()).hexdigest())
    store.barrier(f"{topic}-told", seconds)
    digests = {int(i): digest for i, digest in store.under(topic).items()}
    if len(set(digests.values())) == 1:
        return
    groups: dict[str, list[int]] = {}
    for i in sorted(digests):
        groups.setdefault(digests[i], []).append(i)
    told = {tuple(members): json.loads(store.get(f"{topic}-items/{members[0]}", 60)) for members in groups.values()}
    raise ConfigError(differences(told, hosts))


def differences(told: Mapping[tuple[int, ...], Mapping[str, str]], hosts: Sequence[str]) -> str:
    """The message about groups of processes that were told different things.

    >>> print(differences({(0,): {"A": "1"}, (1,): {"A": "2"}}, ["a", "b"]))
    the processes were not started with the same configuration. They differ in
      A: 1 in process 0 (a); 2 in process 1 (b)
    Start all of them with the same files and flags.
    """
    names = sorted({name for items in told.values() for name in items})
    lines = []
    for name in names:
        values: dict[str, list[int]] = {}
        for members, items in told.items():
            values.setdefault(items.get(name, "not set"), []).extend(members)
        if len(values) > 1:
            shown = "; ".join(f"{value} in {_names(members, hosts)}" for value, members in values.items())
            lines.append(f"  {name}: {shown}")
    more = [f"  and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    start = "the processes were not started with the same configuration. They differ in"
    return "\n".join([start, *lines[:_MOST], *more, "Start all of them with the same files and flags."])


def _names(members: Iterable[int], hosts: Sequence[str]) -> str:
    members = sorted(members)
    more = f" and {len(members) - 4} more" if len(members) > 4 else ""
    shown = ", ".join(f"{i} ({hosts[i]})" for i in members[:4]) + more
    return f"process {shown}" if len(members) == 1 else f"processes {shown}"
