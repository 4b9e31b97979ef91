"""Small programs of known content, compiled for fake CPU devices and for TPU slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from perex_t5x.hardware.devices import has_libtpu, tpu_devices

REPLICATED = P()
AXES = ("replica", "data", "model")
needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed (extra 'tpu')")


def cpu_mesh(replica=2, data=2, model=2):
    shape = (replica, data, model)
    return Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), AXES)


def tpu_mesh(shape, topology="v5e:4x4", num_slices=1):
    """`shape` is that of one slice; several slices multiply `replica`."""
    devices = tpu_devices(topology, num_slices)
    if num_slices == 1:
        return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES)
    across = (num_slices, 1, 1)
    grid = mesh_utils.create_hybrid_device_mesh(shape, across, devices=devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES)


def mesh_of(kind):
    """The meshes that the same programs are tried on."""
    if kind == "cpu":
        return cpu_mesh()
    return tpu_mesh((2, 4, 2), {"v5e": "v5e:4x4", "v6e": "v6e:4x4"}[kind])


PLATFORMS = ["cpu", pytest.param("v5e", marks=needs_libtpu), pytest.param("v6e", marks=needs_libtpu)]


def compile_sharded(function, mesh, *shapes, in_spec=REPLICATED, out_spec=REPLICATED):
    """Compiles `function` inside `shard_map` over all axes, for arrays of these global shapes."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, in_spec)) for s in shapes]
    return jax.jit(mapped).lower(*arguments).compile()


def compile_on_one_chip(function, *shapes, topology="v5e:1x1", dtype=jnp.bfloat16):
    sharding = jax.sharding.SingleDeviceSharding(tpu_devices(topology)[0])
    arguments = [jax.ShapeDtypeStruct(s, dtype, sharding=sharding) for s in shapes]
    return jax.jit(function).lower(*arguments).compile()
