"""Checkpoints of T5X restored onto a mesh: parameters in other layouts of layers, optimizer states under other names."""

import jax
import numpy as np
import optax
import pytest
from flax import traverse_util

from perex_t5x import checkpoints
from perex_t5x.errors import ConfigError
from perex_t5x.train_state import TrainState
from perex_t5x.utils import RestoreCheckpointConfig
from tests.checkpoint_formats import support

MESH = jax.make_mesh((2, 4), ("data", "model"))


def state(params, optimizer=None, dtype=np.float32) -> TrainState:
    """Shapes of a run's state."""

    def make():
        tree = traverse_util.unflatten_dict({name: np.zeros(a.shape, dtype) for name, a in params.items()}, sep="/")
        opt_state = optimizer.init(tree) if optimizer else {}
        return TrainState(np.int32(0), tree, opt_state, jax.random.key_data(jax.random.key(0)))

    return jax.eval_shape(make)


def shardings(shapes):
    """The first axis that 4 divides over 'model', the others over nothing: parts on all devices."""

    def one(x):
        axis = next((i for i, size in enumerate(x.shape) if size % 4 == 0), None)
        spec = jax.sharding.PartitionSpec(*(None if i != axis else "model" for i in range(len(x.shape))))
        return jax.sharding.NamedSharding(MESH, spec)

    return jax.tree.map(one, shapes)


def restore(path, shapes, config=None, parts=("target", "state")):
    config = config or RestoreCheckpointConfig()
    assert checkpoints.leaves_given(path, shapes, config, parts)
    restored = checkpoints.restore(path, shapes, shardings(shapes), config, parts)
    places = checkpoints.flatten(shardings(shapes).state_dict())
    assert all(array.sharding.is_equivalent_to(places[name], array.ndim) for name, array in restored.leaves.items())
    return restored


def assert_leaves(restored, expected) -> None:
    assert set(restored.leaves) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(restored.leaves[name]), array, err_msg=name)


def targets(params):
    return {f"target/{name}": array for name, array in params.items()}


@pytest.mark.parametrize("write", [support.write_legacy, support.write_orbax])
def test_parameters_and_adam(tmp_path, write):
    """The state of optax.adamw, which T5X's wrapper lays out as optax does, and the count of a schedule that we have not."""
    params = support.t5_params()
    leaves = support.state_dict(params, {**support.adam(params), "2/count": np.array(7, np.int32)})
    path = write(tmp_path / "checkpoint_7", leaves)
    restored = restore(path, state(params, optax.adamw(1e-3)))
    assert restored.step == 7
    assert_leaves(restored, {name: a for name, a in leaves.items() if "2/count" not in name})
    # Evaluation reads parameters alone, here in bfloat16.
    config = RestoreCheckpointConfig(dtype="bfloat16")
    restored = restore(path, state(params), config, parts=("target",))
    assert_leaves(restored, {name: a.astype(support.BF16) for name, a in targets(params).items()})


STORED = {"unrolled": lambda p: p, "axis0": lambda p: support.scanned(p, 0), "axis1": lambda p: support.scanned(p, 1)}


