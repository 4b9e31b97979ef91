"""Draws the pictures of docs/concepts.md: `python docs/images/concepts.py` (the extra [reports]; half a minute).

Points are measured with the package, lines are the formulas of the page.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from perex_t5x import optimizers, per_example

HERE = Path(__file__).resolve().parent
Rows = list[dict[str, Any]]


def linear_loss(params: jax.Array, batch: jax.Array) -> jax.Array:
    """Its gradient for one example is that example: gradients of any distribution can be drawn."""
    return jnp.mean(batch @ params)


def placements(batch_size: int = 16, b: float = 0.9, repeats: int = 4000) -> Rows:
    """Mean direction of the sign, placed early to late, against the signal-to-noise ratio of one example's gradient."""
    rows: Rows = []
    names = ("mean", "mean_sign")
    steps = 60
    places = {
        "MicroSign: every example's gradient": lambda signs, means: signs[-1],
        "SignSGD: the batch's gradient": lambda signs, means: jnp.sign(means[-1]),
        "SignEMA: the moving average": lambda signs, means: jnp.sign(_moving_average(means, b)),
    }
    averaged = dict(zip(places, (1, batch_size, batch_size * (1 + b) / (1 - b)), strict=True))
    compute = per_example.grad_statistics(linear_loss, names)
    zeros = jnp.zeros(repeats)

    @jax.jit
    def run(key: jax.Array, snr: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(_: None, key: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
            stats, _aux = compute(zeros, snr + jax.random.normal(key, (batch_size, repeats)))
            return None, (stats["mean_sign"], stats.mean)

        return jax.lax.scan(step, None, jax.random.split(key, steps))[1]

    for number, snr in enumerate(np.geomspace(0.003, 3, 13)):
        signs, means = run(jax.random.key(number), jnp.float32(snr))
        for name, place in places.items():
            expected = math.erf(snr * math.sqrt(averaged[name]) / math.sqrt(2))
            rows.append(
                {"snr": snr, "place": name, "measured": float(place(signs, means).mean()), "expected": expected}
            )
    return rows


def _moving_average(means: jax.Array, b: float) -> jax.Array:
    weights = b ** jnp.arange(len(means))[::-1]
    return (weights[:, None] * means).sum(0) / weights.sum()


def second_moments(mean: float = 0.7, deviation: float = 1.0) -> Rows:
    """What each optimizer's v estimates, against the batch size."""
    rows: Rows = []
    compute = jax.jit(per_example.grad_statistics(linear_loss, ("mean", "mean_square")))
    for batch_size in (2, 4, 8, 16, 32, 64, 128, 256, 512):
        draws = mean + deviation * jax.random.normal(jax.random.key(batch_size), (batch_size, 40000))
        stats, _ = compute(jnp.zeros(draws.shape[1]), draws)
        measured = {
            "Adam: ḡ²": (stats.mean**2, mean**2 + deviation**2 / batch_size),
            "MicroAdam: mean of gᵢ²": (stats.mean_square, mean**2 + deviation**2),
            "MicroAdamVar: σ̂²": (stats.raw_variance(), deviation**2),
            "MicroAdamMSQ: μ̂²": (stats.squared_mean(), mean**2),
        }
        for name, (values, expected) in measured.items():
            rows.append({"batch": batch_size, "v": name, "measured": float(values.mean()), "expected": expected})
    return rows


def gradients_of_a_coordinate(examples: int = 512) -> Rows:
    """Every example's gradient with respect to one weight, before and after training; the mean is one number of it."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["w"])
        return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)

    key_x, key_y, key_w, key_v = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(key_x, (examples, 4))
    y = 1.5 + jnp.sin(2 * x[:, :1]) + 0.3 * jax.random.normal(key_y, (examples, 1))
    params = {"w": 0.5 * jax.random.normal(key_w, (4, 16)), "v": 0.5 * jax.random.normal(key_v, (16, 1))}
    batch = {"x": x, "y": y}
    optimizer = optax.adam(0.01)
    state = optimizer.init(params)
    step = jax.jit(lambda p, s: optimizer.update(jax.grad(loss_fn)(p, batch), s, p))
    rows: Rows = []
    for steps, name in ((0, "at the start"), (1000, "after 1000 steps")):
        for _ in range(steps):
            updates, state = step(params, state)
            params = optax.apply_updates(params, updates)
        stats, _ = per_example.grad_statistics(loss_fn, ("mean", "mean_square"))(params, batch)
        single = jax.vmap(lambda row, p=params: jax.grad(loss_fn)(p, jax.tree.map(lambda a: a[None], row)))(batch)
        if not steps:
            weight = int(jnp.argmax(stats.snr()["v"]))  # the one on which the examples agree most at the start
        for gradient in np.asarray(single["v"][:, weight, 0]):
            rows.append(
                {"when": name, "gradient": float(np.clip(gradient, -5, 5)), "mean": float(stats.mean["v"][weight, 0])}
            )
    return rows


def square_root_rule(dimensions: int = 200, examples: int = 65536, noise: float = 20.0) -> Rows:
    """Adam on a quadratic where noise prevails: loss against examples seen, for three rules of the rate."""
    rows: Rows = []
    scales = jnp.geomspace(0.01, 1.0, dimensions)
    start = jnp.ones(dimensions)

    def loss_fn(params: jax.Array, draws: jax.Array) -> jax.Array:
        return jnp.mean(0.5 * jnp.sum(scales * params**2) + draws @ params)

    for rule, power in (("constant rate", 0.0), ("rate × √B", 0.5), ("rate × B", 1.0)):
        for batch_size in (4, 16, 64, 256):
            rate = 0.004 * (batch_size / 16) ** power
            # The moving averages, too, forget after so many examples rather than steps.
            b1, b2 = (max(0.0, 1 - (1 - b) * batch_size / 16) for b in (0.95, 0.99))
            optimizer = optimizers.adam(rate, b1=b1, b2=b2)
            compute = per_example.grad_statistics(loss_fn, optimizer.needs)

            def step(
                carry: Any, key: jax.Array, n: int = batch_size, opt: Any = optimizer, compute: Any = compute
            ) -> Any:
                params, state = carry
                stats, _ = compute(params, noise * jax.random.normal(key, (n, dimensions)))
                updates, state = opt.update(stats.mean, state, params, statistics=stats)
                params = optax.apply_updates(params, updates)
                return (params, state), 0.5 * jnp.sum(scales * params**2)

            keys = jax.random.split(jax.random.key(batch_size), examples // batch_size)
            _, losses = jax.jit(lambda s, k, step=step: jax.lax.scan(step, s, k))((start, optimizer.init(start)), keys)
            chosen = np.unique(np.geomspace(1, len(losses), 40).astype(int)) - 1
            for index in chosen:
                seen = int(index + 1) * batch_size
                if seen >= 1024:
                    rows.append({"rule": rule, "batch": batch_size, "examples": seen, "loss": float(losses[index])})
    return rows


def _chart(rows: Rows, title: str, **spec: Any) -> dict[str, Any]:
    config = {
        "font": "DejaVu Sans",
        "view": {"stroke": None},
        "axis": {"gridOpacity": 0.4},
        "legend": {"labelLimit": 320},
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "anchor": "start"},
        "background": "white",
        "padding": 12,
        "data": {"values": rows},
        "config": config,
        **spec,
    }


def _log(field: str, title: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "scale": {"type": "log"}, "title": title}


def charts() -> dict[str, dict[str, Any]]:
    """Name of the picture -> Vega-Lite."""
    colour = {"type": "nominal", "sort": None, "title": None}

    def lines_and_points(x: dict[str, Any], field: str, title: str, scale: str) -> dict[str, Any]:
        y = {"type": "quantitative", "title": title, "scale": {"type": scale}}
        line = {"mark": "line", "encoding": {"y": {"field": "expected", **y}}}
        point = {"mark": {"type": "point", "filled": True, "size": 45}, "encoding": {"y": {"field": "measured", **y}}}
        shared = {"x": x, "color": {"field": field, **colour}}
        return {"width": 460, "height": 260, "encoding": shared, "layer": [line, point]}

    gradient = {"field": "gradient", "type": "quantitative", "bin": {"maxbins": 60}, "title": "gradient of one example"}
    bars = {"mark": "bar", "encoding": {"x": gradient, "y": {"aggregate": "count", "title": "examples"}}}
    mean = {"aggregate": "mean", "field": "mean", "type": "quantitative"}
    rule = {"mark": {"type": "rule", "color": "#d62728", "strokeWidth": 2}, "encoding": {"x": mean}}
    facet = {"field": "when", "type": "nominal", "sort": ["at the start", "after 1000 steps"], "title": None}
    curves = {
        "x": _log("examples", "examples seen"),
        "y": _log("loss", "loss"),
        "color": {"field": "batch", "type": "ordinal", "title": "batch size"},
    }
    by_rule = {"field": "rule", "type": "nominal", "sort": ["constant rate", "rate × √B", "rate × B"], "title": None}
    return {
        "concepts_gradients": _chart(
            gradients_of_a_coordinate(),
            "Gradients of 512 examples with respect to one weight; red: their mean",
            facet={"column": facet},
            spec={"width": 280, "height": 180, "layer": [bars, rule]},
        ),
        "concepts_sign": _chart(
            placements(),
            "Mean direction of the update, by where the sign stands (B = 16, β = 0.9)",
            **lines_and_points(_log("snr", "|μ| / σ of one example's gradient"), "place", "mean of the sign", "linear"),
        ),
        "concepts_moments": _chart(
            second_moments(),
            "What each second moment estimates (μ = 0.7, σ = 1)",
            **lines_and_points(_log("batch", "batch size B"), "v", "mean of v", "log"),
        ),
        "concepts_sqrt": _chart(
            square_root_rule(),
            "Adam on a quadratic where noise prevails: learning curves by the rule for the rate",
            facet={"column": by_rule},
            spec={"width": 230, "height": 220, "mark": "line", "encoding": curves},
        ),
    }


def main(folder: Path = HERE) -> None:
    import vl_convert

    for name, chart in charts().items():
        (folder / f"{name}.png").write_bytes(vl_convert.vegalite_to_png(json.dumps(chart), scale=1.5))
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
