"""All that preflight finds out about one configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from perex_t5x.cli.spinner import Working
from perex_t5x.metrics import model_flops_utilization
from perex_t5x.preflight import forms, memory, network_time, plain, table
from perex_t5x.preflight.forms import ParameterForm
from perex_t5x.preflight.place import Place
from perex_t5x.preflight.report_cache import Compiler
from perex_t5x.preflight.step import DoesNotFitError, StepReport

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer


@dataclass(frozen=True)
class Account:
    """One configuration.

    Attributes:
      name: of the column.
      place: what it is compiled for.
      batch: the global batch and the mesh in words.
      examples: of the global batch.
      target_tokens: of the global batch, padding included.
      flops: of the model in one step, nothing recomputed.
      device_kind: JAX's name of the devices.
      devices: how many.
      parts: bytes of the arguments on one device; see `memory.argument_parts`.
      statistics: names of those that the step computes; ('mean',) is the plain gradient.
      report: of the compiled step; None where it does not fit.
      refusal: the compiler's words where it does not fit; else ''.
      plain: of the step that `plain.COMPARED` describes; None where the step itself is plain, or does not fit.
      forms: of each parameter's statistics; empty for the plain gradient.
      loops: the step's loops by name; see `table.loop_sizes`.
    """

    name: str
    place: Place
    batch: str
    examples: int
    target_tokens: int
    flops: float
    device_kind: str
    devices: int
    parts: dict[str, int]
    statistics: tuple[str, ...]
    report: StepReport | None
    refusal: str
    plain: StepReport | None
    forms: tuple[ParameterForm, ...]
    loops: dict[str, int]

    @property
    def fits(self) -> bool | None:
        """None on a CPU, whose memory is not a chip's."""
        if self.place.chip is None:
            return None
        return self.report is not None and self.report.peak_bytes <= self.place.chip.hbm_bytes

    @property
    def seconds(self) -> float | None:
        """The compiler's cycles at the chip's clock, collectives not counted; None where there are none."""
        return (self.report.seconds or None) if self.report else None

    def collective_seconds(self) -> dict[str, float]:
        """Network -> seconds of all collectives, at the rates that are published for it; empty without `seconds`."""
        return network_time.seconds(self.report.collectives, self.place.chip) if self.seconds else {}

    @property
    def seconds_unhidden(self) -> float | None:
        """`seconds`, and all collectives after them: none runs while something is computed."""
        return self.seconds + sum(self.collective_seconds().values()) if self.seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of a step that takes `seconds`."""
        return self.target_tokens / self.seconds if self.seconds else None

    @property
    def mfu(self) -> float | None:
        """Of a step that takes `seconds`."""
        return self._mfu(self.seconds)

    @property
    def mfu_unhidden(self) -> float | None:
        """Of a step that takes `seconds_unhidden`."""
        return self._mfu(self.seconds_unhidden)

    def _mfu(self, seconds: float | None) -> float | None:
        if not seconds:
            return None
        found = model_flops_utilization(self.flops, 1 / seconds, self.device_kind, self.devices)
        return next(iter(found.values()), None)

    @property
    def cycles_ratio(self) -> float | None:
        """Of the step to the plain one."""
        return self.report.cycles / self.plain.cycles if self.plain and self.plain.cycles else None

    @property
    def temp_ratio(self) -> float | None:
        return self.report.temp_bytes / self.plain.temp_bytes if self.plain and self.plain.temp_bytes else None

    def memory_parts(self) -> dict[str, int]:
        """Bytes on one device by part, adding up to the peak; of a step that does not fit, what is known."""
        parts = {name: size for name, size in self.parts.items() if size >= 1000 or name != memory.OTHER}
        if self.report is None:
            return parts
        parts["padding of the layout"] = max(0, self.report.argument_bytes - sum(parts.values()))
        parts["results beside the state"] = self.report.output_bytes - self.report.alias_bytes
        if not self.forms:
            parts["temporaries of the plain gradient"] = self.report.temp_bytes
        elif self.plain is None:
            parts["temporaries"] = self.report.temp_bytes
        else:
            plain_part = min(self.plain.temp_bytes, self.report.temp_bytes)
            parts["temporaries of the plain gradient"] = plain_part
            parts["temporaries of the statistics"] = self.report.temp_bytes - plain_part
        return parts

    def traffic(self) -> dict[tuple[str, str, str], int]:
        """(network, kind, axes) -> bytes a step, largest first."""
        totals: dict[tuple[str, str, str], int] = {}
        for c in self.report.collectives if self.report else ():
            key = (c.network, table.kind_name(c), ", ".join(c.axes) or "-")
            totals[key] = totals.get(key, 0) + c.bytes_per_step
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def network_bytes(self, network: str) -> int:
        """Bytes a step and device over 'ICI' or 'DCN'."""
        return sum(size for (name, _, _), size in self.traffic().items() if name == network)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        report = self.report and dataclasses.asdict(self.report)
        return {
            "name": self.name,
            "topology": self.place.topology or None,
            "slices": self.place.slices,
            "devices": self.devices,
            "device_kind": self.device_kind,
            "batch": self.batch,
            "examples": self.examples,
            "target_tokens": self.target_tokens,
            "statistics": list(self.statistics),
            "fits": self.fits,
            "refusal": self.refusal or None,
            "hbm_bytes": self.place.chip.hbm_bytes if self.place.chip else None,
            "peak_bytes": self.report.peak_bytes if self.report else None,
            "memory": self.memory_parts(),
            "cycles": (self.report.cycles or None) if self.report else None,
            "seconds": self.seconds,
            "collective_seconds": self.collective_seconds(),
            "seconds_unhidden": self.seconds_unhidden,
            "tokens_per_second": self.tokens_per_second,
            "model_flops": self.flops,
            "mfu": self.mfu,
            "mfu_unhidden": self.mfu_unhidden,
            "unestimated": list(self.report.unestimated) if self.report else [],
            "overhead": self.plain
            and {
                "compared": plain.COMPARED,
                "cycles": self.cycles_ratio,
                "temporaries": self.temp_ratio,
                "plain_cycles": self.plain.cycles or None,
                "plain_temp_bytes": self.plain.temp_bytes,
            },
            "traffic": [
                {"network": network, "kind": kind, "axes": axes, "bytes": size}
                for (network, kind, axes), size in self.traffic().items()
            ],
            "collectives": report["collectives"] if report else [],
            "coverage": [dataclasses.asdict(form) for form in self.forms],
        }


def measure(
    name: str,
    place: Place,
    trainer: Trainer,
    spec: Mapping[str, jax.ShapeDtypeStruct],
    compiler: Compiler,
    working: Working,
) -> Account:
    """Compiles a trainer's step, and the plain one beside it, and reads both."""
    shapes, _, _ = trainer.abstract_state({feature: s.shape for feature, s in spec.items()})
    devices = trainer.partitioner.mesh.devices
    examples, length = spec["decoder_target_tokens"].shape
    is_plain = trainer.has_plain_gradient(shapes.params)
    with working(f"{name}: compiling the step for {place}"):
        report, refusal = _compiled(compiler, trainer, spec)
    compared = None
    if report is not None and not is_plain:
        with working(f"{name}: compiling the plain gradient's step"):
            compared, _ = _compiled(compiler, plain.plain_trainer(trainer), spec)
    found: tuple[ParameterForm, ...] = ()
    if not is_plain:
        with working(f"{name}: looking at each parameter"):
            found = forms.forms_of_step(trainer, spec)
    return Account(
        name=name,
        place=place,
        batch=trainer.partitioner.describe_batch(examples).partition(" on ")[0],
        examples=examples,
        target_tokens=examples * length,
        flops=trainer.model.flops_per_step(examples, {feature: s.shape[1] for feature, s in spec.items()}),
        device_kind=devices.flat[0].device_kind,
        devices=devices.size,
        parts=memory.argument_parts(trainer, spec),
        statistics=tuple(trainer.needs(shapes.params)),
        report=report,
        refusal=refusal,
        plain=compared,
        forms=found,
        loops=table.loop_sizes(trainer),
    )


def _compiled(
    compiler: Compiler, trainer: Trainer, spec: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[StepReport | None, str]:
    """(report, ''), or (None, the compiler's words) where the step does not fit."""
    try:
        return compiler.report(trainer, spec), ""
    except DoesNotFitError as e:
        return None, e.account