@pytest.mark.parametrize("wanted", ["unrolled", "axis0"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("write", [support.write_legacy, support.write_orbax])
def test_layers_in_any_layout(tmp_path, write, stored, wanted):
    params = support.t5_params()
    there, here = STORED[stored](params), STORED[wanted](params)
    path = write(tmp_path / "checkpoint_7", support.state_dict(there, support.adam(there)))
    restored = restore(path, state(here, optax.adamw(1e-3)))

    def laid_out(prefix):
        name = f"state/param_states/0/{prefix}/"
        unrolled = support.adam(there)
        back = {k.removeprefix(f"0/{prefix}/"): a for k, a in unrolled.items() if k.startswith(f"0/{prefix}/")}
        return {f"{name}{k}": a for k, a in _as(back, stored, wanted).items()}

    expected = targets(here) | laid_out("mu") | laid_out("nu")
    expected |= {"state/step": np.int32(7), "state/param_states/0/count": np.int32(7)}
    assert_leaves(restored, expected)


def _as(params, stored, wanted):
    """The same parameters in another layout, by hand."""
    if stored == wanted:
        return params
    if stored == "unrolled":
        return support.scanned(params, 0)
    axis = int(stored[-1])
    unrolled = {}
    for name, array in params.items():
        stack = name.split("/")[0]
        former = f"{stack}/{stack if axis else 'layers'}/"
        if not name.startswith(former):
            unrolled[name] = array
            continue
        for i in range(support.LAYERS):
            unrolled[f"{stack}/layers_{i}/{name.removeprefix(former)}"] = np.take(array, i, axis)
    return unrolled if wanted == "unrolled" else support.scanned(unrolled, 0)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_adafactor_of_t5x_becomes_optax_s(tmp_path, momentum):
    params = support.t5_params()
    saved = support.adafactor(params, momentum=momentum is not None)
    path = support.write_legacy(tmp_path / "checkpoint_7", support.state_dict(params, saved))
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=1, momentum=momentum)
    restored = restore(path, state(params, optimizer))
    expected = {**targets(params), "state/step": np.int32(7), "state/param_states/0/count": np.int32(7)}
    for name in params:
        for slot in ("v_row", "v_col", "v"):
            expected[f"state/param_states/0/{slot}/{name}"] = saved[f"{name}/{slot}"]
        if momentum:
            expected[f"state/param_states/4/ema/{name}"] = saved[f"{name}/m"]
    if momentum:
        expected["state/param_states/4/count"] = np.int32(7)
    assert_leaves(restored, expected)


def test_momentum_that_nobody_has_is_refused(tmp_path):
    params = support.t5_params()
    leaves = support.state_dict(params, support.adafactor(params, momentum=True))
    path = support.write_legacy(tmp_path / "checkpoint_7", leaves)
    shapes = state(params, optax.adafactor(1e-3, min_dim_size_to_factor=1))
    with pytest.raises(ConfigError, match="written by another optimizer: this one has no use for .*/m;"):
        checkpoints.check(path, shapes, RestoreCheckpointConfig())


def test_partial_loads(tmp_path, caplog):
    """assignment_map, fallback_to_scratch, another optimizer, leaves that are missing or of another shape."""
    params = support.t5_params()
    there = support.scanned(params, 1)
    path = support.write_legacy(
        tmp_path / "checkpoint_7", support.state_dict(there, support.adafactor(there, factors=False))
    )
    adam = state(params, optax.adamw(1e-3))
    with pytest.raises(ConfigError, match="does not have .* of the leaves this run needs: state/param_states/0/"):
        checkpoints.check(path, adam, RestoreCheckpointConfig())
    switch = [(".*param_states.*", None)]
    restored = restore(path, adam, RestoreCheckpointConfig(assignment_map=switch))
    assert_leaves(restored, targets(params) | {"state/step": np.int32(7)})
    # By the checkpoint's own names, too.
    rule = ("target/decoder/logits_dense/kernel", "target/decoder/decoder/mlp/wi_0/kernel")
    one = state({"decoder/logits_dense/kernel": there["decoder/decoder/mlp/wi_0/kernel"]})
    restored = restore(path, one, RestoreCheckpointConfig(assignment_map=[*switch[:0], rule]), parts=("target",))
    assert_leaves(restored, {rule[0]: there["decoder/decoder/mlp/wi_0/kernel"]})

    larger = {**params, "decoder/new/kernel": np.zeros((2, 2))}
    with pytest.raises(ConfigError, match="does not have 1 of the leaves this run needs: target/decoder/new/kernel"):
        checkpoints.check(path, state(larger), RestoreCheckpointConfig())
    config = RestoreCheckpointConfig(fallback_to_scratch=True)
    assert "target/decoder/new/kernel" not in restore(path, state(larger), config).leaves
    wider = {**params, "decoder/layers_1/mlp/wo/kernel": np.zeros((3, 3))}
    with pytest.raises(ConfigError, match=r"wo/kernel: checkpoint \(16, 8\), this run \(3, 3\)"):
        checkpoints.check(path, state(wider), RestoreCheckpointConfig())
    fewer = {name: a for name, a in params.items() if "relpos" not in name}
    caplog.clear()
    checkpoints.check(path, state(fewer), RestoreCheckpointConfig())
    assert "2 parameters that the model has not" in caplog.text and "decoder/relpos_bias/rel_embedding" in caplog.text


def test_a_missing_layer_is_named(tmp_path):
    params = support.t5_params()
    leaves = support.state_dict({name: a for name, a in params.items() if name != "decoder/layers_1/mlp/wo/kernel"})
    path = support.write_legacy(tmp_path / "checkpoint_7", leaves)
    with pytest.raises(
        ConfigError, match="target/decoder/layers/mlp/wo/kernel is made of all layers, and of layer 1 it is"
    ):
        checkpoints.check(path, state(support.scanned(params, 0)), RestoreCheckpointConfig())
