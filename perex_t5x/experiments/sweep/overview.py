"""What a person sees of a sweep: while it runs, which runs are done and the time left; at its end, the best of each axis."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from perex_t5x.cli.progress import duration
from perex_t5x.experiments.sweep import axes
from perex_t5x.experiments.sweep.runs import DONE, FAILED, STOPPED, WAITING, Result, Run

_SHOWN = 8  # running runs


class Overview:
    """A line for each state. In a terminal it is refreshed in place; elsewhere one line every `period` seconds.

    Its methods may be called from several threads.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        finished: Mapping[str, Result],
        *,
        period: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._period = float(os.environ.get("PEREX_T5X_PROGRESS_SECONDS", "10")) if period is None else period
        self._stream, self._clock = stream or sys.stderr, clock
        self._begun = self._last = clock()
        self._examples = {run.name: run.examples for run in runs}
        self._steps = {run.name: run.train_steps for run in runs}
        self._status = {run.name: finished[run.name].status if run.name in finished else WAITING for run in runs}
        self._running: dict[str, tuple[int, float | None]] = {}
        self._earlier = self._done_examples()
        self._lock = threading.RLock()
        self._live: Any = None

    def __enter__(self) -> Overview:
        if self._stream.isatty():
            from rich import console, live

            self._live = live.Live(
                get_renderable=self.text, console=console.Console(file=self._stream), refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, name: str) -> None:
        with self._lock:
            self._running[name] = (0, None)

    def progress(self, name: str, step: int, loss: float | None) -> None:
        with self._lock:
            if name in self._running:
                self._running[name] = (step, loss)
        self._line()

    def finished(self, result: Result) -> None:
        with self._lock:
            self._running.pop(result.name, None)
            self._status[result.name] = result.status
        self._line(result)

    def _done_examples(self) -> float:
        done = sum(n for name, n in self._examples.items() if self._status[name] in (DONE, FAILED))
        parts = [step / max(self._steps[name], 1) * self._examples[name] for name, (step, _) in self._running.items()]
        return done + sum(parts)

    def counts(self) -> str:
        """'3 done, 2 running, 10 waiting, 0 failed, ETA 1:20'."""
        with self._lock:
            states = list(self._status.values())
            done, failed = states.count(DONE), states.count(FAILED)
            waiting = states.count(WAITING) + states.count(STOPPED) - len(self._running)
            made = self._done_examples() - self._earlier
            left = sum(self._examples.values()) - self._earlier - made
            seconds = (self._clock() - self._begun) / made * left if made > 0 else float("nan")
            return (
                f"{done} done, {len(self._running)} running, {waiting} waiting, {failed} failed of {len(states)}"
                f"  ETA {duration(seconds)}"
            )

    def text(self) -> str:
        """Several lines, for a terminal."""
        with self._lock:
            lines = [self.counts()]
            for name, (step, loss) in list(self._running.items())[:_SHOWN]:
                shown = "" if loss is None else f"  loss {loss:.4g}"
                lines.append(f"  {name}  step {step}/{self._steps[name]}{shown}")
            if len(self._running) > _SHOWN:
                lines.append(f"  and {len(self._running) - _SHOWN} more")
            return "\n".join(lines)

    def _line(self, result: Result | None = None) -> None:
        if self._live is not None:
            if result is not None and result.status == FAILED:
                self._live.console.print(f"{result.name} failed: {result.error}", markup=False)
            return
        with self._lock:
            if result is not None and result.status == FAILED:
                print(f"{result.name} failed: {result.error}", file=self._stream, flush=True)
            now = self._clock()
            last = result is not None and not self._running and WAITING not in self._status.values()
            if now - self._last < self._period and not last:
                return
            self._last = now
            running = [f"{n} {s}/{self._steps[n]}" + ("" if v is None else f" loss {v:.4g}")
                       for n, (s, v) in list(self._running.items())[:3]]  # fmt: skip
            print("  ".join([self.counts(), *running]), file=self._stream, flush=True)


# --- at the end -------------------------------------------------------------------------------------------------------


_MOST_ROWS = 40


def best_table(runs: Sequence[Run], results: Sequence[Result]) -> str:
    """For every value of every axis but the seed: the best mean over seeds of the last validation loss, and its setting."""
    means = _means(runs, results)
    lines = [f"{'axis':<24} {'value':<24} {'validation loss':>15}  at"]
    for axis, values in axes.values_by_axis([run.values for run in runs]).items():
        if axis == axes.SEED or len(values) < 2:
            continue
        for value in values:
            here = [(loss, setting) for setting, loss in means.items() if dict(setting).get(axis) == repr(value)]
            shown = f"{min(here)[0]:>15.4f}  {_at(min(here)[1], axis)}" if here else f"{'-':>15}"
            lines.append(f"{axis:<24} {value!s:<24} {shown}".rstrip())
    if len(lines) == 1:
        return "\n".join(f"validation loss {loss:.4f}  {_at(setting, '')}".rstrip() for setting, loss in means.items())
    return "\n".join(lines[:_MOST_ROWS])


def _means(runs: Sequence[Run], results: Sequence[Result]) -> dict[tuple[tuple[str, str], ...], float]:
    """Setting without seed -> mean over seeds; a setting with a run that failed is left out."""
    losses_by_setting: dict[tuple[tuple[str, str], ...], list[float | None]] = {}
    for run, result in zip(runs, results, strict=True):
        if result.status in (DONE, FAILED):
            setting = tuple((axis, repr(value)) for axis, value in run.values.items() if axis != axes.SEED)
            losses_by_setting.setdefault(setting, []).append(result.eval_loss)
    means = {}
    for setting, losses in losses_by_setting.items():
        known = [loss for loss in losses if loss is not None]
        if len(known) == len(losses):
            means[setting] = sum(known) / len(known)
    return means


def _at(setting: tuple[tuple[str, str], ...], axis: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting if name != axis)


def closing_words(folder: str, runs: Sequence[Run], results: Sequence[Result]) -> str:
    """The end of a sweep's output."""
    count = {status: sum(r.status == status for r in results) for status in ("done", "failed", "waiting", "stopped")}
    states = ", ".join(f"{n} {status}" for status, n in count.items() if n)
    failed = [f"  {r.name}: {r.error}" for r in results if r.status == FAILED]
    parts = ["", f"{len(results)} runs: {states}.", *failed[:10]]
    if len(failed) > 10:
        parts.append(f"  and {len(failed) - 10} more, see results.csv")
    if count["done"]:
        parts += ["", best_table(runs, results)]
    parts += [
        "",
        f"results  {folder}/results.csv",
        f"report   python -m perex_t5x.experiments.report {shlex.quote(folder)}",
    ]
    return "\n".join(parts)
