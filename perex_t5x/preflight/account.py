"""What a training step costs: memory by part, cycles and seconds, collectives, the price of the statistics.

`measure` compiles one configuration and collects everything in a `PreflightReport`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import optax
from jax.tree_util import keystr

from perex_t5x import optimizers
from perex_t5x.cli.progress import Working
from perex_t5x.gradients import gradient_with_statistics
from perex_t5x.hardware.chips import peak_flops
from perex_t5x.metrics import flops_per_step
from perex_t5x.per_example.statistic import name_of
from perex_t5x.preflight.overlap import network_seconds
from perex_t5x.preflight.report_cache import ReportCache
from perex_t5x.preflight.step import BatchSpec, CompileTarget, DoesNotFitError, StepReport

if TYPE_CHECKING:
    from perex_t5x.per_example.engine.accumulate import ReductionTrace
    from perex_t5x.trainer import Trainer

PARAMETERS, OPTIMIZER, OTHER, BATCH = "parameters", "optimizer state", "other state", "batch"
COMPARED = (
    "the same model, mesh, batch and microbatches with optax.adamw on the plain gradient, no clipping, no skipping"
)


@dataclass(frozen=True)
class PreflightReport:
    """Everything that preflight says about one configuration.

    Attributes:
      name: of the column.
      target: what it is compiled for.
      batch: describes the global batch and the mesh.
      examples: of the global batch.
      target_tokens: of the global batch, padding included; 0 where the model has none.
      flops: of the model in one step, nothing recomputed; None where it does not count them.
      device_kind: JAX's name of the devices.
      devices: how many.
      parts: bytes of the arguments on one device; see `argument_parts`.
      statistics: names of those that the step computes; ('mean',) is the plain gradient.
      step: of the compiled step; None where it does not fit.
      refusal: the compiler's message where it does not fit; else ''.
      plain: of the step that `COMPARED` describes; None where the step itself is plain, or does not fit.
      reductions: of each parameter's statistics; empty for the plain gradient.
      loops: the step's loops by name; see `loop_sizes`.
    """

    name: str
    target: CompileTarget
    batch: str
    examples: int
    target_tokens: int
    flops: float | None
    device_kind: str
    devices: int
    parts: dict[str, int]
    statistics: tuple[str, ...]
    step: StepReport | None
    refusal: str
    plain: StepReport | None
    reductions: tuple[ParameterReduction, ...]
    loops: dict[str, int]

    @property
    def fits(self) -> bool | None:
        """None for fake CPU devices, which have no memory of their own."""
        if self.target.chip is None:
            return None
        return self.step is not None and self.step.peak_bytes <= self.target.chip.hbm_bytes

    @property
    def seconds(self) -> float | None:
        """The compiler's cycles at the chip's clock, without collectives; None where there is no estimate."""
        return (self.step.seconds or None) if self.step else None

    def collective_seconds(self) -> dict[str, float]:
        """Network -> seconds of all collectives, at published rates; empty without `seconds`."""
        step, chip = self.step, self.target.chip
        return network_seconds(step.collectives, chip) if step and chip and self.seconds else {}

    @property
    def seconds_unhidden(self) -> float | None:
        """`seconds` plus all collectives: none is overlapped with computation."""
        return self.seconds + sum(self.collective_seconds().values()) if self.seconds else None

    @property
    def seconds_scheduled(self) -> float | None:
        """`seconds` plus what the program's schedule does not hide of the collectives; see `perex_t5x.preflight.overlap`."""
        if self.step is None or self.seconds_unhidden is None:
            return None
        return self.seconds_unhidden - sum(c.hidden_seconds for c in self.step.collectives)

    @property
    def tokens_per_second(self) -> float | None:
        """Of a step that takes `seconds`."""
        return self.target_tokens / self.seconds if self.seconds and self.target_tokens else None

    @property
    def mfu(self) -> float | None:
        """Of a step that takes `seconds`."""
        return self._mfu(self.seconds)

    @property
    def mfu_unhidden(self) -> float | None:
        """Of a step that takes `seconds_unhidden`."""
        return self._mfu(self.seconds_unhidden)

    @property
    def mfu_scheduled(self) -> float | None:
        """Of a step that takes `seconds_scheduled`."""
        return self._mfu(self.seconds_scheduled)

    @property
    def mfu_bound(self) -> float | None:
        """Of a step that takes the lower bound of its cycles, all collectives hidden."""
        step = self.step
        return self._mfu(step.bound / step.chip.clock_hz) if step and step.chip and step.cycles and step.bound else None

    def _mfu(self, seconds: float | None) -> float | None:
        peak = peak_flops(self.device_kind)
        return self.flops / seconds / (peak * self.devices) if seconds and self.flops and peak else None

    @property
    def cycles_ratio(self) -> float | None:
        """Of the step to the plain one."""
        step, plain = self.step, self.plain
        return step.cycles / plain.cycles if step and plain and plain.cycles else None

    @property
    def temp_ratio(self) -> float | None:
        step, plain = self.step, self.plain
        return step.temp_bytes / plain.temp_bytes if step and plain and plain.temp_bytes else None

    def memory_parts(self) -> dict[str, int]:
        """Bytes on one device by part, adding up to the peak; for a step that does not fit, the known ones."""
        parts = {name: size for name, size in self.parts.items() if size >= 1000 or name != OTHER}
        if self.step is None:
            return parts
        parts["padding of the layout"] = max(0, self.step.argument_bytes - sum(parts.values()))
        parts["outputs not aliased to inputs"] = self.step.output_bytes - self.step.alias_bytes
        if not self.reductions:
            parts["temporaries of the plain gradient"] = self.step.temp_bytes
        elif self.plain is None:
            parts["temporaries"] = self.step.temp_bytes
        else:
            plain_part = min(self.plain.temp_bytes, self.step.temp_bytes)
            parts["temporaries of the plain gradient"] = plain_part
            parts["temporaries of the statistics"] = self.step.temp_bytes - plain_part
        return parts

    def traffic(self) -> dict[tuple[str, str, str], int]:
        """(network, kind, axes) -> bytes per step, largest first."""
        totals: Counter[tuple[str, str, str]] = Counter()
        for c in self.step.collectives if self.step else ():
            totals[c.network, c.kind_name, ", ".join(c.axes) or "-"] += c.bytes_per_step
        return dict(totals.most_common())

    def network_bytes(self, network: str) -> int:
        """Bytes per step and device over 'ICI' or 'DCN'."""
        return sum(size for (name, _, _), size in self.traffic().items() if name == network)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        own = ("name", "devices", "device_kind", "batch", "examples", "target_tokens", "statistics", "fits", "seconds")
        rates = ("seconds_scheduled", "seconds_unhidden", "tokens_per_second")
        mfus = ("mfu", "mfu_scheduled", "mfu_unhidden", "mfu_bound")
        return {name: getattr(self, name) for name in (*own, *rates, *mfus)} | {
            "topology": self.target.topology or None,
            "slices": self.target.slices,
            "refusal": self.refusal or None,
            "hbm_bytes": self.target.chip.hbm_bytes if self.target.chip else None,
            "peak_bytes": self.step.peak_bytes if self.step else None,
            "memory": self.memory_parts(),
            "cycles": (self.step.cycles or None) if self.step else None,
            "cycles_bound": (self.step.bound or None) if self.step else None,
            "bound_has_schedules": self.step.has_schedules if self.step else None,
            "breakdown": [dataclasses.asdict(part) for part in self.step.parts] if self.step else [],
            "collective_seconds": self.collective_seconds(),
            "model_flops": self.flops,
            "unestimated": list(self.step.unestimated) if self.step else [],
            "overhead": self.plain
            and {
                "compared": COMPARED,
                "cycles": self.cycles_ratio,
                "temporaries": self.temp_ratio,
                "plain_cycles": self.plain.cycles or None,
                "plain_temp_bytes": self.plain.temp_bytes,
            },
            "traffic": [
                {"network": network, "kind": kind, "axes": axes, "bytes": size}
                for (network, kind, axes), size in self.traffic().items()
            ],
            "collectives": [dataclasses.asdict(c) for c in self.step.collectives] if self.step else [],
            "coverage": [dataclasses.asdict(reduction) for reduction in self.reductions],
        }


