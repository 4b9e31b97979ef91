"""Wall-clock time of the per-example engine beside its alternatives: `python -m perex_t5x.bench --engine=...`"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.bench.turns import in_turns, temp_bytes
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.per_example import grad_statistics
from perex_t5x.train import timed

_TRACES = 7  # rounds, at least: a trace takes a tenth of a second


@dataclasses.dataclass(frozen=True)
class Size:
    """The decoder's sizes; the defaults are those of the documentation."""

    width: int = 256
    mlp: int = 1024
    layers: int = 4
    vocabulary: int = 8192
    length: int = 256
    examples: int = 16


def _decoder(size: Size, scanned: bool) -> tuple[Callable[..., Any], Any, Any]:
    """A pre-norm decoder in plain JAX, with rematerialised layers where scanned."""
    keys = jax.random.split(jax.random.key(0), 8)
    d, f, n = size.width, size.mlp, size.layers

    def weight(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) * shape[-2] ** -0.5

    params = {
        "embedding": weight(keys[0], size.vocabulary, d),
        "layers": {
            "norm": jnp.ones((n, d)),
            "qkv": weight(keys[1], n, d, 3 * d),
            "out": weight(keys[2], n, d, d),
            "mlp_norm": jnp.ones((n, d)),
            "up": weight(keys[3], n, d, f),
            "down": weight(keys[4], n, f, d),
        },
        "norm": jnp.ones(d),
        "logits": weight(keys[5], d, size.vocabulary),
    }

    def normalized(x_BxTxD: jax.Array, scale_D: jax.Array) -> jax.Array:
        return x_BxTxD * jax.lax.rsqrt(jnp.mean(x_BxTxD**2, axis=-1, keepdims=True) + 1e-6) * scale_D

    def layer(x_BxTxD: jax.Array, p: Any) -> tuple[jax.Array, None]:
        b, t, _ = x_BxTxD.shape
        qkv = (normalized(x_BxTxD, p["norm"]) @ p["qkv"]).reshape(b, t, 3, d // 64, 64)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x_BxTxD = x_BxTxD + attended.reshape(b, t, d) @ p["out"]
        return x_BxTxD + jax.nn.gelu(normalized(x_BxTxD, p["mlp_norm"]) @ p["up"]) @ p["down"], None

    def loss(params: Any, ids_BxT: jax.Array) -> jax.Array:
        x_BxTxD = params["embedding"][ids_BxT]
        if scanned:
            x_BxTxD, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x_BxTxD, params["layers"])
        else:
            for i in range(n):
                x_BxTxD, _ = layer(x_BxTxD, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
        logits = (normalized(x_BxTxD, params["norm"]) @ params["logits"])[:, :-1]
        chosen = jnp.take_along_axis(logits, ids_BxT[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    ids = jax.random.randint(keys[6], (size.examples, size.length), 0, size.vocabulary)
    return loss, params, ids


def _mlp(size: Size) -> tuple[Callable[..., Any], Any, Any]:
    """Dense layers without a sequence axis, whose statistics factor."""
    keys = jax.random.split(jax.random.key(0), size.layers + 1)
    d = 2 * size.width
    params = [jax.random.normal(k, (d, d)) * d**-0.5 for k in keys[1:]]

    def loss(params: Any, x_BxD: jax.Array) -> jax.Array:
        for w in params:
            x_BxD = jax.nn.relu(x_BxD @ w)
        return jnp.mean(jnp.sum(x_BxD**2, axis=-1))

    return loss, params, jax.random.normal(keys[0], (8 * size.examples, d))


def _programs(loss: Callable[..., Any], examples: int) -> dict[str, Callable[[int | None], Callable[..., Any]]]:
    """Name -> function from a microbatch size to the program."""
    from optax import microbatching

    def plain(micro: int | None) -> Callable[..., Any]:
        gradient = jax.value_and_grad(loss)
        if micro is None:
            return gradient

        def run(params: Any, batch: Any) -> Any:
            rows = batch.reshape(examples // micro, micro, *batch.shape[1:])

            def add(total: Any, part: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, gradient(params, part)), None

            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(gradient, params, rows[0]))
            total, _ = jax.lax.scan(add, zeros, rows)
            return jax.tree.map(lambda x: x * (micro / examples), total)

        return run

    def micro_grad(micro: int | None) -> Callable[..., Any]:
        return microbatching.micro_grad(
            loss,
            microbatch_size=micro,
            accumulator=microbatching.AccumulationType.MEAN,
            transform_fn=lambda g: (g, jax.tree.map(jnp.square, g)),
        )

    return {
        "plain": plain,
        "loop": lambda _: grad_statistics(loss, method="vmap", microbatch_size=1),
        "vmap": lambda micro: grad_statistics(loss, method="vmap", microbatch_size=micro),
        "micro_grad": micro_grad,
        "surgery": lambda micro: grad_statistics(loss, microbatch_size=micro),
        "clipped": lambda micro: grad_statistics(loss, microbatch_size=micro, clip_norm=1.0),
        "two passes": lambda micro: grad_statistics(
            loss, microbatch_size=micro, clip_norm=1.0, clip_strategy="two passes"
        ),
    }


MODELS: dict[str, Callable[[Size], tuple[Callable[..., Any], Any, Any]]] = {
    "scanned": lambda size: _decoder(size, scanned=True),
    "unrolled": lambda size: _decoder(size, scanned=False),
    "mlp": _mlp,
}


def benchmark_engine(
    models: Sequence[str],
    rounds: int = 5,
    microbatches: Sequence[str] = ("1", "4"),
    examples: int = 16,
    layers: int = 4,
) -> list[dict[str, Any]]:
    """Times the engine and its alternatives on some of `MODELS`; prints one JSON line for each.

    Args:
      models: names.
      rounds: in which all programs take turns.
      microbatches: sizes to try besides all examples at once; those that do not divide the batch are skipped.
      examples, layers: of the model.
    """
    for name in models:
        if name not in MODELS:
            raise ConfigError(f"--engine={name}: not one of {', '.join(MODELS)}.{did_you_mean(name, MODELS)}")
    results = []
    for name in models:
        loss, params, batch = MODELS[name](Size(examples=examples, layers=layers))
        sizes = [int(size) for size in microbatches if batch.shape[0] % int(size) == 0]
        results.append(measure_engine(name, loss, params, batch, sizes, rounds))
        print(json.dumps(results[-1]), flush=True)
        for program, row in results[-1]["programs"].items():
            whole = "time {time_all_at_once:.2f}  temp {temp_all_at_once:.2f}  trace {trace:.2f}  compile {compile:.2f}"
            whole = whole.format(**row)
            best = "time {time_at_best:.2f}  temp {temp_at_best:.2f}".format(**row)
            line = f"  {name:9} {program:11} all at once: {whole}   at its best ({row['best_microbatch']}): {best}"
            print(line, file=sys.stderr, flush=True)
    return results


def measure_engine(
    name: str, loss: Callable[..., Any], params: Any, batch: Any, sizes: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Times every program at every microbatch size, and its trace all at once; returns one row per program."""
    examples = batch.shape[0]
    makers = _programs(loss, examples)
    # Before anything is compiled: in a process full of programs whatever makes many objects takes longer.
    traces = {p: functools.partial(_trace_seconds, make, params, batch) for p, make in makers.items()}
    in_turns(traces, 1)  # warm up
    # The minimum: what else the machine does only adds to it.
    trace = {p: min(values) for p, values in in_turns(traces, max(rounds, _TRACES)).items()}
    compiled: dict[tuple[str, int | None], Any] = {}
    compile_seconds: dict[tuple[str, int | None], float] = {}
    for program, make in makers.items():
        for micro in (None,) if program == "loop" else (None, *sizes):
            run, key = jax.jit(make(micro)), (program, micro)
            compiled[key], compile_seconds[key] = timed(lambda run=run: run.lower(params, batch).compile())

    def seconds(key: tuple[str, int | None]) -> float:
        return timed(lambda: jax.block_until_ready(compiled[key](params, batch)))[1]

    measures = {key: functools.partial(seconds, key) for key in compiled}
    in_turns(measures, 1)  # warm up
    times = in_turns(measures, rounds)
    median = {key: statistics.median(t) for key, t in times.items()}
    best = {p: min((k for k in median if k[0] == p), key=median.__getitem__) for p, _ in compiled}
    temp = {key: temp_bytes(program) for key, program in compiled.items()}
    rows = {}
    for program, fastest in best.items():
        whole = (program, None)
        quartiles = statistics.quantiles(times[whole], n=4) if rounds > 1 else [median[whole]] * 3
        rows[program] = {
            "time_all_at_once": median[whole] / median["plain", None],
            "spread_all_at_once": [q / median["plain", None] for q in (quartiles[0], quartiles[2])],
            "temp_all_at_once": _ratio(temp[whole], temp["plain", None]),
            "best_microbatch": fastest[1],
            "time_at_best": median[fastest] / median[best["plain"]],
            "temp_at_best": _ratio(temp[fastest], temp[best["plain"]]),
            "trace": trace[program] / trace["plain"],
            "compile": compile_seconds[whole] / compile_seconds["plain", None],
            "seconds_all_at_once": median[whole],
        }
    return {"model": name, "examples": examples, "rounds": rounds, "programs": rows}


def _ratio(value: int | None, base: int | None) -> float:
    """NaN where memory is not known, or the baseline needs none.

    >>> _ratio(3, 2), _ratio(3, None), _ratio(3, 0)
    (1.5, nan, nan)
    """
    return value / base if value is not None and base else math.nan


def _trace_seconds(make: Callable[[int | None], Callable[..., Any]], params: Any, batch: Any) -> float:
    """Processor time to trace a program all at once, as the first in its process would be."""
    jax.clear_caches()
    gc.collect()
    gc.disable()  # as timeit does: a collection goes through all objects of the process, not through the trace's alone
    try:
        begun = time.process_time()
        jax.jit(make(None)).trace(params, batch)
        return time.process_time() - begun
    finally:
        gc.enable()
