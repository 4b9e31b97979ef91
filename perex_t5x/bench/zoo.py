"""Time and memory of the per-example engine on every loss of the zoo, beside its alternatives:
`python -m perex_t5x.bench --zoo=...`"""

from __future__ import annotations

import concurrent.futures
import fnmatch
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x import files, zoo
from perex_t5x.bench.turns import in_turns, temp_bytes
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.per_example import grad_statistics
from perex_t5x.train import timed

OURS = ("surgery", "surgery 4", "surgery 1", "map")
PEERS = ("vmap", "micro_grad 4", "micro_grad 1")
# A ratio above this is marked: below, it may be how a program happens to lie in memory (of times), or padding (of memory).
TOLERANCE = 1.05
# What the smallest arrays take is not worth a mark.
SMALL_BYTES = 64 * 1024


def programs(case: zoo.Case) -> dict[str, Callable[..., Any]]:
    """Name -> function of (params, batch): mean and mean square of the examples' gradients; `plain`: the batch's gradient.

    A number in a name is the microbatch size; without one, all examples are computed at once. The alternatives get each
    example's key with the batch, since they know of no `rng_argnums`.
    """
    from optax import microbatching

    has_aux = case.options.get("has_aux", False)
    # As numbers: micro_grad cannot reshape arrays of keys.
    each = jax.vmap(lambda key, i: jax.random.key_data(jax.random.fold_in(key, i)), (None, 0))
    keys = tuple(each(key, jnp.arange(case.examples)) for key in case.extra)

    def loss(params: Any, rows: Any) -> jax.Array:
        batch, keys = rows
        value = case.loss(params, batch, *(jax.random.wrap_key_data(k[0]) for k in keys))
        return value[0] if has_aux else value

    def ours(**options: Any) -> Callable[..., Any]:
        compute = grad_statistics(case.loss, ("mean", "mean_square"), **{**case.options, **options})
        return lambda params, batch: compute(params, batch, *case.extra)

    def vmap(params: Any, batch: Any) -> Any:
        def one(params: Any, row: Any) -> jax.Array:
            return loss(params, jax.tree.map(lambda x: x[None], row))

        values, g_Nx = jax.vmap(jax.value_and_grad(one), in_axes=(None, 0))(params, (batch, keys))
        mean = functools.partial(jnp.mean, axis=0)
        return values, jax.tree.map(mean, g_Nx), jax.tree.map(lambda g: mean(g**2), g_Nx)

    def micro_grad(size: int) -> Callable[..., Any]:
        compute = microbatching.micro_grad(
            loss,
            microbatch_size=size,
            accumulator=microbatching.AccumulationType.MEAN,
            transform_fn=lambda g: (g, jax.tree.map(jnp.square, g)),
        )
        return lambda params, batch: compute(params, (batch, keys))

    surgery = {"surgery": ours(), "surgery 4": ours(microbatch_size=4), "surgery 1": ours(microbatch_size=1)}
    return {
        "plain": lambda params, batch: jax.value_and_grad(loss)(params, (batch, keys)),
        **({} if "method" in case.options else surgery),
        "map": ours(method="map"),
        "vmap": vmap,
        "micro_grad 4": micro_grad(4),
        "micro_grad 1": micro_grad(1),
    }


def measure_case(case: zoo.Case, rounds: int, seconds: float = 1.0) -> dict[str, Any]:
    """Seconds (the least of all rounds) and temporary bytes of every program; None where JAX cannot compute it.

    All programs take turns, at least `rounds` times, and more often where a round takes less than its part of `seconds`.
    `slower` are the quartiles, over rounds, of how much longer this engine at its best takes than the others at theirs.
    """
    lowered: dict[str, Any] = {}
    times: dict[str, float | None] = {}
    for name, program in programs(case).items():
        try:
            lowered[name] = jax.jit(program).lower(case.params, case.batch)
        except NotImplementedError:  # ragged_dot for several examples
            times[name] = None
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        compiled = dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))

    def run(name: str) -> float:
        return timed(lambda: jax.block_until_ready(compiled[name](case.params, case.batch)))[1]

    measures = {name: functools.partial(run, name) for name in compiled}
    in_turns(measures, 1)  # warm up
    once = sum(t for (t,) in in_turns(measures, 1).values())
    values = in_turns(measures, max(rounds, min(200, int(seconds / once))))
    times |= {name: min(t) for name, t in values.items()}
    return {
        "slower": slower(values, times),
        "name": case.name,
        "examples": case.examples,
        "seconds": times,
        "temp_bytes": {name: temp_bytes(program) for name, program in compiled.items()},
        "parameter_bytes": sum(x.nbytes for x in jax.tree.leaves(case.params)),
    }


def least(values: Mapping[str, float | None], names: Iterable[str]) -> tuple[float, str] | None:
    """The smallest of the values of these names, and its name; None where none is known.

    >>> least({"a": 2.0, "b": None, "c": 1.0}, ("a", "b", "c"))
    (1.0, 'c')
    """
    known = [(value, name) for name in names if (value := values.get(name)) is not None]
    return min(known) if known else None


def at_best(values: Mapping[str, float | None]) -> tuple[tuple[float, str] | None, tuple[float, str] | None]:
    """The least of this engine, by either of its methods, and of `vmap` and `micro_grad`."""
    return least(values, OURS), least(values, PEERS)


