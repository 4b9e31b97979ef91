"""The results as a page: tables, plots, and where a peer is ahead."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perex_t5x import extras, files
from perex_t5x.bench.engine_sections import AXES, JAX, TORCH
from perex_t5x.bench.programs import CLIP_NORM, CLIPPED, MOMENTS, NORMS, OURS, PLAIN, VMAP
from perex_t5x.bench.results import Ratio, Row, exponent, quartiles, ratios
from perex_t5x.bench.trainer_sections import BASELINES

_TOLERANCE = 1.05  # below, it may be the machine's noise (of times), or padding (of memory)
_TITLES = {
    "mlp": "MLP: {layers} square layers of width {mlp_width}, {examples} examples",
    "decoder": "Decoder: {layers} layers, width {width}, length {length}, {examples} examples",
    "scanned": "The same decoder, scanned and rematerialised; JAX alone",
}
# Why a peer may be ahead, by (peer, statistic); None: any statistic.
_WHY: dict[tuple[str, str | None], str] = {}
_GROWTH_FIGURE = "bench_growth.svg"

_INTRO = """# Benchmarks

{made}
Times and memory of what shares a machine say little alone, so everything is a ratio to a baseline that took turns with it in
the same process or, for processes, in the same minutes.

The peers are optional. jax_privacy is looked for in the environment of the command, PyTorch's and T5X in those of the
Pythons that are named, since their requirements contradict each other's:

<!-- not run: it installs packages and takes half an hour; tests/bench/test_proof.py runs sections at the smallest sizes -->
```sh
pip install jax_privacy
python -m venv .peers && .peers/bin/pip install numpy torch opacus backpack-for-pytorch
python -m perex_t5x.bench --torch_python=.peers/bin/python --t5x_python=/path/to/t5x/bin/python
```

One that is not there is named in the tables. `--sections=mlp` measures one section, a few minutes at most, and keeps the
others' results; `--check=1.5` ends with an error if ours falls behind its baselines in the same run.

## Statistics of per-example gradients

Three statistics, each by every library that can compute it, as ratios to *its own framework's* plain gradient of the same
batch, all at once. `{moments}`: mean(g), mean(g²) over the examples; `{norms}`: ‖g_i‖ of each; `{clipped}`: each g_i
scaled to a norm of at most {clip}, then the mean. The results are compared with each other before they are timed.

- *time*: the median of the rounds' ratios, quartiles in brackets, at the library's best microbatch size of all, 4 and 1
  (*size*). *memory*: what is needed besides parameters and batch, results included, at this size; *least*: at the size that
  needs least. JAX's is the compiler's; PyTorch's is its allocator's peak, as its profiler sees it.
- **bold**: less than ours by more than {tolerance}, as a ratio.
- `plain gradient` in microbatches is there to show what their size alone does to a CPU's caches.
- PyTorch's programs run in a process of their own, with {threads}. The rule for RMS norms, which BackPACK has none
  for, is this benchmark's.
