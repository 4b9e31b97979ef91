"""Options of the TPU compiler that programs are compiled with, each with its reason.

They belong to a program (`jax.jit(..., compiler_options=...)`), not to the process (`LIBTPU_INIT_ARGS`), so that training
and preflight compile the same. What a user sets wins: `Trainer.compiler_options`, then `LIBTPU_INIT_ARGS` and `XLA_FLAGS`.

The names are libtpu's and change with it. One of ours that it does not know is left out, with a warning; one of the user's
is an error before anything large is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from absl import logging

from perex_t5x.errors import ConfigError
from perex_t5x.hardware.chips import chip_of
from perex_t5x.hardware.devices import native_noise_hidden

Value = str | bool | int | float

_FLAG = re.compile(r"--(\w+)")


@dataclass(frozen=True)
class Option:
    """`values` has one for each generation of chips that it is set for; `reason` says what it does to a training step."""

    name: str
    values: Mapping[str, Value]
    reason: str


OPTIONS: tuple[Option, ...] = (
    Option(
        "xla_tpu_scoped_vmem_limit_kib",
        {"v5e": 65536, "v6e": 65536},
        "How much of the 128 MiB of VMEM one instruction may use; the rest holds what later ones read. With the default of "
        "16 MiB large products are cut into more passes, and reduce-scatters are padded and followed by permutes. 1_2b on "
        "v5e-256: 2.3 % fewer cycles, 0.24 GB less traffic (docs/sharding.md); on v6e-256 4 % fewer cycles.",
    ),
)


def default_options(chip: str) -> dict[str, Value]:
    """What programs for a chip are compiled with."""
    return {option.name: option.values[chip] for option in OPTIONS if chip in option.values}


def options_for(device: Any, own: Mapping[str, Any] | None = None) -> dict[str, Value]:
    """The options of a program for devices like this one, all of which the compiler takes.

    Args:
      device: of the mesh; one that this process can compile for.
      own: `Trainer.compiler_options`.
    """
    chip = chip_of(device)
    set_elsewhere = {name for v in ("LIBTPU_INIT_ARGS", "XLA_FLAGS") for name in _FLAG.findall(os.environ.get(v, ""))}
    ours = {} if chip is None else default_options(chip.name)
    wanted = {name: value for name, value in ours.items() if name not in set_elsewhere} | dict(own or {})
    return dict(_accepted(tuple(sorted(wanted.items())), frozenset(own or ()), device)) if wanted else {}


@functools.lru_cache(maxsize=64)
def _accepted(wanted: tuple[tuple[str, Value], ...], own: frozenset[str], device: Any) -> tuple[tuple[str, Value], ...]:
    """Those that the compiler takes, by compiling a program of one line; raises for a user's that it does not take."""
    import jax
    import numpy as np

    one = jax.ShapeDtypeStruct((), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    options = dict(wanted)
    is_absent = jax.default_backend() != device.platform  # to compile for, not to run on
    while options:
        try:
            with native_noise_hidden() if is_absent else contextlib.nullcontext():
                jax.jit(lambda x: x + 1, compiler_options=options).lower(one).compile()
            break
        except jax.errors.JaxRuntimeError as e:
            refused = next((name for name in re.findall(r"\w+", str(e)) if name in options), None)
            if refused is None:
                raise
            if refused in own:
                raise ConfigError(
                    f"Trainer.compiler_options: the compiler for {device.device_kind} does not take "
                    f"{refused} = {options[refused]!r}: {str(e).splitlines()[0]}"
                ) from None
            logging.warning("this compiler does not take %s = %s, which is left out: %s", refused, options[refused], e)
            del options[refused]
    return tuple(options.items())


def check_options(options: Any) -> None:
    """Raises unless `Trainer.compiler_options` is a mapping of names to values."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"Trainer.compiler_options = {options!r}: give a dictionary, such as {{'xla_tpu_scoped_vmem_limit_kib': 65536}}."
        )
    for name, value in options.items():
        if not isinstance(name, str) or not re.fullmatch(r"xla_\w+", name):
            raise ConfigError(
                f"Trainer.compiler_options: {name!r} is not a name of an option, such as 'xla_tpu_scoped_vmem_limit_kib' "
                "(without dashes in front)."
            )
        if not isinstance(value, Value):
            raise ConfigError(f"Trainer.compiler_options: {name} = {value!r} is neither text nor a number.")


def describe_options(options: Mapping[str, Value]) -> str:
    """A line for `model-info.txt`.

    >>> describe_options({"xla_a": 1, "xla_b": "true"}), describe_options({})
    ('compiler options: xla_a=1 xla_b=true', '')
    """
    return "compiler options: " + " ".join(f"{k}={v}" for k, v in options.items()) if options else ""
