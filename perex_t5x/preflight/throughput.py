"""What the training step costs for shipped models and pods, beside MaxText's: docs/throughput.md.

    python -m perex_t5x.preflight.throughput                                   # everything; hours on two cores
    python -m perex_t5x.preflight.throughput --cases=1_2b-1024-full --out=-    # some of it, to the terminal

Every case is the whole sharded step, compiled for its pod with adamw on the plain gradient and with micro_adam and its
per-example statistics. With --schedules the lower bounds include the static schedules of all instructions, as MaxText's do;
compiling then takes more than twice as long. Reports are cached, as by `python -m perex_t5x.preflight`. Exit code 1 if a
requirement is missed.
"""

from __future__ import annotations

if __name__ == "__main__":
    from perex_t5x import cli

    cli.run("perex_t5x.preflight.throughput.main", __doc__, flags="perex_t5x.preflight.throughput.define_flags")

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from absl import flags

from perex_t5x.cli import console
from perex_t5x.errors import ConfigError, Reason
from perex_t5x.hardware.devices import use_cpu_backend
from perex_t5x.preflight.account import PreflightReport, measure
from perex_t5x.preflight.breakdown import CALIBRATION
from perex_t5x.preflight.render import format_bytes, markdown_table

OPTIMIZERS = ("adamw", "micro_adam")
STATISTICS_LIMIT = 1.05  # cycles of micro_adam with statistics, as multiples of adamw's
MAXTEXT_LIMITS = (0.91, 1.00)  # of MaxText's cycles: by the compiler's estimates, by the lower bound
NAMED = "minimal_with_context"
OUT = "docs/throughput.md"


@dataclass(frozen=True)
class Case:
    """One model on one pod.

    Attributes:
      model, mesh: names of Gin files.
      length: of a row, in tokens.
      rows: of the global batch.
      remat: `T5Config.remat_policy`.
      mfu, mfu_unhidden: required with all collectives hidden, with none; by the compiler's cycles.
      maxtext: MaxText's cycles at the same dimensions, by the compiler's estimates and by the lower bound; 0: not known.
    """

    model: str
    mesh: str
    length: int
    rows: int
    remat: str
    mfu: float
    mfu_unhidden: float = 0.0
    maxtext: tuple[float, float] = (0, 0)

    @property
    def name(self) -> str:
        short = {"full": "full", NAMED: "named"}.get(self.remat, self.remat)
        return f"{self.model}-{self.length}-{short}" + ("" if self.mesh == "v5e_256" else f"-{self.mesh}")

    def bindings(self) -> list[str]:
        return [
            f"TASK_FEATURE_LENGTHS = {{'targets': {self.length}}}",
            f"BATCH_SIZE = {self.rows}",
            f"models.T5Config.remat_policy = '{self.remat}'",
        ]


CASES = {
    case.name: case
    for case in (
        Case("1_2b", "v5e_256", 1024, 2048, "full", 0.62, maxtext=(821e6, 654e6)),
        Case("1_2b", "v5e_256", 1024, 2048, NAMED, 0.72, 0.58, (706e6, 530e6)),
        Case("1_2b", "v5e_256", 4096, 512, "full", 0.0, maxtext=(941e6, 782e6)),
        Case("1_2b", "v5e_256", 4096, 512, NAMED, 0.75, maxtext=(810e6, 0)),
        Case("1_2b", "v5e_256", 8192, 256, "full", 0.65),
        Case("1_2b", "v5p_512", 1024, 2048, NAMED, 0.60),
        Case("1_2b", "v6e_256", 1024, 2048, NAMED, 0.60),
        Case("8b", "v5p_512", 8192, 512, NAMED, 0.60),
        Case("8b", "v6e_256", 8192, 256, "save_dot_with_context_except_mlp", 0.0),
        Case("8b", "tpu7x_128", 8192, 256, NAMED, 0.0),
    )
}