def measure(
    name: str,
    target: CompileTarget,
    trainer: Trainer,
    spec: BatchSpec,
    cache: ReportCache,
    working: Working,
    compare: bool = True,
) -> PreflightReport:
    """Compiles a trainer's step and, unless not to `compare`, the plain one, and reads both."""
    shapes, _, _ = trainer.abstract_state({feature: s.shape for feature, s in spec.items()})
    devices = trainer.partitioner.mesh.devices
    examples = next(iter(spec.values())).shape[0]
    targets = spec.get("decoder_target_tokens")  # a model of one's own may have none
    is_plain = trainer.has_plain_gradient(shapes.params)
    with working(f"{name}: compiling the step for {target}"):
        report, refusal = _compiled(cache, trainer, spec)
    compared, reductions = None, ()
    if report is not None and not is_plain and compare:
        with working(f"{name}: compiling the plain gradient's step"):
            compared, _ = _compiled(cache, plain_trainer(trainer), spec)
    if not is_plain and compare:
        with working(f"{name}: looking at each parameter"):
            reductions = reductions_of_step(trainer, spec)
    return PreflightReport(
        name=name,
        target=target,
        batch=trainer.partitioner.describe_batch(examples).partition(" on ")[0],
        examples=examples,
        target_tokens=0 if targets is None else math.prod(targets.shape),
        flops=flops_per_step(trainer.model, spec),
        device_kind=devices.flat[0].device_kind,
        devices=devices.size,
        parts=argument_parts(trainer, spec),
        statistics=tuple(map(name_of, trainer.needs(shapes.params))),
        step=report,
        refusal=refusal,
        plain=compared,
        reductions=reductions,
        loops=loop_sizes(trainer),
    )


