"""A run's configuration in Gin: parsed in the place of the former one, and checked without running."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import gin
from absl import logging

from perex_t5x import cli, gin_utils
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import axes
from perex_t5x.experiments.sweep.runs import Run


def parse(files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], model_dir: str = "sweep") -> None:
    """Makes a run's configuration the one that Gin holds; MODEL_DIR, which every run has for itself, is filled in."""
    gin.clear_config()
    gin_utils.parse_gin_flags(search_paths, files, [*bindings, f"MODEL_DIR = {model_dir!r}"])


def check(runs: Sequence[Run], slips: list[str]) -> None:
    """Does what `perex_t5x.train --dry_run` does, until every value has been seen with every batch size."""
    seen: set[Any] = set()
    for run in runs:
        fixed = (axes.SEED, axes.LEARNING_RATE, axes.RATE_FACTOR, axes.RULE)
        pairs = {(run.batch_size, k, repr(v)) for k, v in run.values.items() if k not in fixed} | {run.batch_size}
        if pairs <= seen:
            continue
        seen |= pairs
        if slip := _dry_run(run):
            slips.append(slip)


def _dry_run(run: Run) -> str | None:
    from perex_t5x import train as train_script

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()), quiet():
        try:
            parse(run.files, run.bindings, run.search_paths, scratch)
            gin.get_configurable(train_script.train)(dry_run=True)
        except ConfigError as e:
            return cli.cleaned(str(e))
        except Exception as e:  # whatever a value of the wrong kind does inside an optimizer or a model
            return (
                f"{run.name} ({'; '.join(run.own_bindings)}) cannot be made: {type(e).__name__}: {cli.cleaned(str(e))}"
            )
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings and errors only: what every run would say of itself is too much for a sweep."""
    former = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(former)
