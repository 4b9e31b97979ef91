"""The package's imports, read with `ast`: they point down the list of rooms, without cycles and without private names."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "perex_t5x"

# From the bottom to the top: a room may import its own modules and those of rooms in lower rows. docs/architecture.md.
ROOMS = (
    ("errors", "arguments", "extras", "files", "buckets", "lease", "checksums", "hardware", "zoo"),
    ("per_example",),
    ("optimizers",),
    ("cli",),
    ("gin_scan", "gin_utils", "gin_values", "distributed", "schedules", "best_checkpoints", "utils"),
    ("partitioning",),
    ("models", "data"),
    (
        "actions",
        "train_state",
        "gradients",
        "monitoring",
        "bad_numbers",
        "background",
        "metric_files",
        "metrics",
        "goodput",
        "profiling",
        "trainer",
        "trainer_checks",
    ),
    (
        "run_dir",
        "checkpoint_files",
        "checkpoint_formats",
        "checkpoints",
        "saving",
        "evaluation",
        "inference",
        "inference_files",
        "interrupts",
        "loop",
        "training_setup",
    ),
    (
        "cli.gin_command",
        "cli.completion",
        "__main__",
        "gin_port",
        "main",
        "train",
        "eval",
        "infer",
        "bench",
        "t5x_plugin",
        "quickstart",
        "chaos",
    ),
    ("preflight", "experiments", "bench.page"),
    ("launching",),
)
RANKS = {room: rank for rank, row in enumerate(ROOMS) for room in row}
# What `pip install perex_t5x` brings, and Python itself; a folder of the core may import nothing else.
CORE = {
    "per_example": {"jax", "jaxlib", "numpy", "optax"},
    "optimizers": {"jax", "numpy", "optax"},
    "errors": set(),
    "arguments": set(),
}


@dataclass(frozen=True)
class Import:
    """`module` or a name in it, imported by `importer`; `lazy` inside a function or under TYPE_CHECKING."""

    importer: str
    module: str
    name: str | None
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}" + (f".{self.name}" if self.name else "")


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of the whole package."""
    named = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def _imports_of(module: str, path: Path) -> Iterator[Import]:
    lazy_lines = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if deferred or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            lazy_lines.update(range(node.lineno, node.end_lineno + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, None, node.lineno, node.lineno in lazy_lines)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target, name = (full, None) if full in modules() else (node.module, alias.name)
                yield Import(module, target, name, node.lineno, node.lineno in lazy_lines)


@functools.cache
def imports() -> tuple[Import, ...]:
    return tuple(i for module, path in modules().items() for i in _imports_of(module, path))


def ours() -> list[Import]:
    return [i for i in imports() if i.module.split(".")[0] == PACKAGE]


def room(module: str) -> str | None:
    """The first part below the package; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def rank(module: str) -> int:
    """The row of a module's room; a module that has a row of its own (`cli.gin_command`) is in that."""
    below = module.removeprefix(f"{PACKAGE}.")
    return RANKS.get(below, RANKS.get(below.split(".")[0], -1))


def test_every_module_has_a_room():
    unknown = {room(m) for m in modules()} - set(RANKS) - {None}
    assert not unknown, f"not in ROOMS: {sorted(unknown)}. docs/architecture.md says where each kind of change goes."


def test_arrows_point_down():
    wrong = []
    for i in ours():
        if room(i.importer) is None or room(i.importer) == room(i.module):
            continue
        if rank(i.module) > rank(i.importer):
            wrong.append(str(i))
    assert not wrong, "\n".join(wrong)


def test_core_imports_nothing_of_the_trainer():
    allowed = {
        "per_example": {"per_example"},
        "optimizers": {"per_example", "optimizers", "errors", "arguments"},
        "errors": {"errors"},
        "arguments": {"arguments", "errors"},
    }
    wrong = [str(i) for i in ours() if room(i.importer) in allowed and room(i.module) not in allowed[room(i.importer)]]
    assert not wrong, "\n".join(wrong)


def test_core_needs_only_its_dependencies():
    import sys

    wrong = []
    for i in imports():
        top = i.module.split(".")[0]
        if room(i.importer) in CORE and top not in {PACKAGE, *CORE[room(i.importer)], *sys.stdlib_module_names}:
            wrong.append(str(i))
    assert not wrong, "\n".join(wrong)


def test_only_launchers_import_launching():
    wrong = [str(i) for i in ours() if room(i.module) == "launching" and room(i.importer) != "launching"]
    assert not wrong, "\n".join(wrong)


def test_no_private_name_across_modules():
    wrong = [str(i) for i in ours() if i.name and i.name.startswith("_") and not i.name.startswith("__")]
    for module, path in modules().items():
        aliases = {
            (alias.asname or alias.name)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE
            for alias in node.names
            if f"{node.module}.{alias.name}" in modules()
        }
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
                and isinstance(node.value, ast.Name)
                and node.value.id in aliases
            ):
                wrong.append(f"{module}:{node.lineno} uses {node.value.id}.{node.attr}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle():
    """Among imports at module level, a package's `__init__` counted as imported with each of its modules' names."""
    graph: dict[str, set[str]] = {m: set() for m in modules()}
    for i in ours():
        if not i.lazy and i.module in graph and i.module != i.importer:
            graph[i.importer].add(i.module)
    state: dict[str, int] = {}
    cycles = []

    def visit(module: str, path: list[str]) -> None:
        state[module] = 1
        for following in sorted(graph[module]):
            if state.get(following) == 1:
                cycles.append(" -> ".join([*path[path.index(following) :], following]))
            elif following not in state:
                visit(following, [*path, following])
        state[module] = 2

    for module in graph:
        if module not in state:
            visit(module, [module])
    assert not cycles, "\n".join(cycles)


def test_tensorflow_is_imported_by_data_alone():
    """At module level: elsewhere it would cost every command seconds to start."""
    heavy = {"tensorflow", "seqio", "tensorflow_datasets"}
    wrong = [str(i) for i in imports() if not i.lazy and i.module.split(".")[0] in heavy and room(i.importer) != "data"]
    assert not wrong, "\n".join(wrong)


def test_package_stays_small():
    """Not a limit to game: a file is one idea. But a stranger has to find their way."""
    assert len(modules()) <= 312, f"{len(modules())} files: merge what is half an idea"


@pytest.mark.parametrize(
    "name",
    [
        "per_example:grad_statistics Statistic GradStatistics coverage check_independent",
        "optimizers:adam eve micro_adam micro_adam_msq micro_adam_var micro_sign sign_ema sign_sgd needs_of logged",
        "optimizers:clip_by_global_norm scale_by_moments scale_by_sign",
        "trainer:Trainer TrainState WeightMetricsComputer",
        "utils:DatasetConfig CheckpointConfig SaveCheckpointConfig RestoreCheckpointConfig create_learning_rate_scheduler",
        "partitioning:PjitPartitioner standard_logical_axis_rules",
        "models:DecoderOnlyModel EncoderDecoderModel",
        "gin_utils:summarize_gin_config parse_gin_flags",
        "train:train",
        "eval:evaluate",
        "infer:infer",
    ],
)
def test_public_names(name):
    import importlib

    module, _, names = name.partition(":")
    imported = importlib.import_module(f"{PACKAGE}.{module}")
    assert [n for n in names.split() if not hasattr(imported, n)] == []
