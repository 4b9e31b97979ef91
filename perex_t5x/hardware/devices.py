"""Devices that this machine does not have: fake CPU devices to run on, and TPU slices to compile for.

    devices = tpu_devices("v5e:4x4")                     # or "v5e-16", as the cloud calls the same slice
    devices = tpu_devices("v5e:16x16", num_slices=2)     # two slices, joined by the data-centre network

The `libtpu` wheel carries the TPU compiler and knows every topology. Programs that are lowered for these devices compile,
and report the memory and cycles they take; they cannot run. The default backend stays the CPU.

JAX is imported on demand: `perex_t5x/__init__.py` calls `reserve_threads` before any use of JAX.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Iterator, MutableMapping
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.hardware.slices import canonical_topology, chip_of_topology

_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
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


# --- fake CPU devices -------------------------------------------------------------------------------------------------


def reserve_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Requests two threads per fake CPU device, where the environment asks for several. Before JAX uses the first.

    XLA runs each device's part of a program in a thread of one pool, and the parts wait for each other in collectives. The
    pool has as many threads as the machine has cores, or as there are devices if these are more: then a single thread that
    does anything else keeps the last device waiting, and after 40 seconds XLA aborts the process ("only 7 of them arrived on
    time"). Seen with 8 devices on 2 cores and 8 or 9 threads; not with 16.

    >>> environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=512"}
    >>> reserve_threads(environment)
    >>> environment["PJRT_NPROC"]
    '1024'
    """
    counts = _COUNT.findall(environment.get("XLA_FLAGS", "")) or [environment.get("JAX_NUM_CPU_DEVICES", "")]
    devices = int(counts[-1]) if counts[-1].isdecimal() else 1
    if devices > 1:
        environment.setdefault("PJRT_NPROC", str(max(2 * devices, os.cpu_count() or 1)))


def use_cpu_backend(num_devices: int | None = None) -> None:
    """Makes the CPU JAX's default backend, with this many fake devices, unless a backend was chosen already.

    Before the first use of a device. With libtpu installed JAX would otherwise look for a TPU that is not there.
    """
    import jax

    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")
    if num_devices is None:
        return
    with contextlib.suppress(RuntimeError):  # a backend is running already: see whether it will do
        jax.config.update("jax_num_cpu_devices", num_devices)
    if len(jax.devices("cpu")) < num_devices:
        raise ConfigError(
            f"--devices={num_devices}: JAX already runs with {len(jax.devices('cpu'))} CPU device(s). Restart without "
            "xla_force_host_platform_device_count in XLA_FLAGS."
        )


# --- TPU slices to compile for ----------------------------------------------------------------------------------------


def has_libtpu() -> bool:
    """Whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None or bool(os.environ.get("TPU_LIBRARY_PATH"))


def tpu_devices(topology: str, num_slices: int = 1) -> list[Any]:
    """Devices of `num_slices` slices of a topology, to compile for; see the module.

    Raises `ConfigError` for an unknown topology, and where libtpu is not installed.
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
    from jax.experimental import topologies

    options = dict(chip_of_topology(name).topology_options) | ({"num_slices": num_slices} if num_slices > 1 else {})
    try:
        with native_noise_hidden():
            return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    except (RuntimeError, NotImplementedError) as e:
        raise ConfigError(f"the TPU compiler refuses the topology {name} x {num_slices} slice(s): {e}") from e


@contextlib.contextmanager
def native_noise_hidden() -> Iterator[None]:
    """Holds back what native libraries write to the stderr file descriptor; shown after all if the block fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@functools.cache
def _load() -> None:
    """Loads libtpu, once, and has it read its flags.

    It reads XLA_FLAGS at its first compilation and aborts the process at a flag that it does not know, such as one for
    CPUs. So these are hidden from it, and a program of one line is compiled at once. Flags that a user has set could still
    abort the process: its last output is then not hidden.
    """
    import jax
    import numpy as np
    from jax.experimental import topologies

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
    """Whether libtpu has a flag of this name; at an unknown one it aborts the process."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    if not path:
        import libtpu

        path = libtpu.get_library_path()
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return library.find(flag.encode()) >= 0


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
