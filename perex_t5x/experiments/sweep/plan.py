"""From a sweep's description to its runs: parsed, scaled, named and checked before the first of them starts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gin
from absl import logging

from perex_t5x import cli, gin_utils
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import Sweep, axes, scaling
from perex_t5x.experiments.sweep.runs import Result, Run

_GIN = re.compile(r"[@%][\w./]+(\(\))?")


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep.

    Attributes:
      sweep: what it was made from.
      files, bindings, search_paths: what all runs have in common.
      runs: in the order in which they are started.
    """

    sweep: Sweep
    files: tuple[str, ...]
    bindings: tuple[str, ...]
    search_paths: tuple[str, ...]
    runs: tuple[Run, ...]

    def axes(self) -> dict[str, list[Any]]:
        """Axis -> its values."""
        return axes.values_by_axis([run.values for run in self.runs])

    def described(self) -> dict[str, Any]:
        """What sweep.json holds."""
        sweep, first = self.sweep, self.runs[0]
        names = sweep.rules
        return {
            "name": sweep.name,
            "title": sweep.title,
            "question": sweep.question,
            "gin_files": list(self.files),
            "gin_bindings": list(self.bindings),
            "rule": (names[0] if len(names) == 1 else names) if sweep.batch_sizes is not None else None,
            "base_batch_size": sweep.base_batch_size or first.base_batch_size,
            "base_learning_rate": sweep.base_learning_rate or first.base_learning_rate,
            "axes": self.axes(),
            "weight_decay": scaling.weight_decay_words(names, sweep.weight_decay_rule),
            "runs": [run.described() for run in self.runs],
        }

    def run(self, folder: str, **options: Any) -> list[Result]:
        """Runs what is not finished in `folder`; see `perex_t5x.experiments.sweep.execute.run` for the options."""
        from perex_t5x.experiments.sweep import execute

        return execute.run(self, folder, **options)


def make(
    sweep: Sweep,
    gin_files: Sequence[str] = (),
    gin_bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    check: bool = True,
    flags: Sequence[str] = (),
) -> Plan:
    """See `Sweep.plan`."""
    problems: list[str] = []
    parts = axes.parts(sweep, problems)
    asked, sweep = sweep, axes.usable(sweep)
    files = tuple(gin_files or sweep.gin_files)
    if not files:
        raise ConfigError("no Gin files: give --gin_file=..., or sweep.Sweep.gin_files = [...].")
    common = tuple([*(f"{name} = {written(v)}" for name, v in sweep.gin_bindings.items()), *gin_bindings])
    parse = _Parser(files, common, tuple(search_paths), set(sweep.files))
    try:
        parse()
    except ConfigError as e:
        raise ConfigError(_numbered([*problems, str(e)])) from e
    parts = _known_bindings(parts, parse, problems)
    runs = _runs(sweep, axes.product(parts), parse, problems)
    if check:
        _check_configurations(runs, problems)
    if problems:
        raise ConfigError(_numbered(list(dict.fromkeys(problems))))
    runs = [dataclasses.replace(run, flags=tuple(flags)) for run in runs]
    return Plan(asked, files, common, tuple(search_paths), tuple(runs))


def written(value: Any) -> str:
    """A value as Gin reads it; a string that starts with @ or % is a reference.

    >>> written(0.5), written("text"), written("@optax.adamw"), written("%BATCH_SIZE")
    ('0.5', "'text'", '@optax.adamw', '%BATCH_SIZE')
    """
    return value if isinstance(value, str) and _GIN.fullmatch(value) else repr(value)


def _numbered(problems: Sequence[str]) -> str:
    problems = [cli.cleaned(problem).strip() for problem in problems]
    if len(problems) == 1:
        return f"sweep: {problems[0]}"
    lines = [f"{i}. {problem}" for i, problem in enumerate(problems, 1)]
    return "\n".join([f"the sweep has {len(problems)} problems:", *lines])