def _compiled(cache: ReportCache, trainer: Trainer, spec: BatchSpec) -> tuple[StepReport | None, str]:
    """(report, ''), or (None, the compiler's message) where the step does not fit."""
    try:
        return cache.report(trainer, spec), ""
    except DoesNotFitError as e:
        return None, e.refusal


# --- the plain step to compare with -----------------------------------------------------------------------------------


def plain_trainer(trainer: Trainer) -> Trainer:
    """A trainer that differs from this one as `COMPARED` says."""
    return trainer.replace(
        optimizer_def=optax.adamw, clip_norm=None, non_finite="keep", monitor=None, group_size=1, unit="example"
    )


# --- memory, before anything is compiled ------------------------------------------------------------------------------


def argument_parts(trainer: Trainer, batch_spec: BatchSpec) -> dict[str, int]:
    """Bytes of parameters, optimizer state, other state (step, RNG, the monitor's averages) and batch on one device.

    Without the padding of the chip's tiled layouts, which the compiler's count of the arguments includes.
    """
    shapes, shardings, _ = trainer.abstract_state({name: spec.shape for name, spec in batch_spec.items()})
    rows = {name: trainer.partitioner.data_sharding for name in batch_spec}
    other = ("step", "rng", "monitor")
    return {
        PARAMETERS: bytes_on_device(shapes.params, shardings.params),
        OPTIMIZER: bytes_on_device(shapes.opt_state, shardings.opt_state),
        OTHER: sum(bytes_on_device(getattr(shapes, name), getattr(shardings, name)) for name in other),
        BATCH: bytes_on_device(dict(batch_spec), rows),
    }


def bytes_on_device(shapes: Any, shardings: Any) -> int:
    """Bytes of a tree's arrays on one device.

    >>> sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    >>> bytes_on_device({"w": jax.ShapeDtypeStruct((3, 4), "float32")}, {"w": sharding})
    48
    """
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize for x, where in leaves)


# --- loops and collectives --------------------------------------------------------------------------------------------


def loop_sizes(trainer: Trainer) -> dict[str, int]:
    """Name -> turns of the loops of a trainer's step, outermost first: {'microbatch': 4, 'layer': 12}."""
    from perex_t5x import models

    config = getattr(trainer.model, "config", None)
    sizes = {"microbatch": trainer.options.num_microbatches}
    if config is None or not getattr(config, "scan_layers", False):
        return sizes
    if isinstance(trainer.model, models.EncoderDecoderModel) and config.num_encoder_layers != config.num_decoder_layers:
        return sizes | {"encoder layer": config.num_encoder_layers, "decoder layer": config.num_decoder_layers}
    return sizes | {"layer": config.num_decoder_layers}


# --- reductions of the statistics -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterReduction:
    """How the statistics of one parameter are reduced.

    Attributes:
      parameter: its name.
      shape: of the part that one device has over the data axes.
      reduction: see `perex_t5x.per_example.reductions.reducer`.
      norm_reduction: that of the pass for the norms, where clipping or skipping needs one; else ''.
      transient_bytes: of per-example gradients held at a time, on one device.
      note: why there is no better one.
      kernel: why no kernel does it; '' where one does, None where there is none for it.
      holding: where clipping or skipping needs the norms first: in one pass, with how many bytes held, or in two.
    """

    parameter: str
    shape: tuple[int, ...]
    reduction: str
    norm_reduction: str
    transient_bytes: int
    note: str
    kernel: str | None = None
    holding: str = ""


def reductions_of_step(trainer: Trainer, batch_spec: BatchSpec) -> tuple[ParameterReduction, ...]:
    """What `per_example.coverage` says of this trainer's step; empty for the plain gradient. Nothing is compiled."""
    shapes, _, _ = trainer.abstract_state({name: spec.shape for name, spec in batch_spec.items()})
    if trainer.has_plain_gradient(shapes.params):
        return ()
    seen: list[tuple[ParameterReduction, ...]] = []

    def observe(compute: Any, params: Any, *rest: Any) -> None:
        seen.append(_rows(params, compute.trace(params, *rest)))

    def traced(state: Any, batch: Any) -> Any:
        needs, shardings = trainer.needs(state.params), trainer.param_shardings(batch)
        options, operands = trainer.gradient_options(state.params), optimizers.operands_of(state.opt_state)
        return gradient_with_statistics(
            trainer.model, state, batch, needs, shardings, options, operands=operands, observe=observe
        )

    with trainer.partitioner.constraints():
        jax.eval_shape(traced, shapes, dict(batch_spec))
    return seen[0]


def _rows(params: Any, how: ReductionTrace) -> tuple[ParameterReduction, ...]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    norm_reductions = [r.reduction for r in how.norm_reductions] if how.norm_reductions else [""] * len(leaves)
    return tuple(
        ParameterReduction(
            keystr(path, simple=True, separator="/"),
            tuple(leaf.shape),
            r.reduction,
            norm_reduction,
            int(r.transient_bytes),
            r.note,
            r.kernel,
            str(how.holdings["default"]),
        )
        for (path, leaf), r, norm_reduction in zip(leaves, how.reductions, norm_reductions, strict=True)
    )
