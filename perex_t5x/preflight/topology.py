"""Devices of a TPU slice on a machine that has none, for compiling only.

    devices = tpu_devices("v5e:4x4")                     # or "v5e-16", as the cloud calls the same slice
    devices = tpu_devices("v5e:16x16", num_slices=2)     # two slices, joined by the data-centre network

The `libtpu` wheel carries the TPU compiler and knows every topology. Programs that are lowered for these devices compile,
and say what memory and how many cycles they take; they cannot run. The default backend stays the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import mmap
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from perex_t5x.console import native_noise_hidden
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.preflight.chips import CHIPS

# Cloud names count chips on v5e and v6e, and cores, two to a chip, on v4 and v5p.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBIC = {
    8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8", 1024: "8x8x8",
    2048: "8x8x16", 4096: "8x16x16",
}  # fmt: skip
_PODS = {
    **{f"{name}-{size}": f"{name}:{shape}" for name in ("v5e", "v6e") for size, shape in _FLAT.items()},
    **{f"{name}-{size}": f"{name}:{shape}" for name in ("v4", "v5p") for size, shape in _CUBIC.items()},
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e"}

_HOST_FLAG = re.compile(r"--xla_(cpu|gpu|llvm|force_host|backend_optimization_level)")

# Libtpu may start a call on a sparse core ahead of its operands, which this jaxlib cannot print: `as_text` fails.
_PRELOADED = "xla_tpu_sparse_core_maximum_preloaded_async_calls"

# What libtpu asks a TPU machine for when it loads; without these it waits for, and complains about, what is not there.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def known_topologies() -> list[str]:
    """The slices that the cloud offers, smallest first within each chip.

    >>> known_topologies()[:3]
    ['v4:2x2x1', 'v4:2x2x2', 'v4:2x2x4']
    """
    return sorted(_PODS.values(), key=lambda name: (name.split(":")[0], num_chips(name)))


def num_chips(topology: str) -> int:
    """Chips of one slice of this topology.

    >>> num_chips("v5e:4x8")
    32
    """
    return math.prod(int(size) for size in topology.partition(":")[2].split("x"))


def canonical_topology(name: str) -> str:
    """The compiler's name of a topology, from that or from a cloud name.

    v5e and v6e names count chips, v4 and v5p names count cores, two to a chip:

    >>> canonical_topology("v5litepod-256"), canonical_topology("v5p-128"), canonical_topology("v6e:4x4")
    ('v5e:16x16', 'v5p:4x4x4', 'v6e:4x4')
    """
    text = str(name).strip().lower()
    for alias, chip_name in _ALIASES.items():
        text = re.sub(rf"^{alias}(?=[:-])", chip_name, text)
    if text in _PODS:
        return _PODS[text]
    if text in _PODS.values() or _is_larger_cube(text):
        return text
    raise ConfigError(_unknown(str(name), text))


def _is_larger_cube(text: str) -> bool:
    """Slices of v4 and v5p beyond the listed ones are made of cubes of 4x4x4."""
    match = re.fullmatch(r"(v4|v5p):(\d+)x(\d+)x(\d+)", text)
    return match is not None and all(int(size) >= 4 and int(size) % 4 == 0 for size in match.groups()[1:])


def _unknown(name: str, text: str) -> str:
    chip_name = re.split("[:-]", text)[0]
    chips = [chip_name] if chip_name in CHIPS else list(CHIPS)
    lines = [
        f"  {c}: " + ", ".join(t.split(":")[1] for t in known_topologies() if t.startswith(f"{c}:")) for c in chips
    ]
    hint = _nearest_size(text) or did_you_mean(text, [*_PODS, *_PODS.values()])
    return f"unknown TPU topology {name!r}.{hint} Write CHIP:SHAPE, such as v5e:4x4. Known are\n" + "\n".join(lines)


def _nearest_size(text: str) -> str:
    """The slice of the nearest size, where the chip is known and a size is given."""
    chip_name, separator, shape = re.match("([^:-]*)(.?)(.*)", text).groups()
    size = math.prod(int(n) for n in re.findall(r"\d+", shape))
    known = {pod: num_chips(t) for pod, t in _PODS.items() if pod.startswith(f"{chip_name}-")}
    if not known or not shape or size < 1:
        return ""
    by_chips = separator == ":"
    nearest = min(known, key=lambda pod: abs(math.log(size / (known[pod] if by_chips else int(pod.split("-")[1])))))
    return f" Did you mean {_PODS[nearest] if by_chips else nearest!r}?"


def use_cpu_backend(num_devices: int | None = None) -> None:
    """Makes the CPU JAX's default backend, with so many fake devices, unless one was chosen already.

    Before the first use of a device. With libtpu installed JAX would otherwise look for a TPU that is not there.
    """
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    if num_devices is None:
        return
    with contextlib.suppress(RuntimeError):  # a backend is running already: see whether it will do
        jax.config.update("jax_num_cpu_devices", num_devices)
    if len(jax.devices("cpu")) < num_devices:
        raise ConfigError(
            f"--devices={num_devices}: JAX already runs with {len(jax.devices('cpu'))} CPU device(s). Start anew, without "
            "xla_force_host_platform_device_count in XLA_FLAGS."
        )


def has_libtpu() -> bool:
    """Whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None or bool(os.environ.get("TPU_LIBRARY_PATH"))


