"""The cycles and memory of mean and mean square, computed five ways, for shipped models and chips: docs/overhead.md.

    python -m perex_t5x.preflight.overhead                                       # everything; hours
    python -m perex_t5x.preflight.overhead --models=150m --chips=v5e --out=-     # some of it, to the terminal

Only gradients are compiled, without an optimizer, for 4 chips with 8 examples per device. Every device has all parameters;
where the plain gradient then does not fit, they are sharded (FSDP), and only the ways that support this are compiled.
Reports are cached, as by `python -m perex_t5x.preflight`.

| way | |
|---|---|
| plain | the gradient of the batch loss |
| vmap | `jax.vmap` of the gradient, then the sums |
| micro_grad | `optax.microbatching.micro_grad`, one example at a time |
| surgery | `per_example.grad_statistics(..., kernels=False)` |
| surgery + kernels | `per_example.grad_statistics` |

The plain gradient is compiled for all of a device's examples at once and for one at a time; the one with fewer cycles
counts. Where that is one at a time, surgery has the same choice.
"""

from __future__ import annotations

if __name__ == "__main__":
    from perex_t5x import cli

    cli.run("perex_t5x.preflight.overhead.main", __doc__, flags="perex_t5x.preflight.overhead.define_flags")

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from absl import flags

from perex_t5x.cli import console
from perex_t5x.errors import ConfigError
from perex_t5x.hardware.chips import CHIPS
from perex_t5x.hardware.devices import tpu_devices, use_cpu_backend
from perex_t5x.hardware.slices import known_topologies, num_chips
from perex_t5x.per_example import GradStatistics

if TYPE_CHECKING:
    from perex_t5x.preflight.step import StepReport

PLAIN, VMAP, MICRO_GRAD, SURGERY, KERNELS = "plain", "vmap", "micro_grad", "surgery", "surgery + kernels"
WAYS = (PLAIN, VMAP, MICRO_GRAD, SURGERY, KERNELS)
STATISTICS = ("mean", "mean_square")
EXAMPLES_PER_DEVICE = 8
OUT = "docs/overhead.md"

# Gin files and bindings; the encoder-decoder is scanned here, so that it compiles in minutes.
MODELS = {
    "150m": (["models/150m.gin"], ["TASK_FEATURE_LENGTHS = {'targets': 1024}"]),
    "1_2b": (["models/1_2b.gin"], ["TASK_FEATURE_LENGTHS = {'targets': 1024}"]),
    "t5_1_1_base": (
        ["models/t5_1_1_base.gin"],
        [
            "TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 114}",
            "models.T5Config.scan_layers = True",
            "models.T5Config.remat_policy = 'minimal'",
        ],
    ),
}


def topologies() -> dict[str, str]:
    """Chip -> its slice of 4 chips."""
    return {name: next(t for t in known_topologies(name) if num_chips(t) == 4) for name in CHIPS}


@dataclasses.dataclass(frozen=True)
class Row:
    """One program, whose `report` is None where it does not fit; `plain` is that of the plain one on the same mesh."""

    model: str
    chip: str
    mesh: str
    way: str
    report: StepReport | None
    plain: StepReport | None
    one_at_a_time: bool

    def ratios(self) -> tuple[float, float] | None:
        """Cycles and temporaries, as multiples of the plain one's; None where one of the two does not fit."""
        if self.report is None or self.plain is None:
            return None
        return self.report.cycles / self.plain.cycles, self.report.temp_bytes / self.plain.temp_bytes


def rows(models: Sequence[str], chips: Sequence[str], cache: Any, working: Any) -> Iterator[Row]:
    """Compiles the programs of each model for each chip."""
    for model in models:
        for chip in chips:
            for mesh, ways in (("dp", WAYS), ("fsdp", (PLAIN, SURGERY, KERNELS))):
                compiled = list(_rows_on(model, chip, mesh, ways, cache, working))
                yield from compiled
                if any(row.report for row in compiled[1:]):
                    break