def slower(rounds: Mapping[str, Sequence[float]], times: Mapping[str, float | None]) -> list[float] | None:
    """Quartiles, over rounds, of this engine's seconds at its best over the others' at theirs; None: nothing to compare.

    What else the machine does in some round slows both, and what it does in between is in the quartiles.

    >>> slower({"surgery": [2.0, 4.0, 2.0], "vmap": [1.0, 2.0, 1.0]}, {"surgery": 2.0, "vmap": 1.0})
    [2.0, 2.0, 2.0]
    """
    ours, peers = at_best(times)
    if not ours or not peers:
        return None
    ratios = [a / b for a, b in zip(rounds[ours[1]], rounds[peers[1]], strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def marks(row: Mapping[str, Any]) -> list[str]:
    """Where this engine is above the best of `vmap` and `micro_grad`, each of both at its best microbatch size.

    In time, where it took longer in three rounds of four, and more than `TOLERANCE` times as long in half of them.

    >>> memory = {"surgery": 10, "vmap": 20}
    >>> marks({"slower": [1.1, 1.2, 1.3], "temp_bytes": memory}), marks({"slower": [0.9, 1.1, 1.3], "temp_bytes": memory})
    (['time'], [])
    """
    above = []
    if row["slower"] and row["slower"][0] > 1 and row["slower"][1] > TOLERANCE:
        above.append("time")
    ours, peers = at_best(row["temp_bytes"])
    if ours and peers and ours[0] > TOLERANCE * peers[0] + SMALL_BYTES:
        above.append("memory")
    return above


def _size(name: str) -> str:
    """Of microbatches, from a program's name."""
    return name if name == "map" else [*name.split(), "all"][1]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a Markdown table: ratios to the plain gradient's."""
    columns = ("surgery", "at best", "map", "vmap", "micro_grad 1", "at best")
    names = (("surgery",), OURS, ("map",), ("vmap",), ("micro_grad 1",), PEERS)
    head = ["loss", "time: plain", *columns, "memory: plain", *columns, "above"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"`{row['name']}`"]
        for key, unit, scale in (("seconds", "ms", 1e3), ("temp_bytes", "MB", 1e-6)):
            plain = row[key]["plain"]
            cells.append(f"{plain * scale:.2f} {unit}")
            for some in names:
                best = least(row[key], some)
                size = f" ({_size(best[1])})" if best and len(some) > 1 else ""
                cells.append(f"{best[0] / plain:.2f}{size}" if best and plain else "-")
        cells.append(", ".join(marks(row)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


_PAGE = """# The zoo: time and memory on every kind of loss

Made by `{command}`
({versions}; {device}, {cores} cores). The losses are in `perex_t5x/zoo/`; `tests/per_example/test_zoo.py` compares
each, at a tiny size, with a plain loop over examples.

Mean and mean square of the examples' gradients. Time is the least of several rounds in which all programs take turns,
memory the compiler's temporary bytes; both are ratios to the plain gradient of the batch, which is given in milliseconds and
megabytes.

- *surgery*: this engine, all examples at once; *at best*: the least of microbatches of 1, 4 and all and of *map*, which is
  in brackets.
- *map*: this engine's `method="map"`.
- *vmap*: `vmap(grad)`, then reduce.
- *micro_grad 1*: `optax.microbatching.micro_grad`, one example at a time; *at best*: the least of it with 1 and 4, and of
  *vmap*.
- A dash: JAX cannot compute it for several examples.
- *above*: where this engine at its best is above the best of *vmap* and *micro_grad* at theirs. Memory: by more
  than {tolerance} times and {small} kB. Time: it took longer in three rounds of four, and more than {tolerance} times as
  long in half of them; what differs less than rounds do is no difference. Time in {time} of {count} losses, memory in
  {memory}.

Times of a shared machine; of a loss that takes a millisecond they say little.

{table}
"""


def page(rows: Sequence[Mapping[str, Any]], command: str) -> str:
    """The table with what is needed to read it and to make it again."""
    return _PAGE.format(
        command=command,
        versions=", ".join(f"{name} {metadata.version(name)}" for name in ("perex_t5x", "jax", "jaxlib", "optax")),
        device=jax.devices()[0].device_kind,
        cores=os.cpu_count(),
        tolerance=TOLERANCE,
        small=SMALL_BYTES // 1024,
        count=len(rows),
        time=sum("time" in marks(row) for row in rows),
        memory=sum("memory" in marks(row) for row in rows),
        table="\n".join(table(rows)),
    )


def chosen(patterns: Sequence[str]) -> list[str]:
    """Names of the zoo that match any of these patterns, in its order; 'all' is all of them.

    >>> chosen(["lstm", "conv_?d"])
    ['conv_1d', 'conv_2d', 'lstm']
    """
    patterns = ["*" if pattern == "all" else pattern for pattern in patterns]
    for pattern in patterns:
        if not fnmatch.filter(zoo.NAMES, pattern):
            raise ConfigError(
                f"--zoo={pattern}: no loss of this name.{did_you_mean(pattern, zoo.NAMES)} "
                "Names may be patterns ('weight_*'); 'all' is all of them."
            )
    return [name for name in zoo.NAMES if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def benchmark_zoo(
    patterns: Sequence[str], rounds: int = 3, table_file: str | None = None, large: bool = True
) -> list[dict[str, Any]]:
    """Measures these losses of the zoo; prints one JSON line for each, and the table to stderr.

    Args:
      patterns: of names, see `chosen`.
      rounds: in which all programs take turns, at least.
      table_file: where the table is written as Markdown; None: nowhere.
      large: False: at the size of the tests.
    """
    rows = []
    for name in chosen(patterns):
        row = measure_case(zoo.make(name, large=large), rounds)
        rows.append(row | {"above": marks(row)})
        print(json.dumps(rows[-1]), flush=True)
        jax.clear_caches()
    print("\n".join(table(rows)), file=sys.stderr)
    if table_file is not None:
        command = f"python -m perex_t5x.bench --zoo={','.join(patterns)} --rounds={rounds} --table={table_file}"
        files.write_atomically(table_file, page(rows, command))
    return rows