"""


def write(folder: str, sections: Mapping[str, Any], command: str) -> list[str]:
    """Writes benchmarks.md and its plots; returns the files. Without vl-convert there are no plots."""
    written = []
    grown = [name for name in AXES if name in sections]
    if grown and extras.is_installed("vl_convert"):
        path = os.path.join(folder, "images", _GROWTH_FIGURE)
        files.write_atomically(path, _drawn(growth_figure({name: _points(sections[name]["rows"]) for name in grown})))
        written.append(path)
    path = os.path.join(folder, "benchmarks.md")
    files.write_atomically(path, text(sections, command, has_plot=bool(written)))
    return [*written, path]


def text(sections: Mapping[str, Any], command: str, has_plot: bool) -> str:
    """The page in Markdown."""
    threads = {row["threads"] for s in sections.values() for row in s["rows"] if "threads" in row}
    parts = [
        _INTRO.format(
            made=_made(sections, command),
            moments=MOMENTS,
            norms=NORMS,
            clipped=CLIPPED,
            clip=f"{CLIP_NORM:g}",
            tolerance=f"{_TOLERANCE:g}",
            threads=f"{' or '.join(map(str, sorted(threads)))} threads"
            if threads
            else "as many threads as there are cores",
        )
    ]
    ahead: list[str] = []
    for name in (name for name in _TITLES if name in sections):
        rows = sections[name]["rows"]
        dimensions = rows[0]["dimensions"]
        title = _TITLES[name].format(**dimensions, mlp_width=2 * dimensions["width"])
        parts.append("\n".join([f"### {title}", "", *_statistics_table(rows), *_rounds(sections[name])]))
        ahead += _ahead(name, ratios(rows))
    if any(name in sections for name in AXES):
        parts.append(_growth(sections, has_plot))
    for name, make in (("overhead", _overhead), ("processes", _processes), ("startup", _startup)):
        if name in sections:
            parts.append("\n".join([*make(sections[name]["rows"]), *_rounds(sections[name])]))
    if sections:
        parts.append("\n".join(["## Where a peer is ahead", "", *(ahead or ["Nowhere in the sections above."])]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _made(sections: Mapping[str, Any], command: str) -> str:
    about = f"`{command}`\n(its help says what is compared; `--dry_run` lists the sections and the peers it finds)"
    if not sections:
        return f"To be made by {about}: no section has been measured for this page yet."
    machines = " and ".join(sorted({s["machine"] for s in sections.values()}))
    return f"Made by {about}, on {machines}.\n{_versions(sections)}"


def _versions(sections: Mapping[str, Any]) -> str:
    found: dict[str, set[str]] = {}
    for section in sections.values():
        for name, version in section["versions"].items():
            found.setdefault(name, set()).add(version)
        for row in section["rows"]:
            for name, version in row.get("versions", {}).items():
                found.setdefault(name, set()).add(version)
    return "Versions: " + ", ".join(f"{name} {' and '.join(sorted(v))}" for name, v in found.items()) + "."


def _rounds(section: Mapping[str, Any]) -> list[str]:
    rounds = max(len(row["seconds"]) for row in section["rows"] if "seconds" in row)
    quick = " At the smallest sizes (--quick): to try the command, no measurement." if section["quick"] else ""
    return ["", f"{rounds} round{'s' * (rounds > 1)}, {section['date']}.{quick}"]


# --- statistics -------------------------------------------------------------------------------------------------------


def _statistics_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| statistic | program | time | size | memory | least (size) |"
    yield "|---|---|---|---|---|---|"
    found = ratios(rows)
    for framework in (JAX, TORCH):
        plain = [r for r in rows if r["framework"] == framework and r["peer"] == PLAIN and "seconds" in r]
        if whole := [r for r in plain if r["size"] is None]:
            seconds, size = statistics.median(whole[0]["seconds"]), whole[0]["bytes"]
            yield f"| | {framework}: {PLAIN}, all at once | 1 = {seconds * 1e3:.3g} ms | all | 1 = {size / 1e6:.3g} MB | |"
        if len(plain) > 1:
            of_plain = next(r for r in found if r.framework == framework and r.peer == PLAIN)
            yield _line("", f"{framework}: {PLAIN}, at its best", of_plain, None)
    for statistic in (MOMENTS, NORMS, CLIPPED):
        of_statistic = [r for r in found if r.statistic == statistic]
        ours = next((r for r in of_statistic if r.peer == OURS), None)
        for ratio in of_statistic:
            yield _line(statistic, f"{ratio.framework}: {_named(ratio.peer)}", ratio, ours)
        for row in rows:
            if row["statistic"] == statistic and "problem" in row:
                yield f"| {statistic} | {row['framework']}: {row['peer']} | {row['problem']} | | | |"


def _named(peer: str) -> str:
    return {OURS: "**perex_t5x**", VMAP: "`vmap(grad)`", "micro_grad": "`optax` `micro_grad`"}.get(peer, peer)


def _line(statistic: str, program: str, r: Ratio, ours: Ratio | None) -> str:
    def marked(value: float, of_ours: float | None) -> str:
        written = f"{value:.2f}"
        return f"**{written}**" if of_ours is not None and r is not ours and value * _TOLERANCE < of_ours else written

    time = f"{marked(r.time, ours and ours.time)} ({r.low:.2f} to {r.high:.2f})"
    least = f"{marked(r.least, ours and ours.least)} ({r.least_size or 'all'})"
    return f"| {statistic} | {program} | {time} | {r.size or 'all'} | {r.memory:.2f} | {least} |"


def _ahead(section: str, found: Sequence[Ratio]) -> Iterator[str]:
    """Sentences on every peer whose ratio is smaller than ours."""
    for ours in (r for r in found if r.peer == OURS):
        for r in found:
            if r.statistic != ours.statistic or r.peer == OURS:
                continue
            what = [
                f"{word} ({value:.2f}, ours {own:.2f})"
                for word, value, own in (("faster", r.time, ours.time), ("smaller", r.least, ours.least))
                if value * _TOLERANCE < own
            ]
            if what:
                why = _WHY.get((r.peer, r.statistic)) or _WHY.get((r.peer, None), "Not explained yet.")
                yield f"- {section}, {r.statistic}: {r.peer} ({r.framework}) is {' and '.join(what)}. {why}"


# --- growth -----------------------------------------------------------------------------------------------------------


def _points(rows: Sequence[Row]) -> list[tuple[int, Ratio]]:
    values = sorted({row["value"] for row in rows})
    return [(value, r) for value in values for r in ratios(row for row in rows if row["value"] == value)]


def _program(r: Ratio) -> str:
    return f"{r.framework}: {r.peer}" + ("" if r.peer == PLAIN else f", {r.statistic}")


def _growth(sections: Mapping[str, Any], has_plot: bool) -> str:
    lines = ["## How they grow", ""]
    base = next(sections[name]["rows"][0]["dimensions"] for name in AXES if name in sections)
    lines += [
        f"One of batch, length and depth is changed at a time, from {AXES['batch'][0]} examples of length "
        f"{AXES['length'][0]} and {AXES['depth'][0]} layers of width {base['width']} (MLP {base['mlp']}, vocabulary "
        f"{base['vocabulary']}; in JAX scanned and rematerialised, in PyTorch unrolled). Exponents p of seconds ~ valueᵖ "
        "and of bytes, fitted to all points; time at the faster of all at once and one at a time, memory at the smaller.",
        "",
    ]
    if has_plot:
        lines += [f"![Time and memory as ratios to the plain gradient](images/{_GROWTH_FIGURE})", ""]
    names = [name for name in AXES if name in sections]
    lines.append("| program | " + " | ".join(f"{name}: time | memory" for name in names) + " |")
    lines.append("|---" * (1 + 2 * len(names)) + "|")
    fitted: dict[str, dict[str, str]] = {}
    for name in names:
        series: dict[str, list[tuple[int, Ratio]]] = {}
        for value, r in _points(sections[name]["rows"]):
            series.setdefault(_program(r), []).append((value, r))
        for program, points in series.items():
            if len(points) > 1:
                time = exponent([(value, r.seconds) for value, r in points])
                memory = exponent([(value, r.least_bytes) for value, r in points])
                fitted.setdefault(program, {})[name] = f"{time:.2f} | {memory:.2f}"
    for program, by_axis in fitted.items():
        lines.append(f"| {program} | " + " | ".join(by_axis.get(name, " | ") for name in names) + " |")
    problems = {
        f"{r['framework']}: {r['peer']}, {r['statistic']}: {r['problem']} ({name} {r['value']})"
        for name in names
        for r in sections[name]["rows"]
        if "problem" in r
    }
    lines += ["", *(f"- {problem}" for problem in sorted(problems))]
    for name in names:
        lines += _rounds(sections[name])[1:] if name == names[-1] else []
    return "\n".join(lines)


def growth_figure(points: Mapping[str, Sequence[tuple[int, Ratio]]]) -> dict[str, Any]:
    """A Vega-Lite specification: a column for each axis, time above memory."""
    from perex_t5x.experiments.report.plot import FIGURE, distinct_colours

    rows = [
        {"axis": axis, "value": value, "program": _program(r), "time": r.time, "memory": r.least}
        for axis, found in points.items()
        for value, r in found
        if r.peer != PLAIN
    ]
    entries = distinct_colours(list(dict.fromkeys(row["program"] for row in rows)))
    colour = {
        "field": "program",
        "type": "nominal",
        "title": None,
        "scale": {"domain": [e.key for e in entries], "range": [e.light for e in entries]},
        "legend": {"orient": "bottom", "columns": 2, "labelLimit": 400},
    }

    def chart(axis: str, quantity: str) -> dict[str, Any]:
        scale = {"type": "log", "base": 2, "nice": False}
        x = {"field": "value", "type": "quantitative", "title": axis, "scale": scale, "axis": {"values": AXES[axis]}}
        title = f"{quantity} / plain gradient's"
        y = {"field": quantity, "type": "quantitative", "title": title, "scale": {"type": "log", "nice": False}}
        return {
            "transform": [{"filter": f"datum.axis == '{axis}'"}],
            "mark": {"type": "line", "point": True},
            "width": 230,
            "height": 200,
            "encoding": {"x": x, "y": y, "color": colour},
        }

    columns = [{"hconcat": [chart(axis, quantity) for axis in points]} for quantity in ("time", "memory")]
    return {"data": {"values": rows}, "vconcat": columns, "config": FIGURE}


def _drawn(spec: Mapping[str, Any]) -> str:
    from perex_t5x.experiments.report.plot import converter

    return converter().vegalite_to_svg(dict(spec))


# --- the trainer and its start ----------------------------------------------------------------------------------------


def _overhead(rows: Sequence[Row]) -> Iterator[str]:
    yield "## The training loop"
    yield ""
    yield (
        "`tiny` (2 layers, width 128), AdamW, {batch} examples of length {length}: the whole loop (data, metrics, log "
        "files) and a bare one of the same model on the same batches, in one process.".format(**rows[0]["dimensions"])
    )
    yield ""
    yield "| loop | seconds a step | times the bare loop's |"
    yield "|---|---|---|"
    bare = next((r["seconds"] for r in rows if r["peer"] == "bare JAX loop" and "seconds" in r), None)
    for row in rows:
        yield _loop_line(row, bare)


def _loop_line(row: Row, bare: Sequence[float] | None, *more: str) -> str:
    if "problem" in row:
        return f"| {row['peer']} | {row['problem']} | |" + " |" * len(more)
    low, middle, high = quartiles([a / b for a, b in zip(row["seconds"], bare or row["seconds"], strict=True)])
    cells = [row["peer"], f"{statistics.median(row['seconds']):.3f}", f"{middle:.3f} ({low:.3f} to {high:.3f})", *more]
    return f"| {' | '.join(cells)} |"


def _processes(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Training in processes of their own"
    yield ""
    yield (
        "{steps} steps of {batch} examples of length {length}, each loop in a process of its own, in turns. The bare loop "
        "makes random ids; the others read, tokenize and pack `python_stdlib_lm`. T5X trains its own decoder of the same "
        "sizes. Time is from the start of the process, memory the most that was resident.".format(
            **rows[0]["dimensions"]
        )
    )
    yield ""
    yield "| loop | seconds a step | times the bare loop's | first step done after | peak memory |"
    yield "|---|---|---|---|---|"
    bare = next((r["seconds"] for r in rows if r["peer"] == "bare JAX loop" and "seconds" in r), None)
    for row in rows:
        more = ("", "")
        if "problem" not in row:
            first, peak = (statistics.median(row[name]) for name in ("first_step_seconds", "peak_bytes"))
            more = (f"{first:.1f} s", f"{peak / 1e6:.0f} MB")
        yield _loop_line(row, bare, *more)


def _startup(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Start-up"
    yield ""
    yield "Seconds from the start of a process to its end, or to that of its first training step; files already in memory."
    yield ""
    yield "| command | seconds | baseline | times its |"
    yield "|---|---|---|---|"
    medians = {row["peer"]: quartiles(row["seconds"]) for row in rows}
    for name, (low, middle, high) in medians.items():
        base = BASELINES.get(name)
        ratio = f"{middle / medians[base][1]:.2f}" if base else ""
        yield f"| {name} | {middle:.2f} ({low:.2f} to {high:.2f}) | {base or ''} | {ratio} |"