def _rows_on(model: str, chip: str, mesh: str, ways: Sequence[str], cache: Any, working: Any) -> Iterator[Row]:
    from perex_t5x.preflight import step

    files, bindings = MODELS[model]
    devices = tpu_devices(topologies()[chip])
    files = [*files, "runs/pretrain.gin", f"meshes/{mesh}.gin"]
    trainer, spec = step.build(files, [*bindings, f"BATCH_SIZE = {EXAMPLES_PER_DEVICE * len(devices)}"], devices)
    plain, sizes = None, (False, True)
    for way in ways:
        reports = {}
        for one_at_a_time, program in _programs(way, trainer, sizes).items():
            what = f"{model}, {chip}, {mesh}: {way}{', one at a time' if one_at_a_time else ''}"
            with working(what), contextlib.suppress(step.DoesNotFitError):
                reports[one_at_a_time] = cache.report_of(_lowered(trainer, spec, program), trainer.partitioner.mesh)
        best = min(reports, key=lambda size: reports[size].cycles, default=False)
        if way == PLAIN:
            plain, sizes = reports.get(best), (False, True) if best else (False,)
        yield Row(model, chip, mesh, way, reports.get(best), plain, best)
        if plain is None:
            return


# --- programs ---------------------------------------------------------------------------------------------------------


def _lowered(trainer: Any, spec: Any, program: Callable[..., Any]) -> Any:
    """The gradients of a program, lowered for the trainer's mesh."""
    shapes, shardings, _ = trainer.abstract_state({name: s.shape for name, s in spec.items()})
    rows = {name: trainer.partitioner.data_sharding for name in spec}
    jitted = jax.jit(lambda state, batch: program(state, batch), in_shardings=(shardings, rows))
    with trainer.partitioner.constraints():
        return jitted.lower(shapes, dict(spec))


def _programs(way: str, trainer: Any, sizes: Sequence[bool]) -> dict[bool, Callable[..., Any]]:
    """One example at a time or not -> a function from (state, batch) to the mean, or (mean, mean square)."""
    from perex_t5x import gradients

    def plain(one_at_a_time: bool, state: Any, batch: Any) -> Any:
        options = dataclasses.replace(trainer.options, num_microbatches=EXAMPLES_PER_DEVICE if one_at_a_time else 1)
        return gradients.batch_gradient(trainer.model, state, batch, trainer.param_shardings(batch), options).mean

    def statistics(one_at_a_time: bool, state: Any, batch: Any, kernels: bool = True, method: str = "surgery") -> Any:
        count = EXAMPLES_PER_DEVICE if one_at_a_time else 1
        options = dataclasses.replace(trainer.options, num_microbatches=count, kernels=kernels)
        shardings = trainer.param_shardings(batch)
        gradient = gradients.gradient_with_statistics(
            trainer.model, state, batch, STATISTICS, shardings, options, method=method
        )
        computed = cast(GradStatistics, gradient.statistics)  # None for `batch_gradient` alone
        return computed.mean, computed.mean_square

    if way == MICRO_GRAD:
        return {True: functools.partial(_micro_grad, trainer)}
    if way == VMAP:
        return {False: functools.partial(statistics, False, method="vmap")}
    if way == PLAIN:
        return {size: functools.partial(plain, size) for size in sizes}
    return {size: functools.partial(statistics, size, kernels=way == KERNELS) for size in sizes}