# At commit ceaf2aa: attention of `jax.nn.dot_product_attention`, flattened products. As recorded then;
# T = 1024 was counted again with `breakdown` (A 1348 M, B 891 M), the other rows and MaxText's were not.
BEFORE = (
    ("1_2b, T = 1024, full", "1348 M", "894 M", "34 %", "3.6 GB"),
    ("1_2b, T = 4096, full", "2541 M", "1576 M", "22 %", "6.3 GB"),
    ("1_2b, T = 8192, full", "4110 M", "", "17 %", ""),
    ("1_2b, T = 1024, full, v5p", "650 M", "", "36 %", ""),
)
MAXTEXT = (
    ("T = 1024, full", "821 M", "654 M", "57 %", "1.7 GB"),
    ("T = 1024, `minimal_with_context`", "706 M", "530 M", "66 %", "9.1 GB"),
    ("T = 4096, full", "941 M", "782 M", "59 %", "1.7 GB"),
    ("T = 4096, `minimal_with_context`", "810 M", "", "69 %", "9.0 GB"),
)
_HEADER = f"""# Throughput

Made by `python -m perex_t5x.preflight.throughput`, whose help describes what is compiled. Cycles per step and chip: A, the
compiler's estimates with kernels by their static schedules; B, a lower bound, max(static schedule, products at peak, bytes
at full bandwidth) for every instruction. How they are counted, and what is not: [preflight.md](preflight.md). MFU: the
model's own FLOPs, full T x T attention, nothing recomputed; *hidden*: all collectives behind computation; *scheduled*: as
the program's schedule hides them; *none*: one after another. B marked ¹ is without the static schedules of XLA's own
instructions (`--schedules`), so a little lower, and not compared; causal blocks that kernels skip count in the MFU's
FLOPs, so that by B it may pass 100 %. {CALIBRATION}
"""
_BEFORE = """
## Before

The same step before splash attention, batched products, heads in the kernels' shapes and rotary as a product (commit
ceaf2aa). As recorded then; counting T = 1024 again gave A 1348 M and B 891 M, the other rows were not counted again:
"""
_MAXTEXT = """
## MaxText

MaxText's own training step at the dimensions of `1_2b` (20 layers, width 2048, 16 heads of 128, gated MLP 6144, vocabulary
32768, bfloat16), adamw, flash attention, FSDP over v5e 16x16, 8 rows of 1024 or 2 of 4096 a chip: its optimized program,
read by the same reader (`python -m perex_t5x.preflight.breakdown FILE`). It also clips gradients and has no z-loss;
embedding gathers and scatters are in neither count. Recorded earlier, not compiled
again for this table. Required of ours: at most 0.91 of its A and 1.00 of its B.
"""


def missed(case: Case, reports: Mapping[str, PreflightReport]) -> list[str]:
    """The requirements that a case misses, in words; `reports` by optimizer."""
    problems = [f"{name} does not fit" for name, report in reports.items() if not report.fits]
    steps = {name: report.step for name, report in reports.items() if report.step}
    if problems or "adamw" not in steps:
        return problems
    plain, plain_step = reports["adamw"], steps["adamw"]
    for what, value, limit in (
        ("MFU", plain.mfu or 0.0, case.mfu),
        ("MFU, none hidden", plain.mfu_unhidden or 0.0, case.mfu_unhidden),
    ):
        if value < limit:
            problems.append(f"{what} {value:.1%}, required {limit:.0%}")
    if "micro_adam" in steps and (ratio := steps["micro_adam"].cycles / plain_step.cycles) > STATISTICS_LIMIT:
        problems.append(f"statistics {ratio:.3f} x, allowed {STATISTICS_LIMIT}")
    # The lower bound is comparable only where it is made of the same.
    counted = (plain_step.cycles, plain_step.bound if plain_step.has_schedules else 0)
    for what, own, theirs, limit in zip("AB", counted, case.maxtext, MAXTEXT_LIMITS, strict=True):
        if own and theirs and own > limit * theirs:
            problems.append(f"{own / theirs:.3f} x MaxText's by {what}, allowed {limit}")
    return problems


def measured(
    names: Sequence[str], optimizers: Sequence[str], cache: Any, working: Any
) -> Iterator[tuple[Case, dict[str, PreflightReport]]]:
    """Compiles the cases of these names; what is there of a case is yielded after each of its optimizers."""
    from perex_t5x.preflight import step

    for case in (CASES[name] for name in names):
        reports: dict[str, PreflightReport] = {}
        for optimizer in optimizers:
            files = [
                f"models/{case.model}.gin",
                "runs/pretrain.gin",
                f"optimizers/{optimizer}.gin",
                f"meshes/{case.mesh}.gin",
            ]
            step.parse_gin(files, case.bindings())
            topology, slices = step.topology_macro()
            target = step.CompileTarget(cast(str, topology), slices)  # every mesh of `CASES` is that of a pod
            trainer, spec = step.build_parsed(target.devices())
            reports[optimizer] = measure(
                f"{case.name} {optimizer}", target, trainer, spec, cache, working, compare=False
            )
            yield case, dict(reports)


