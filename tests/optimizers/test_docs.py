"""docs/optimizers.md: its code runs, its loop trains, its errors are the real ones."""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from perex_t5x import optimizers, per_example
from perex_t5x.errors import ConfigError
from tests.optimizers.optimizer_support import OPTIMIZERS, random_grads, statistics_of

METRICS = [
    "cosine",
    "cosine_to_mean",
    "gram",
    "inner_product",
    "layer_norms",
    "layer_of",
    "norm",
    "sketch",
    "squared_norm",
]
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "optimizers.md"
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (per_example, per_example.__all__),
        (per_example.metrics, METRICS),
        (
            per_example.curvature,
            [n for n in vars(per_example.curvature) if n.endswith("diagonal") or n == "Likelihood"],
        ),
        (optimizers, optimizers.__all__),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_public_names_have_an_example(module, names):
    """Which runs as a doctest. optax's own functions have optax's docstrings."""
    public = [getattr(module, name) for name in names]
    ours = [x for x in public if not isinstance(x, type(pytest)) and x.__module__.startswith("perex_t5x")]
    assert len(ours) > 3 and [x.__name__ for x in ours if ">>>" not in (x.__doc__ or "")] == []


def test_the_code_runs():
    names = {}
    losses = []
    for language, code in BLOCKS:
        if language == "python":
            exec(code, names)
            losses.append(float(names["loss"]))
    first = names["loss_fn"]({"w": jnp.full((4, 8), 0.1), "v": jnp.full((8, 1), 0.1)}, names["batch"])
    assert len(losses) == 6 and losses[0] < 0.5 * float(first)
    assert set(optimizers.logged(names["msq_state"])) == {"floored_share"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_lines_of_optax_train(name):
    def loss_fn(params, batch):
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"]))

    draw = jax.random.normal(jax.random.key(0), (16, 4))
    batch = {"x": draw, "y": draw @ jnp.array([1.0, -2.0, 3.0, 0.5])}
    params = {"w": jnp.zeros(4)}
    optimizer = OPTIMIZERS[name](0.05)
    state, compute = optimizer.init(params), jax.jit(per_example.grad_statistics(loss_fn, optimizer.needs))
    before = loss_fn(params, batch)
    for _ in range(30):
        stats, _ = compute(params, batch)
        updates, state = optimizer.update(stats.mean, state, params, statistics=stats)
        params = optax.apply_updates(params, updates)
    assert loss_fn(params, batch) < 0.8 * before


def test_the_errors_are_verbatim():
    x, params = random_grads(1, 8)[0], jnp.zeros(6)

    def update(optimizer, stats):
        return optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)

    micro = optimizers.micro_adam(0.1)
    mistakes = [
        lambda: micro.update(params, micro.init(params), params),
        lambda: update(optimizers.micro_sign(0.1), statistics_of(x, names=("mean", "mean_square"))),
        lambda: update(optax.chain(optax.clip(1e-3), micro), statistics_of(x)),
        lambda: update(optimizers.micro_adam_var(0.1), statistics_of(x[:1])),
        lambda: optax.MultiSteps(micro, 2).init(params),
        lambda: optimizers.adam(0.1, b2=1.0),
    ]
    shown = [code.strip() for language, code in BLOCKS if not language]
    for mistake, message in zip(mistakes, shown, strict=True):
        with pytest.raises(ConfigError) as e:
            mistake()
        assert str(e.value) == message