class _Parser:
    """Parses the common configuration with some runs' files and bindings."""

    def __init__(
        self, files: tuple[str, ...], common: tuple[str, ...], search_paths: tuple[str, ...], file_axes: set[str]
    ):
        self.files, self.common, self.search_paths, self.file_axes = files, common, search_paths, file_axes

    def all_files(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        added = [values[axis] for axis in values if axis in self.file_axes]
        return (*self.files, *(f for entry in added for f in ([entry] if isinstance(entry, str) else entry)))

    def bindings(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of the grid; batch size, rate and seed are bound separately."""
        special = {*axes.OWN, *self.file_axes}
        return tuple(f"{name} = {written(value)}" for name, value in values.items() if name not in special)

    def __call__(self, values: Mapping[str, Any] | None = None) -> None:
        values = values or {}
        bindings = [*self.common, *self.bindings(values)]
        parse_configuration(self.all_files(values), bindings, self.search_paths)


def _known_bindings(parts: list[Any], parse: _Parser, problems: list[str]) -> list[Any]:
    """The parts whose files and bindings Gin knows, each tried by itself."""
    kept = []
    for part in parts:
        wrong = set()
        for i, setting in enumerate(part):
            if set(setting) <= set(axes.OWN):
                continue
            try:
                parse(setting)
            except ConfigError as e:
                wrong.add(i)
                shown = ", ".join(f"{name} = {value!r}" for name, value in setting.items())
                problems.append(f"{shown}: {cli.cleaned(str(e))}")
                if not any(name in parse.file_axes for name in setting):
                    wrong.update(range(len(part)))  # the name is wrong, not this value alone
                    break
        usable = [setting for i, setting in enumerate(part) if i not in wrong]
        if usable:
            kept.append(usable)
    return kept


def _runs(sweep: Sweep, combinations: list[dict[str, Any]], parse: _Parser, problems: list[str]) -> list[Run]:
    """The runs that can be described; a rule that cannot be applied is added to `problems`."""
    bases: dict[tuple[Any, ...], scaling.BaseSettings] = {}
    runs = []
    for name, values in zip(axes.names(combinations), combinations, strict=True):
        configuration = parse.all_files(values), parse.bindings(values)
        try:
            if configuration not in bases:
                parse(values)
                bases[configuration] = _checked_base(scaling.read_settings())
            runs.append(_run(name, values, sweep, bases[configuration], parse))
        except ConfigError as e:
            problems.append(str(e))
    return runs


def _checked_base(base: scaling.BaseSettings) -> scaling.BaseSettings:
    for setting in (base.batch_size, base.total_steps):
        if not isinstance(setting.value, int) or isinstance(setting.value, bool) or setting.value < 1:
            raise ConfigError(f"{setting.name} = {setting.value!r}: must be a positive whole number.")
    return base


def _run(name: str, values: dict[str, Any], sweep: Sweep, base: scaling.BaseSettings, parse: _Parser) -> Run:
    files, bindings = parse.all_files(values), parse.bindings(values)
    base_batch_size = sweep.base_batch_size or base.batch_size.value
    base_rate = sweep.base_learning_rate or (base.rate.value if base.rate is not None else None)
    rate = values.get(axes.LEARNING_RATE, sweep.base_learning_rate)
    if axes.RATE_FACTOR in values:
        if base_rate is None:
            raise ConfigError("rate_factors needs a base learning rate, and the configuration has none.")
        rate = base_rate * values[axes.RATE_FACTOR]
    batch_size, seed = values.get(axes.BATCH_SIZE, base_batch_size), values.get(axes.SEED, 0)
    scaled = scaling.scale(
        base,
        batch_size=batch_size,
        base_batch_size=base_batch_size,
        rule=values.get(axes.RULE, sweep.rules[0]),
        learning_rate=rate,
        seed=seed,
        weight_decay_rule=sweep.weight_decay_rule,
    )
    shared = (*parse.common, *bindings, *scaled.configuration)
    digest = hashlib.sha256(repr((files, shared)).encode()).hexdigest()[:16]
    return Run(
        name=name,
        values=values,
        files=files,
        bindings=(*shared, *scaled.own),
        own_bindings=(*bindings, *scaled.configuration, *scaled.own),
        batch_size=batch_size,
        learning_rate=scaled.learning_rate,
        train_steps=scaled.train_steps,
        seed=seed,
        examples=scaled.train_steps * batch_size,
        base_batch_size=base_batch_size,
        base_learning_rate=base_rate,
        group=digest,
        note=scaled.note,
        search_paths=parse.search_paths,
    )


# --- a run's configuration in Gin -------------------------------------------------------------------------------------


def parse_configuration(
    files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], model_dir: str = "sweep"
) -> None:
    """Replaces the configuration that Gin holds by that of a run, with its own MODEL_DIR."""
    gin.clear_config()
    gin_utils.parse_gin_flags(search_paths, files, [*bindings, f"MODEL_DIR = {model_dir!r}"])


def _check_configurations(runs: Sequence[Run], problems: list[str]) -> None:
    """Dry-runs configurations until every value has been seen with every batch size."""
    seen: set[Any] = set()
    for run in runs:
        fixed = (axes.SEED, axes.LEARNING_RATE, axes.RATE_FACTOR, axes.RULE)
        pairs = {(run.batch_size, k, repr(v)) for k, v in run.values.items() if k not in fixed} | {run.batch_size}
        if pairs <= seen:
            continue
        seen |= pairs
        if problem := dry_run(run):
            problems.append(problem)


def dry_run(run: Run, prepare: Callable[[], None] = lambda: None) -> str | None:
    """The error of `perex_t5x.train --dry_run` for a run's configuration; None if there is none.

    `prepare` is called once the configuration is parsed.
    """
    from perex_t5x import train as train_script

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()), quiet_logging():
        try:
            parse_configuration(run.files, run.bindings, run.search_paths, scratch)
            prepare()
            gin_utils.call(train_script.train, dry_run=True)
        except ConfigError as e:
            return cli.cleaned(str(e))
        except Exception as e:
            what = f"{run.name} ({'; '.join(run.own_bindings)})"
            return f"{what} cannot be built: {type(e).__name__}: {cli.cleaned(str(e))}"
    return None


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
    """Logs warnings and errors only: every run's own messages are too many for a sweep."""
    former = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(former)