# --- the page ---------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "case",
    "optimizer",
    "A",
    "B",
    "MFU by A, hidden",
    "by B",
    "scheduled",
    "none",
    "HBM",
    "of adamw's",
    "of MaxText's A; B",
    "misses",
)


def as_markdown(results: Mapping[str, tuple[Case, Mapping[str, PreflightReport]]]) -> str:
    """The page."""
    rows = [row for case, reports in results.values() for row in _rows(case, reports)]
    kept = ("step", "A", "B", "MFU by A", "HBM")
    tables = markdown_table(_COLUMNS, rows), markdown_table(kept, BEFORE), markdown_table(kept, MAXTEXT)
    return "".join(f"{text}\n{table}\n" for text, table in zip((_HEADER, _BEFORE, _MAXTEXT), tables, strict=True))


def _rows(case: Case, reports: Mapping[str, PreflightReport]) -> Iterator[tuple[str, ...]]:
    plain, problems = reports["adamw"], missed(case, reports)
    for optimizer, report in reports.items():
        first = report is plain
        shown = f"{case.model}, T = {case.length}, {case.rows} rows, {case.mesh}, {case.remat}" if first else ""
        if report.step is None:
            yield (shown, optimizer, *[""] * 9, "does not fit")
            continue
        step = report.step
        mfus = (report.mfu, report.mfu_bound, report.mfu_scheduled, report.mfu_unhidden)
        against = "; ".join(
            f"{own / theirs:.3f}" if own and theirs else ""
            for own, theirs in zip((step.cycles, step.bound if step.has_schedules else 0), case.maxtext, strict=True)
        )
        yield (
            shown,
            optimizer,
            f"{step.cycles / 1e6:.0f} M",
            f"{step.bound / 1e6:.0f} M{'' if step.has_schedules else '¹'}",
            *("" if mfu is None else f"{mfu:.1%}" for mfu in mfus),
            format_bytes(step.peak_bytes),
            "" if first or plain.step is None else f"{step.cycles / plain.step.cycles:.3f}",
            against.strip("; ") if first else "",
            "; ".join(problems) or "none" if first else "",
        )


def main(args: Any) -> int:
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        raise ConfigError(f"--cases: unknown {', '.join(unknown)}. Known are {', '.join(CASES)}.")
    if args.optimizers[:1] != ["adamw"]:
        raise ConfigError(f"--optimizers={','.join(args.optimizers)}: adamw is compared with, so give it first.")
    if args.out != "-" and not Path(args.out).absolute().parent.is_dir():
        raise ConfigError(
            f"cannot write {args.out}: there is no folder {Path(args.out).absolute().parent}. Create it first."
        )
    use_cpu_backend()
    console.import_tensorflow_quietly()
    import jax

    from perex_t5x.cli import progress
    from perex_t5x.preflight import kernel_cycles, report_cache

    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read programs for devices that are not there
    schedules = kernel_cycles.Schedules() if args.schedules else None
    cache, results = report_cache.ReportCache(report_cache.default_folder(), schedules), {}
    for case, reports in measured(args.cases or list(CASES), args.optimizers, cache, progress.Working()):
        results[case.name] = case, reports
        last = list(reports.values())[-1]
        print(
            f"{last.name}: {f'{last.step.cycles / 1e6:.0f} M' if last.step else 'does not fit'}",
            file=sys.stderr,
            flush=True,
        )
        if args.out != "-":  # after each row: otherwise hours may be lost
            Path(args.out).write_text(as_markdown(results), encoding="utf-8")
    if args.out == "-":
        print(as_markdown(results))
    problems = [f"{case.name}: {problem}" for case, reports in results.values() for problem in missed(case, reports)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return Reason.ERROR.exit_code if problems else 0


def define_flags() -> None:
    flags.DEFINE_list("cases", [], f"Some of {', '.join(CASES)}; all by default.")
    flags.DEFINE_list("optimizers", list(OPTIMIZERS), "adamw, to which the others are compared, and others.")
    flags.DEFINE_bool("schedules", False, "Static schedules of all instructions in the lower bounds.")
    flags.DEFINE_string("out", OUT, "File to write; '-': the terminal.")
