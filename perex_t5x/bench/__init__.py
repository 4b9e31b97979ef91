"""Times and memory, each beside a baseline that takes turns with it in the same run.

python -m perex_t5x.bench                       all that follows, beside its peers; see docs/benchmarks.md
python -m perex_t5x.bench --gin_file=...        one configuration's training loop beside a bare JAX loop
python -m perex_t5x.bench --engine=scanned      the engine beside its alternatives, on a small model
python -m perex_t5x.bench --zoo=all             the same on every loss of `perex_t5x.zoo`
python -m perex_t5x.bench --t5x=...             training inside T5X beside its own trainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perex_t5x.bench.training_loop import benchmark

__all__ = ["benchmark"]


def __getattr__(name: str) -> Any:
    # Imported on demand: --help needs no JAX.
    if name != "benchmark":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from perex_t5x.bench.training_loop import benchmark

    return benchmark
