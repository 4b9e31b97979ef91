"""docs/architecture.md, "The engine": the programs of its example are as it says."""

import pathlib
import re

import jax
import jax.numpy as jnp

from perex_t5x import per_example
from tests.per_example.engine.rewrites.test_unit_axes import everywhere

DOC = pathlib.Path(__file__).parents[2] / "docs" / "architecture.md"
SHAPES = {"w": (8, 16), "v": (16, 4), "b": (4,)}


def shapes_in(fn, *arguments):
    return {v.aval.shape for eqn in everywhere(jax.make_jaxpr(fn)(*arguments).jaxpr) for v in eqn.outvars}


def test_nothing_of_examples_times_parameter_is_left():
    names = {"jnp": jnp}
    engine = DOC.read_text(encoding="utf-8").split("## The engine")[1]
    exec(re.search(r"```python\n(.*?)```", engine, flags=re.DOTALL)[1], names)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    x = jax.ShapeDtypeStruct((32, 6, 8), jnp.float32)
    of_row = lambda p, row: jax.grad(names["loss"])(p, row[None])  # noqa: E731
    before = shapes_in(jax.vmap(of_row, in_axes=(None, 0)), params, x)
    compute = per_example.grad_statistics(names["loss"], ("mean", "mean_square"))
    after = shapes_in(lambda p, x: compute(p, x)[0].averages, params, x)
    large = {(32, 8, 16), (32, 16, 8), (32, 16, 4), (32, 4, 16)}
    assert before >= large and not after & large
    rows = per_example.coverage(names["loss"], params, x)
    assert {r.parameter: r.reduction for r in rows} == {"w": "one at a time", "v": "one at a time", "b": "all at once"}