def _micro_grad(trainer: Any, state: Any, batch: Any) -> Any:
    """Replicated parameters: each device its own examples by optax, then their mean over the devices."""
    from jax.sharding import PartitionSpec
    from optax import microbatching

    from perex_t5x.train_state import example_keys

    partitioner = trainer.partitioner

    def loss(params: Any, rows: Any) -> Any:
        batch, keys, normalizer = rows
        with partitioner.manual():
            return trainer.model.loss_fn(params, batch, keys, normalizer[0])[0]

    gradient = microbatching.micro_grad(
        loss,
        microbatch_size=1,
        accumulator=microbatching.AccumulationType.MEAN,
        transform_fn=lambda g: (g, jax.tree.map(jnp.square, g)),
    )

    def on_device(params: Any, batch: Any, keys: Any, normalizer: Any) -> Any:
        each = jnp.broadcast_to(normalizer, (keys.shape[0],))
        return jax.lax.pmean(gradient(params, (batch, keys, each)), partitioner.batch_axes)

    split, whole = PartitionSpec(partitioner.batch_axes), PartitionSpec()
    run = jax.shard_map(
        on_device,
        mesh=partitioner.mesh,
        in_specs=(whole, split, split, whole),
        out_specs=whole,
        axis_names=set(partitioner.batch_axes),
        check_vma=False,
    )
    examples = next(iter(batch.values())).shape[0]
    keys = example_keys(state.rng, state.step, examples)
    return run(state.params, dict(batch), keys, trainer.model.loss_normalizer(batch) / examples)


# --- the table --------------------------------------------------------------------------------------------------------

_HEADER = """# The cost of mean and mean square

Made by `python -m perex_t5x.preflight.overhead`, whose help describes what is compiled. Cycles and temporary memory (HBM)
are multiples of the plain gradient's, each at the better of two microbatch sizes: all 8 examples of a device at once, or one
at a time (marked ¹). How cycles are counted, and what is not: [preflight.md](preflight.md). *dp*: every device has all
parameters. *fsdp*: they are sharded, and one example at a time gathers them for each; collectives are not counted. A dash:
does not fit on the device; an empty cell: not possible, or not compiled.
"""


def as_markdown(rows: Sequence[Row]) -> str:
    """The page."""
    lines = ["| model | chip | mesh | | " + " | ".join(WAYS) + " |", "|---|---|---|---|" + "---|" * len(WAYS)]
    keys = dict.fromkeys((r.model, r.chip, r.mesh) for r in rows)
    for key in keys:
        mine = {r.way: r for r in rows if (r.model, r.chip, r.mesh) == key}
        if mine[PLAIN].report is None:
            continue
        cells = [_cells(mine[way]) if way in mine else ("", "") for way in WAYS]
        for what, line in zip(("cycles", "temporaries"), zip(*cells, strict=True), strict=True):
            lines.append("| " + " | ".join((*key, what, *line)) + " |")
    return _HEADER + "\n" + "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, str]:
    """Cycles and temporaries."""
    ratios = row.ratios()
    if row.report is None or ratios is None:
        return "-", "-"
    mark = "¹" if row.one_at_a_time else ""
    if row.way == PLAIN:
        return f"{row.report.cycles / 1e6:.1f} M{mark}", f"{row.report.temp_bytes / 1e9:.2f} GB"
    cycles, temporaries = ratios
    return f"{cycles:.2f}{mark}", f"{temporaries:.2f}"


def _chosen(flag: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--{flag}: unknown {', '.join(unknown)}. Known are {', '.join(known)}.")
    return list(names or known)


def main(args: Any) -> None:
    models, chips = _chosen("models", args.models, list(MODELS)), _chosen("chips", args.chips, list(CHIPS))
    use_cpu_backend()
    console.import_tensorflow_quietly()
    from perex_t5x.cli import progress
    from perex_t5x.preflight import report_cache

    done: list[Row] = []
    for row in rows(models, chips, report_cache.ReportCache(report_cache.default_folder()), progress.Working()):
        done.append(row)
        ratios = row.ratios()
        shown = "cycles {:.3f}, temporaries {:.3f}".format(*ratios) if ratios else "does not fit"
        print(f"{row.model} {row.chip} {row.mesh} {row.way}: {shown}", file=sys.stderr, flush=True)
        if args.out != "-":  # after each row: otherwise hours may be lost
            Path(args.out).write_text(as_markdown(done), encoding="utf-8")
    if args.out == "-":
        print(as_markdown(done))


def define_flags() -> None:
    flags.DEFINE_list("models", [], f"Some of {', '.join(MODELS)}; all by default.")
    flags.DEFINE_list("chips", [], f"Some of {', '.join(CHIPS)}; all by default.")
    flags.DEFINE_string("out", OUT, "File to write; '-': the terminal.")