@functools.cache
def _load() -> None:
    """Loads libtpu, once, and has it read its flags.

    It reads XLA_FLAGS at its first compilation and ends the process at a flag that it does not know, such as one for
    CPUs. So these are kept from it, and a program of one line is compiled here and now. Flags that a user has set could
    still end the process: its last words are then not hidden.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    use_cpu_backend()
    jax.devices("cpu")  # reads XLA_FLAGS as they are
    xla_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not _HOST_FLAG.match(flag)]
    own_args = os.environ.get("LIBTPU_INIT_ARGS", "")
    args = f"{own_args} --{_PRELOADED}=0" if _PRELOADED not in own_args and _knows(_PRELOADED) else own_args
    hidden = contextlib.nullcontext() if xla_flags or own_args else native_noise_hidden()
    with _environment(XLA_FLAGS=" ".join(xla_flags), LIBTPU_INIT_ARGS=args), hidden:
        device = topologies.get_topology_desc("v5e:1x1", platform="tpu").devices[0]
        one = jax.ShapeDtypeStruct((), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
        jax.jit(lambda x: x + 1).lower(one).compile()


def _knows(flag: str) -> bool:
    """Whether libtpu has a flag of this name; at an unknown one it ends the process."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    if not path:
        import libtpu

        path = libtpu.get_library_path()
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return library.find(flag.encode()) >= 0


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def tpu_devices(topology: str, num_slices: int = 1) -> list[Any]:
    """Devices of `num_slices` slices of a topology, to compile for; see the module.

    Raises `ConfigError` for a topology that is not known, and where libtpu is not installed.
    """
    name = canonical_topology(topology)
    if not isinstance(num_slices, int) or num_slices < 1:
        raise ConfigError(f"num_slices = {num_slices!r}: must be a whole number, at least 1.")
    if not has_libtpu():
        raise ConfigError(
            f"compiling for {name} needs the TPU compiler, which is not installed: pip install 'perex_t5x[tpu]' "
            "(it needs no TPU)."
        )
    _load()
    options: dict[str, Any] = {}
    if num_slices > 1:
        options["num_slices"] = num_slices
    if name.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # one device a chip, as JAX has it on v4
    try:
        with native_noise_hidden():
            return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    except (RuntimeError, NotImplementedError) as e:
        raise ConfigError(f"the TPU compiler refuses the topology {name} x {num_slices} slice(s): {e}") from e
