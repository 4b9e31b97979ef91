"""Adafactor equals T5X's, by numbers that T5X's own gave once; optimizers that are combined of several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import optimizers
from perex_t5x.errors import ConfigError
from perex_t5x.optimizers import adafactor
from tests import tiny, trainer_support
from tests.optimizers import optimizer_support

AXES = {
    "kernel": ("embed", "mlp"),
    "fused": ("embed", "heads", "kv"),
    "stacked": ("layers", "embed", "mlp"),
    "stacked_fused": ("layers", "embed", "heads", "kv"),
    "scale": ("embed",),
    "stacked_scale": ("layers", "embed"),
    "relpos": ("heads", "relpos_buckets"),
}
SIZES = {"embed": 4, "mlp": 6, "heads": 2, "kv": 3, "layers": 2, "relpos_buckets": 5}
SHAPES = {name: tuple(SIZES[axis] for axis in axes) for name, axes in AXES.items()}
MATRICES = ("kernel", "scale", "relpos")
RULES = {"logical_factor_rules": adafactor.standard_logical_factor_rules()}
MAP = [
    ("stacked_fused", ("batch", "row", "column", "column")),
    ("^stacked$", ("batch", "row", "column")),
    ("fused", (adafactor.FactorDim.ROW, adafactor.FactorDim.ROW, adafactor.FactorDim.COLUMN)),
    ("scale", None),
    (".*", adafactor.HEURISTIC_RULE),
]
SETTINGS = {
    "rules": RULES,
    "t5": {**RULES, "decay_rate": 0.8, "step_offset": 0, "min_dim_size_to_factor": 2},
    "momentum": {**RULES, "beta1": 0.9, "min_dim_size_to_factor": 2},
    "bfloat16_momentum": {**RULES, "beta1": 0.9, "dtype_momentum": "bfloat16"},
    "unfactored": {"factored": False, "beta1": 0.9, "global_norm_clip_threshold": 1.0},
    "no_scale": {**RULES, "multiply_by_parameter_scale": False, "clipping_threshold": None, "decay_rate": 0.5},
    "scale_rules": {
        **RULES,
        "multiply_by_parameter_scale": [("stacked", False), (".*", True)],
        "max_parameter_scale": 0.3,
    },
    "decay": {**RULES, "weight_decay_rate": 0.01, "clipping_threshold": 0.5, "epsilon1": 1e-4, "epsilon2": 0.7},
    "decay_by_rate": {**RULES, "weight_decay_rate": 0.5, "weight_decay_rate_lr_exponent": 2.0},
    "rate_alone": {**RULES, "weight_decay_rate_lr_exponent": 2.0},
    "offset": {**RULES, "step_offset": 1000},
    "map": {"factor_map": MAP, "min_dim_size_to_factor": 2},
    "heuristic": {"min_dim_size_to_factor": 2},
    "nan": {**RULES, "skip_nan_updates": True, "beta1": 0.5, "min_dim_size_to_factor": 2},
}
FIRST_STEP = {"offset": 1002}
# T5X's, after three steps of `after_three_steps`: of each parameter the sum, and the sum weighted by cos(0), cos(1), ...
OF_T5X = {
    "rules": {
        "fused": (-0.063987203, 0.98452675),
        "kernel": (0.48538053, 1.3048775),
        "relpos": (0.59568453, 1.3887749),
        "scale": (-0.045339465, -1.1954862),
        "stacked": (-0.35109642, -0.42865217),
        "stacked_fused": (-0.46790972, -1.5242995),
        "stacked_scale": (0.72941381, 0.23261489),
    },
    "t5": {
        "fused": (-0.063987203, 0.98452675),
        "kernel": (0.46873066, 1.2903329),
        "relpos": (0.59418076, 1.3834757),
        "scale": (-0.045339465, -1.1954862),
        "stacked": (-0.35109642, -0.42865217),
        "stacked_fused": (-0.46790972, -1.5242995),
        "stacked_scale": (0.72941381, 0.23261489),
    },
    "momentum": {
        "fused": (-0.057466477, 0.99094754),
        "kernel": (0.46320486, 1.3078767),
        "relpos": (0.60272443, 1.3977176),
        "scale": (-0.04253903, -1.2062728),
        "stacked": (-0.36024797, -0.43414944),
        "stacked_fused": (-0.4633593, -1.546856),
        "stacked_scale": (0.73396295, 0.23336427),
    },
    "bfloat16_momentum": {
        "fused": (-0.057476893, 0.99096823),
        "kernel": (0.46780023, 1.3122413),
        "relpos": (0.60296762, 1.3993323),
        "scale": (-0.042540506, -1.2062906),
        "stacked": (-0.36023128, -0.43416771),
        "stacked_fused": (-0.4633669, -1.5468733),
        "stacked_scale": (0.7339704, 0.23335411),
    },
    "unfactored": {
        "fused": (-0.056187376, 0.98254335),
        "kernel": (0.46768853, 1.3122957),
        "relpos": (0.60294545, 1.3993216),
        "scale": (-0.042473242, -1.2061416),
        "stacked": (-0.35089919, -0.43625253),
        "stacked_fused": (-0.45847842, -1.5551723),
        "stacked_scale": (0.73360342, 0.23372744),
    },
    "no_scale": {
        "fused": (-0.085487038, 0.96793175),
        "kernel": (0.52965426, 1.2876329),
        "relpos": (0.57861763, 1.3637758),
        "scale": (-0.049250826, -1.170702),
        "stacked": (-0.32346743, -0.41697529),
        "stacked_fused": (-0.48060593, -1.4714991),
        "stacked_scale": (0.71139002, 0.23707217),
    },
    "scale_rules": {
        "fused": (-0.062809587, 0.98608035),
        "kernel": (0.48139217, 1.3066111),
        "relpos": (0.59737134, 1.3911083),
        "scale": (-0.044744536, -1.1990736),
        "stacked": (-0.32719749, -0.41721919),
        "stacked_fused": (-0.47874844, -1.4702611),
        "stacked_scale": (0.71514332, 0.23861046),
    },
    "decay": {
        "fused": (-0.062263772, 0.9552958),
        "kernel": (0.46579501, 1.2668221),
        "relpos": (0.57808846, 1.3476025),
        "scale": (-0.043530017, -1.1622434),
        "stacked": (-0.34025696, -0.41587275),
        "stacked_fused": (-0.45386174, -1.4798516),
        "stacked_scale": (0.70711917, 0.22815636),
    },
    "decay_by_rate": {
        "fused": (-0.063970886, 0.98425549),
        "kernel": (0.48525172, 1.3045201),
        "relpos": (0.59551978, 1.3883935),
        "scale": (-0.045327008, -1.1951566),
        "stacked": (-0.35099882, -0.42853382),
        "stacked_fused": (-0.46778336, -1.5238774),
        "stacked_scale": (0.72921324, 0.23255123),
    },
    "rate_alone": {
        "fused": (-0.063954711, 0.98398399),
        "kernel": (0.48512307, 1.3041631),
        "relpos": (0.59535497, 1.3880123),
        "scale": (-0.045314595, -1.194827),
        "stacked": (-0.35090101, -0.42841586),
        "stacked_fused": (-0.46765718, -1.5234549),
        "stacked_scale": (0.72901249, 0.23248747),
    },
    "offset": {
        "fused": (-0.063794658, 0.98451024),
        "kernel": (0.48523042, 1.305024),
        "relpos": (0.59562147, 1.388788),
        "scale": (-0.044911623, -1.1963298),
        "stacked": (-0.35140005, -0.42856678),
        "stacked_fused": (-0.46779364, -1.5242548),
        "stacked_scale": (0.72966635, 0.23278736),
    },
    "map": {
        "fused": (-0.062596574, 0.98365396),
        "kernel": (0.46873066, 1.2903329),
        "relpos": (0.59418076, 1.3834757),
        "scale": (-0.045339465, -1.1954862),
        "stacked": (-0.35109642, -0.42865217),
        "stacked_fused": (-0.46790972, -1.5242995),
        "stacked_scale": (0.72828585, 0.23427726),
    },
    "heuristic": {
        "kernel": (0.46873066, 1.2903329),
        "relpos": (-0.18175948, -0.7352311),
        "scale": (-0.094974205, 1.1541078),
    },
    "nan": {
        "fused": (-0.055842657, 0.9830752),
        "kernel": (0.46166515, 1.2888887),
        "relpos": (0.59427297, 1.3827317),
        "scale": (-0.046532929, -1.1929183),
        "stacked": (-0.35565922, -0.42364156),
        "stacked_fused": (-0.4633328, -1.5230262),
        "stacked_scale": (0.72505808, 0.22958422),
    },
}


def wave(shape, number, amplitude):
    values = amplitude * np.sin(1.0 + number + 0.7 * np.arange(np.prod(shape)) ** 1.3)
    return jnp.asarray(values.reshape(shape), jnp.float32)


def after_three_steps(setting):
    names = MATRICES if setting == "heuristic" else tuple(SHAPES)
    params = {name: wave(SHAPES[name], i, 0.5) for i, name in enumerate(names)}
    axes = {name: AXES[name] for name in names} if "logical_factor_rules" in SETTINGS[setting] else None
    driven = optimizers.drive_learning_rate(
        lambda learning_rate: adafactor.Adafactor(learning_rate, **SETTINGS[setting])
    )
    with optimizers.run_context(axes):
        state = driven.init(params)
    for t in range(3):
        grads = {name: wave(SHAPES[name], 10 * t + i, 0.1 * (1 + i + t)) for i, name in enumerate(names)}
        if setting == "nan" and t == 1:
            grads = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.nan), grads)
        step = FIRST_STEP[setting] + t if setting in FIRST_STEP else None
        with optimizers.run_context(axes, step):
            updates, state = driven.update(grads, state, params, jnp.float32(0.02 / (1 + t)))
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("setting", SETTINGS)
def test_adafactor_equals_that_of_t5x(setting):
    params, state = after_three_steps(setting)
    assert set(params) == set(OF_T5X[setting])
    for name, p in params.items():
        flat = np.asarray(p, np.float64).ravel()
        sums = flat.sum(), flat @ np.cos(np.arange(flat.size))
        np.testing.assert_allclose(sums, OF_T5X[setting][name], rtol=2e-5, atol=2e-6, err_msg=name)
    if setting == "momentum":  # shapes as there, so that states can be taken over; stacks stay whole
        shapes = {field: np.shape(getattr(state, field)["stacked"]) for field in ("v_row", "v_col", "v", "m")}
        assert shapes == {"v_row": (2, 4), "v_col": (2, 6), "v": (1,), "m": (2, 4, 6)}


def test_each_layer_of_a_stack_is_its_own_parameter():
    """A stack of two equals two parameters, each with its own sizes, clipping and means."""
    rules = {"logical_factor_rules": {"layers": "batch", "embed": "row", "mlp": "column"}, "min_dim_size_to_factor": 2}
    optimizer = adafactor.Adafactor(0.1, **rules)

    def step(params, grads, axes):
        with optimizers.run_context(axes):
            return optimizer.update(grads, optimizer.init(params), params)[0]

    stack, g = wave((2, 4, 6), 0, 1.0) * jnp.array([1.0, 5.0])[:, None, None], wave((2, 4, 6), 3, 1.0)
    together = step({"w": stack}, {"w": g}, {"w": ("layers", "embed", "mlp")})["w"]
    alone = [step({"w": stack[i]}, {"w": g[i]}, {"w": ("embed", "mlp")})["w"] for i in range(2)]
    np.testing.assert_allclose(together, jnp.stack(alone), rtol=1e-6)


def test_the_trainer_tells_the_axes_of_scanned_layers():
    rules = {"logical_factor_rules": adafactor.standard_logical_factor_rules(), "beta1": 0.9}
    trainer = trainer_support.make_trainer(
        lambda learning_rate: adafactor.Adafactor(learning_rate, **rules),
        "models.T5Config.scan_layers = True",
        "models.T5Config.num_decoder_layers = 2",
        mesh=(2, 2),
    )
    batch = tiny.random_batch(trainer_support.BATCH)
    shapes, shardings, _ = trainer.abstract_state({k: v.shape for k, v in batch.items()})
    kernel = shapes.params["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    assert kernel.shape == (2, 32, 64)
    row, column, m = (
        getattr(shapes.opt_state, field)["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
        for field in ("v_row", "v_col", "m")
    )
    assert (row.shape, column.shape, m.shape) == ((2, 32), (2, 64), (2, 32, 64))
    assert shardings.opt_state.m == shardings.params  # as `v` of what is not factored


def test_adafactor_is_that_of_optax_where_it_is_the_same_function():
    params = {name: wave(SHAPES[name], i, 0.5) for i, name in enumerate(MATRICES)}
    ours = adafactor.Adafactor(0.05, min_dim_size_to_factor=2, beta1=0.9)
    theirs = optax.adafactor(0.05, min_dim_size_to_factor=2, momentum=0.9)
    states, both = (ours.init(params), theirs.init(params)), (params, params)
    for t in range(3):
        grads = jax.tree.map(lambda p, t=t: wave(p.shape, t, 0.3), params)
        steps = [o.update(grads, s, p) for o, s, p in zip((ours, theirs), states, both, strict=True)]
        states, both = [s for _, s in steps], [optax.apply_updates(p, u) for p, (u, _) in zip(both, steps, strict=True)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *both)


@pytest.mark.parametrize(
    "arguments, axes, message",
    [
        ({}, None, "has 3 dimensions .2, 4, 6., so it has to be said"),
        (
            {"logical_factor_rules": {"layer": "batch"}},
            ("layers", "embed", "mlp"),
            "nothing of the logical axis 'layers'",
        ),
        (RULES, ("embed", "mlp", "relpos_buckets"), "neither of its axis 'relpos_buckets'"),
        ({"logical_factor_rules": dict.fromkeys(("a", "b", "c"), "rows")}, ("a", "b", "c"), "Did you mean 'row'"),
        ({"factor_map": [("other", None)]}, None, "no rule for the parameter 'w'"),
        ({"factor_map": [("w", ("row",))]}, None, "has 1 dimensions, and its shape is"),
        ({"factored": False, "factor_map": []}, None, "exclude each other"),
        ({"clipping_threshold": 0.0}, None, "clipping_threshold = 0.0: must be a number above 0"),
    ],
)
def test_what_adafactor_refuses(arguments, axes, message):
    with pytest.raises(ConfigError, match=message), optimizers.run_context(axes and {"w": axes}):
        adafactor.Adafactor(0.1, **arguments).init({"w": jnp.zeros((2, 4, 6))})


# --- combined of several ----------------------------------------------------------------------------------------------


def test_statistics_reach_the_parts():
    """A chain, and each part of a MultiOptimizer, see the statistics of what they update; needs are found through both."""
    params, grads_N = optimizer_support.tree_params(), optimizer_support.tree_grads()
    stats = optimizer_support.statistics_of(grads_N)

    def both(learning_rate):
        rest = [optax.clip(1e9), optimizers.micro_sign]
        pairs = [
            ("kernel", optimizers.micro_adam),
            ("bias|scale", lambda learning_rate: optimizers.chain(rest, learning_rate)),
        ]
        return optimizers.MultiOptimizer(pairs, learning_rate)

    assert set(optimizers.needs_of(both, params)) == {"mean", "mean_square", "mean_sign"}
    driven = optimizers.drive_learning_rate(both)
    assert driven.uses_rate
    updates, _ = driven.update(stats.mean, driven.init(params), params, 0.1, statistics=stats)
    for optimizer, pick in ((optimizers.micro_adam(0.1), "kernel"), (optimizers.micro_sign(0.1), "bias")):
        alone, _ = optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)
        np.testing.assert_allclose(updates["dense"][pick], alone["dense"][pick], rtol=1e-6)


def test_what_is_chosen_by_a_traversal_or_a_function():
    from flax import traverse_util

    params = {"a": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}, "b": {"kernel": jnp.ones((2, 2))}}
    kernels = traverse_util.ModelParamTraversal(lambda path, _: "kernel" in path)
    multi = optimizers.MultiOptimizer([(kernels, optax.sgd(1.0)), (lambda name, p: name == "a/bias", optax.sgd(2.0))])
    updates, _ = multi.update(params, multi.init(params))
    assert [float(x.ravel()[0]) for x in jax.tree.leaves(updates)] == [-2.0, -1.0, -1.0]
    assert not multi.uses_rate


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optimizers.chain([]), "give a list"),
        (lambda: optimizers.chain([optax.clip], 0.1), "needs its parentheses"),
        (lambda: optimizers.chain([optax.adamw]), "adamw has no learning rate"),
        (lambda: optimizers.chain([3], 0.1), "3 is no optax transformation"),
        (lambda: optimizers.MultiOptimizer(["w"]), "give pairs"),
        (lambda: optimizers.MultiOptimizer([("(", optax.sgd(1.0))]), "not a regular expression"),
        (
            lambda: optimizers.MultiOptimizer([("x", optax.sgd(1.0))]).init({"w": jnp.ones(1)}),
            "'x' matches no parameter",
        ),
        (
            lambda: optimizers.MultiOptimizer([("w", optax.sgd(1.0)), (".", optax.sgd(1.0))]).init({"w": jnp.ones(1)}),
            "several optimizers match the parameter 'w'",
        ),
    ],
)
def test_what_combinations_refuse(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_names_of_t5x_are_those_of_optax():
    params = {"w": jnp.ones(3)}
    for name in ("adabelief", "adagrad", "adamw", "fromage", "lamb", "lars", "lion", "radam", "rmsprop", "sgd", "yogi"):
        ours, theirs = getattr(optimizers, name)(0.1), getattr(optax, name)(0.1)
        np.testing.assert_array_equal(
            ours.update(params, ours.init(params), params)[0]["w"],
            theirs.update(params, theirs.init(params), params)[0]["w"],
        )
    assert optimizers.OptaxWrapper(theirs) is theirs
