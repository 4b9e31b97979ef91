"""Cycles of Pallas kernels, of which the compiled program says nothing.

Each kernel of a program is compiled once more, alone, in a process whose compiler writes down the schedule, and counts

    max(schedule, products / (products a cycle at peak), bytes / (bytes a cycle of the memory))

with the schedule's bundles as often as they run (`bundles`), and products and bytes as the kernel states them
(`pl.CostEstimate`). What was found is kept: the same kernel is in many programs.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perex_t5x.hardware.chips import Chip
from perex_t5x.per_example.kernels import matmul
from perex_t5x.preflight import bundles, kept
from perex_t5x.preflight.hlo.program import Program
from perex_t5x.preflight.kernel_text import Kernel, is_kernel, kernel_of

_log = logging.getLogger(__name__)

_FLAGS = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=^final_bundles"
_SECONDS = 900


def kernel_cycles(program: Program, chip: Chip, folder: Path | None = None) -> dict[str, int]:
    """Instruction -> cycles of one run of it, for all kernels of a program that could be counted.

    A kernel that writes into a larger array is inside a fusion, which then counts as the kernel.

    Args:
      folder: where what was found is kept; None: nowhere.
    """
    found = (e for e in program.executed(fusions=True) if is_kernel(e.instruction))
    kernels = {(e.fusion or e.instruction).name: kernel_of(e.instruction) for e in found}
    if not kernels:
        return {}
    scheduled = _scheduled({k.key: k for k in kernels.values()}, chip, folder)
    return {name: _cycles(k, scheduled[k.key], chip) for name, k in kernels.items() if k.key in scheduled}


def _cycles(kernel: Kernel, scheduled: int, chip: Chip) -> int:
    per_second = max(kernel.flops / chip.peak_flops, kernel.bytes / chip.hbm_bytes_per_second)
    return max(scheduled, round(per_second * chip.clock_hz))


def _scheduled(kernels: Mapping[str, Kernel], chip: Chip, folder: Path | None) -> dict[str, int]:
    """Key -> cycles of the schedule; kernels whose compilation fails are left out, with a warning."""
    paths = {key: None if folder is None else folder / f"kernel-{kept.key(key, chip.name)}.json" for key in kernels}
    found = {key: value["cycles"] for key, path in paths.items() if (value := kept.read(path)) is not None}
    missing = {key: kernel for key, kernel in kernels.items() if key not in found}
    if not missing:
        return found
    try:
        fresh = _compile_apart(list(missing.values()), chip)
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        _log.warning("the schedules of %d kernel(s) could not be read, and are not counted: %s", len(missing), e)
        return found
    for key, cycles in zip(missing, fresh, strict=True):
        kept.write(paths[key], {"cycles": cycles})
        found[key] = cycles
    return found


def _compile_apart(kernels: Sequence[Kernel], chip: Chip) -> list[int]:
    """Cycles of the kernels' schedules, in a process of its own: flags of the compiler hold for a whole process."""
    with tempfile.TemporaryDirectory(prefix="perex_t5x_kernels_") as folder:
        wanted, found = Path(folder, "wanted.json"), Path(folder, "found.json")
        wanted.write_text(json.dumps([kernel.to_json() for kernel in kernels]))
        dump = Path(folder, "dump")
        own = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
        environment = own | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} {_FLAGS}"}
        command = [sys.executable, "-m", __name__, chip.smallest_topology, str(wanted), str(dump), str(found)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if child.returncode != 0:
            raise ValueError((child.stderr.strip().splitlines() or ["the compiler ended without a word"])[-1])
        return json.loads(found.read_text())


# --- in that process --------------------------------------------------------------------------------------------------


def schedule_cycles(kernel: Kernel, text: str) -> int:
    """Cycles of a kernel's schedule; of a kernel that is not ours, conditional parts count at every step of the grid."""
    schedule = bundles.parse(text)
    shares: Sequence[float] | None = None
    if kernel.name == matmul.NAME:
        shares = matmul.shares(*bundles.chunks_of(schedule))
    return schedule.cycles(shares if shares is not None and len(shares) == len(schedule.parts) else None)


def _main(topology: str, wanted: str, dump: str, found: str) -> None:
    import jax

    from perex_t5x.hardware.devices import tpu_devices

    place = jax.sharding.SingleDeviceSharding(tpu_devices(topology)[0])
    results = []
    for kernel in (Kernel.from_json(values) for values in json.loads(Path(wanted).read_text())):
        before = set(Path(dump).glob("*final_bundles.txt"))
        _compile(kernel, place)
        texts = sorted(set(Path(dump).glob("*ffi_call*-final_bundles.txt")) - before)
        results.append(schedule_cycles(kernel, texts[-1].read_text()))
    Path(found).write_text(json.dumps(results))


def _compile(kernel: Kernel, place: Any) -> None:
    import jax

    def struct(item: tuple[str, tuple[int, ...]], **where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(item[1], _dtype(item[0]), **where)

    call = jax.ffi.ffi_call(
        "tpu_custom_call",
        [struct(x) for x in kernel.results],
        custom_call_api_version=1,
        legacy_backend_config=kernel.config,
        input_output_aliases=dict(kernel.aliases),
    )
    jax.jit(call).lower(*(struct(x, sharding=place) for x in kernel.operands)).compile()


def _dtype(name: str) -> Any:
    """Of XLA's name: bf16, f32, s32, pred, ..."""
    import jax.numpy as jnp

    kinds = {"f": "float", "s": "int", "u": "uint"}
    long = {"bf16": "bfloat16", "pred": "bool"}.get(name) or kinds[name[0]] + name[1:]
    return jnp.dtype(long)


if __name__ == "__main__":
    _main(*sys.argv[1:])
