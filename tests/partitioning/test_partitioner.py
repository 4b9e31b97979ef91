"""Meshes, rules, and the sharding of optimizer states."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from perex_t5x.errors import ConfigError
from perex_t5x.partitioning import (
    PjitPartitioner,
    constrain,
    logical_to_mesh_axes,
    standard_logical_axis_rules,
)


@pytest.mark.parametrize(
    "arguments,shape",
    [
        ({}, (1, 8, 1)),
        ({"num_partitions": 2}, (1, 4, 2)),
        ({"model_parallel_submesh": (2, 2, 1, 1)}, (1, 2, 4)),
        ({"ici_mesh_shape": (2, 2, 2)}, (2, 2, 2)),
        ({"ici_mesh_shape": (4, 2)}, (1, 4, 2)),
        ({"ici_mesh_shape": (4, 2), "num_partitions": 1}, (1, 4, 2)),  # 1 is what the run files bind
        ({"ici_mesh_shape": (2, 2), "dcn_mesh_shape": (2, 1, 1)}, (2, 2, 2)),
    ],
)
def test_mesh_shapes(arguments, shape):
    partitioner = PjitPartitioner(**arguments)
    assert tuple(partitioner.mesh.shape.values()) == shape
    assert partitioner.mesh.axis_names == ("replica", "data", "model")
    assert partitioner.data_parallel_size == shape[0] * shape[1]


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"num_partitions": 3}, "num_partitions = 3 does not divide the 8.*num_partitions = 2"),
        ({"ici_mesh_shape": (3, 2)}, "has 6 devices, but there are 8"),
        ({"num_partitions": 2, "model_parallel_submesh": (2, 2)}, "disagree"),
        ({"model_parallel_submesh": (3, 1, 1, 1)}, r"model_parallel_submesh = \(3, 1, 1, 1\) does not divide the 8"),
        ({"num_partitions": 2, "ici_mesh_shape": (4, 2)}, "either num_partitions"),
        ({"dcn_mesh_shape": (3, 1, 1)}, "asks for 3 slices"),
        ({"logical_axis_rules": [("embed", "modle")]}, "maps 'embed' to 'modle'"),
        ({"ici_mesh_shape": (1, 2, 2, 2)}, "give .replica, data, model. or .data, model."),
    ],
)
def test_bad_meshes(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PjitPartitioner(**arguments)


def test_standard_rules():
    rules = standard_logical_axis_rules()
    assert logical_to_mesh_axes(("embed", "mlp"), rules) == P(None, "model")
    assert logical_to_mesh_axes(("batch", "length", "embed"), rules) == P(("replica", "data"), None, None)
    fsdp = standard_logical_axis_rules(parameter_partitioning_dims=2)
    assert logical_to_mesh_axes(("embed", "mlp"), fsdp) == P("data", "model")
    # An activation's batch axis takes `data` first: its embed axis is left alone.
    assert logical_to_mesh_axes(("batch", "length", "embed"), fsdp) == P(("replica", "data"), None, None)
    both = standard_logical_axis_rules(2, 2)
    assert logical_to_mesh_axes(("batch", "length", "embed"), both)[2] == "model"
    assert logical_to_mesh_axes(("vocab", "embed"), both) == P("model", "data")
    with pytest.raises(ConfigError, match="no logical axis rule for 'expert'"):
        logical_to_mesh_axes(("expert",), rules)
    with pytest.raises(ConfigError, match="must be 1 or 2"):
        standard_logical_axis_rules(3)


def test_any_optimizer_state_is_sharded_like_the_parameters():
    partitioner = PjitPartitioner(num_partitions=4)
    boxed = {"mlp": {"wi": nn.LogicallyPartitioned(np.zeros((8, 16), np.float32), ("embed", "mlp"))}}
    params = nn.meta.unbox(boxed)
    shardings = partitioner.params_shardings(boxed)
    for optimizer in (
        optax.adamw(0.1),
        optax.lion(0.1),
        optax.adafactor(0.1),
        optax.chain(optax.ema(0.9), optax.sgd(0.1, 0.9)),
    ):
        state = jax.eval_shape(optimizer.init, params)
        placed = partitioner.shardings_like_params(state, shardings, params)
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(placed), strict=True):
            expected = shardings["mlp"]["wi"] if leaf.shape == (8, 16) else partitioner.replicated
            assert sharding == expected


def test_a_dimension_that_does_not_divide_is_replicated():
    partitioner = PjitPartitioner(num_partitions=4)
    boxed = {"w": nn.LogicallyPartitioned(np.zeros((8, 6), np.float32), ("embed", "mlp"))}
    assert partitioner.params_shardings(boxed)["w"].spec == P(None, None)


def test_model_dimensions_are_checked():
    partitioner = PjitPartitioner(num_partitions=8)
    partitioner.check_model({"num_heads": 8, "mlp_dim": 64})
    with pytest.raises(ConfigError, match="num_heads = 6 of the model is not divisible by 8.*divisor of 2"):
        partitioner.check_model({"num_heads": 6, "mlp_dim": 64})


def test_constrain_applies_inside_the_context_only():
    partitioner = PjitPartitioner(num_partitions=2)
    x = np.zeros((8, 4, 6), np.float32)
    names = ("batch", "length", "mlp")
    assert "sharding_constraint" not in str(jax.make_jaxpr(lambda x: constrain(x, names))(x))
    with partitioner.constraints():
        assert "sharding_constraint" in str(jax.make_jaxpr(lambda x: constrain(x, names))(x))


def test_batch_is_described():
    text = PjitPartitioner(num_partitions=2).describe_batch(32)
    assert text.startswith("global batch 32 = 4 data shard(s) x 8 examples; mesh replica 1 x data 4 x model 2")
