"""One table for all optimizers: abstract init, jit equals eager, state sharding equals parameter sharding, exact restore."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import from_state_dict, to_state_dict
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from perex_t5x import optimizers
from perex_t5x.partitioning import PjitPartitioner
from tests.optimizers.optimizer_support import OPTIMIZERS, flat, statistics_of, tree_grads, tree_params

TABLE = {
    **{name: make(0.1, weight_decay=0.01) for name, make in OPTIMIZERS.items()},
    "micro_adam_msq zero": optimizers.micro_adam_msq(0.1, floor="zero", eps=1e-3),
    "moments with parts": optimizers.descend(optimizers.scale_by_moments(1, 0.1, keep_parts=True), 0.1),
}
each = pytest.mark.parametrize("optimizer", TABLE.values(), ids=list(TABLE))


def steps(optimizer, params, state, seeds, update=None):
    for seed in seeds:
        stats = statistics_of(tree_grads(seed=seed))
        updates, state = (update or optimizer.update)(stats.mean, state, params, statistics=stats)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


@each
def test_init_is_abstract(optimizer):
    params = tree_params()
    shapes = jax.eval_shape(lambda: params)
    abstract = jax.eval_shape(optimizer.init, shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
        lambda x: (x.shape, x.dtype), optimizer.init(params)
    )
    stats = statistics_of(tree_grads())
    _, after = jax.eval_shape(lambda p, s: optimizer.update(s.mean, optimizer.init(p), p, statistics=s), shapes, stats)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), after)


@each
def test_jit_equals_eager(optimizer):
    params = tree_params()
    eager = steps(optimizer, params, optimizer.init(params), range(3))
    inside = jax.jit(lambda u, s, p, statistics: optimizer.update(statistics.mean, s, p, statistics=statistics))
    for update in (inside, jax.jit(optimizer.update)):  # the second cannot see that updates are the mean
        jitted = steps(optimizer, params, optimizer.init(params), range(3), update)
        np.testing.assert_allclose(flat(jitted), flat(eager), rtol=1e-5, atol=1e-6)


@each
def test_saved_state_continues_exactly(optimizer):
    params = tree_params()
    update = jax.jit(optimizer.update)
    params_2, state_2 = steps(optimizer, params, optimizer.init(params), range(2), update)
    through = steps(optimizer, params_2, state_2, range(2, 5), update)
    leaves, tree = jax.tree.flatten(state_2)
    numpy_state = jax.tree.unflatten(tree, [np.array(x) for x in leaves])
    by_name = from_state_dict(optimizer.init(params), jax.tree.map(np.array, to_state_dict(state_2)))
    for restored in (numpy_state, by_name):
        again = steps(optimizer, params_2, restored, range(2, 5), update)
        assert jax.tree.all(jax.tree.map(np.array_equal, again, through))
    fresh = steps(optimizer, params_2, optimizer.init(params), range(2, 5), update)
    assert not jax.tree.all(jax.tree.map(np.array_equal, fresh, through))


@each
def test_state_is_sharded_like_the_parameters(optimizer):
    assert jax.device_count() == 8
    partitioner = PjitPartitioner(num_partitions=2)
    specs = {
        "dense": {"kernel": PartitionSpec("data", "model"), "bias": PartitionSpec("model")},
        "scale": PartitionSpec(),
    }
    shardings = jax.tree.map(lambda s: NamedSharding(partitioner.mesh, s), specs)
    params = jax.device_put(tree_params(), shardings)
    shapes = jax.eval_shape(optimizer.init, params)
    state_shardings = partitioner.shardings_like_params(shapes, shardings, params)
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
    stats = statistics_of(tree_grads())
    stats = jax.device_put(stats, partitioner.shardings_like_params(jax.eval_shape(lambda: stats), shardings, params))
    step = jax.jit(
        lambda s, p, x: optimizer.update(x.mean, s, p, statistics=x), out_shardings=(shardings, state_shardings)
    )
    updates, state = step(state, params, stats)

    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = keystr(path, simple=True, separator="/")
        spec = next((s for end, s in {
            "dense/kernel": PartitionSpec("data", "model"), "dense/bias": PartitionSpec("model"), "scale": PartitionSpec(),
        }.items() if name.endswith(end)), PartitionSpec())  # fmt: skip
        assert leaf.sharding.is_equivalent_to(NamedSharding(partitioner.mesh, spec), leaf.ndim), name
        assert leaf.ndim == 0 or name.endswith(("kernel", "bias", "scale")), name
    # The same numbers as on one device.
    alone, _ = optimizer.update(
        statistics_of(tree_grads()).mean,
        optimizer.init(tree_params()),
        tree_params(),
        statistics=statistics_of(tree_grads()),
    )
    np.testing.assert_allclose(flat(updates), flat(alone), rtol=1e-4, atol=1e-7)


def test_states_are_named_as_optax_adams():
    import optax

    params = tree_params()
    theirs = to_state_dict(optax.adamw(0.1).init(params))
    for name in ("adam", "micro_adam", "micro_adam_var", "eve"):
        ours = to_state_dict(OPTIMIZERS[name](0.1, weight_decay=1e-4).init(params))
        assert jax.tree.structure(ours) == jax.tree.structure(theirs), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trainers_schedule_drives_it(name):
    driven = optimizers.drive_learning_rate(OPTIMIZERS[name])
    params, stats = tree_params(), statistics_of(tree_grads())

    @jax.jit
    def update(rate):
        return driven.update(stats.mean, driven.init(params), params, rate, statistics=stats)[0]

    one, half = update(1.0), update(0.5)
    np.testing.assert_allclose(flat(half), 0.5 * flat(one), rtol=1e-6)
    assert optimizers.needs_of(OPTIMIZERS[name], params) == OPTIMIZERS[name](0.1).needs
