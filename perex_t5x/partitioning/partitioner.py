"""`PjitPartitioner`: a mesh with logical axis rules, and the sharding of any pytree by them.

Models name the axes of their activations and parameters and do not know the mesh. `PjitPartitioner.constraints()` and
`PjitPartitioner.manual()` tell them while a program is traced: a model's calls of `constrain` and `gather_parameter` refer
to the innermost such context of the current thread, and do nothing outside of any. It is a thread-local variable, not an
argument, because it would otherwise have to be threaded through every Flax module, and users' modules would not have it.
The other end is `perex_t5x.models.layers.parameter`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from perex_t5x import arguments
from perex_t5x.arguments import PositiveInt
from perex_t5x.errors import ConfigError
from perex_t5x.partitioning.gather import gather_by_spec
from perex_t5x.partitioning.mesh import make_mesh, torus_sizes
from perex_t5x.partitioning.rules import (
    DATA_AXES,
    LAYERS,
    MESH_AXES,
    LogicalAxisRules,
    MeshAxes,
    check_rules,
    logical_to_mesh_axes,
    names_of,
    only_axes,
    standard_logical_axis_rules,
)
from perex_t5x.utils import log_ignored


class PjitPartitioner:
    """Places arrays on a mesh (`replica`, `data`, `model`) by logical axis rules.

    Args:
      num_partitions: size of the `model` axis; the rest of the devices form `data`. Honoured on every
        backend, CPU included.
      model_parallel_submesh: T5X's way to say the same on a TPU torus; its product is the `model` axis, and
        `mesh_utils.create_device_mesh` finds the placement.
      ici_mesh_shape: explicit (replica, data, model) sizes within a slice, instead of `num_partitions`.
      dcn_mesh_shape: explicit (replica, data, model) sizes across slices; the mesh is their product.
      logical_axis_rules: see `standard_logical_axis_rules`, the default.
      devices: what to build the mesh from; all devices by default.
      backend: of these devices: 'cpu', 'tpu', 'gpu'; None: the default one.
      params_on_devices, use_cpu_pjit: of T5X, and ignored: parameters are on the devices, and CPUs run what others do.
    """

    def __init__(
        self,
        num_partitions: PositiveInt | None = None,
        model_parallel_submesh: Sequence[PositiveInt] | None = None,
        ici_mesh_shape: Sequence[PositiveInt] | None = None,
        dcn_mesh_shape: Sequence[PositiveInt] | None = None,
        logical_axis_rules: LogicalAxisRules | None = None,
        devices: Sequence[Any] | None = None,
        backend: str | None = None,
        params_on_devices: bool = True,
        use_cpu_pjit: bool | None = None,
    ):
        arguments.check("PjitPartitioner", arguments.hints(PjitPartitioner), dict(locals()))
        if devices is not None and not (len(devices) and all(hasattr(d, "device_kind") for d in devices)):
            raise ConfigError(f"PjitPartitioner.devices = {devices!r}: give devices, at least one, or None for all.")
        if (num_partitions not in (None, 1) or model_parallel_submesh) and ici_mesh_shape:
            raise ConfigError("PjitPartitioner: give either num_partitions / model_parallel_submesh or ici_mesh_shape.")
        rules = standard_logical_axis_rules() if logical_axis_rules is None else logical_axis_rules
        self.logical_axis_rules = tuple((name, axes) for name, axes in rules)
        check_rules(self.logical_axis_rules)
        self.mesh = make_mesh(
            num_partitions,
            model_parallel_submesh,
            ici_mesh_shape,
            dcn_mesh_shape,
            list(devices) if devices is not None else _devices_of(backend),
        )
        ignored = {
            "params_on_devices": (True, "parameters are kept on the devices"),
            "use_cpu_pjit": (None, "CPUs run the same programs as other devices"),
        }
        given = {"params_on_devices": params_on_devices, "use_cpu_pjit": use_cpu_pjit}
        log_ignored("PjitPartitioner", given, ignored)

    @property
    def data_parallel_size(self) -> int:
        """The number of shards that the batch is split into."""
        return math.prod(self.mesh.shape[a] for a in self.batch_axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The data axes that divide the batch: those with more than one device."""
        return tuple(a for a in DATA_AXES if self.mesh.shape.get(a, 1) > 1)

    def divided(self, spec: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """A parameter's sharding over the axes that divide the batch, and over the others; axes of size 1 are left out."""
        others = [a for a in self.mesh.axis_names if self.mesh.shape[a] > 1 and a not in self.batch_axes]
        return only_axes(spec, self.batch_axes), only_axes(spec, others)

    @functools.cached_property
    def scatter_stages(self) -> Mapping[str, tuple[int, ...]]:
        """The sizes along each torus dimension of data axes that span several dimensions of a TPU torus.

        Over such an axis the TPU compiler turns a reduce-scatter into an all-reduce; over one dimension after the other it
        does not.
        """
        grid, stages = self.mesh.devices, {}
        for axis in self.batch_axes:
            along = np.moveaxis(grid, self.mesh.axis_names.index(axis), 0).reshape(self.mesh.shape[axis], -1)[:, 0]
            sizes = torus_sizes([getattr(device, "coords", None) for device in along])
            if len(sizes) > 1:
                stages[axis] = sizes
        return stages

    @property
    def model_parallel_size(self) -> int:
        return self.mesh.shape["model"]

    @property
    def data_sharding(self) -> NamedSharding:
        """Sharding of a batch: its leading axis over `replica` and `data`."""
        return NamedSharding(self.mesh, PartitionSpec(DATA_AXES))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def automatic_rules(self) -> LogicalAxisRules:
        """The rules for where the data axes are manual: without the data axes."""
        return tuple(
            (name, tuple(a for a in names_of(axes) if a not in DATA_AXES) or None)
            for name, axes in self.logical_axis_rules
        )

    @property
    def shards_parameters_over_data(self) -> bool:
        """Whether some rule shards parameters over the data axes (FSDP)."""
        return any(
            set(self.batch_axes).intersection(names_of(axes))
            for name, axes in self.logical_axis_rules
            if name != "batch"
        )

    def constraints(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the models' activation constraints apply; enter it while tracing."""
        return _entered(self, manual=False)

    def manual(self, transport: Any = None) -> contextlib.AbstractContextManager[None]:
        """The same inside a `shard_map` over the data axes: constraints are over `model` alone, parameters are shards.

        `transport` is the dtype in which gradients of gathered parameters are sent; None: their own.
        """
        return _entered(self, manual=True, transport=transport)

    def params_shardings(self, boxed_params: Any) -> Any:
        """Sharding of every parameter from its logical axis names (`nn.with_logical_partitioning`)."""

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            names = leaf.names if isinstance(leaf, nn.LogicallyPartitioned) else ()
            value: Any = getattr(leaf, "value", leaf)
            shape = value.shape
            if not names:
                return self.replicated
            spec, dropped = self.parameter_spec(names, shape)
            for i, axes, size in dropped:
                logging.warning(
                    "parameter %s: dimension %d of %s is not divisible by mesh axis %s (%d); replicated there.",
                    keystr(path, simple=True, separator="/"), i, tuple(shape), axes, size,
                )  # fmt: skip
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(
            sharding, boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
        )

    def parameter_spec(
        self, names: Sequence[str | None], shape: Sequence[int]
    ) -> tuple[PartitionSpec, list[tuple[int, MeshAxes, int]]]:
        """A parameter's sharding, and the (dimension, axes, their size) that were left out since they do not divide it.

        Vectors (scales of norms, biases) are whole along the data axes. There is nothing to save, gathering a few kilobytes
        costs as much as waiting for the other devices, and on TPUs one product hides one gather: it had better be a matrix.
        """
        spec = list(logical_to_mesh_axes(names, self.logical_axis_rules))
        if sum(name != LAYERS for name in names) == 1:
            spec = list(only_axes(PartitionSpec(*spec), [a for a in MESH_AXES if a not in DATA_AXES]))
        dropped = []
        for i, axes in enumerate(spec):
            size = math.prod(self.mesh.shape[a] for a in names_of(axes))
            if shape[i] % size:
                dropped.append((i, axes, size))
                spec[i] = None
        return PartitionSpec(*spec), dropped

    def shardings_like_params(self, tree: Any, params_shardings: Any, params_shapes: Any) -> Any:
        """Sharding of any pytree (an optimizer state, say) by matching its leaves to parameters.

        A leaf whose path ends with a parameter's path and whose shape is the parameter's gets its sharding; everything else,
        counters and factored moments among them, is replicated.
        """
        return like_params(tree, params_shardings, params_shapes, default=self.replicated)

    def check_model(self, sharded_dimensions: Mapping[str, int]) -> None:
        """Raises if a model dimension that is split over the `model` axis is not divisible by it."""
        size = self.model_parallel_size
        bad = {name: dim for name, dim in sharded_dimensions.items() if dim % size}
        if bad:
            listed = ", ".join(f"{name} = {dim}" for name, dim in bad.items())
            common = math.gcd(*sharded_dimensions.values())
            raise ConfigError(
                f"the model axis has {size} partitions, but {listed} of the model is not divisible by {size}. "
                f"Change the model, or set PjitPartitioner.num_partitions to a divisor of {common}."
            )

    def check_batch(self, batch_size: int, binding: str) -> None:
        """Raises unless a global batch splits evenly over the data shards."""
        shards = self.data_parallel_size
        if batch_size % shards:
            raise ConfigError(f"{binding} = {batch_size} is not divisible by the {shards} data shards of the mesh.")

    def describe_batch(self, batch_size: int) -> str:
        """One line that says what BATCH_SIZE means, e.g. 'global batch 128 = 8 data shards x 16'."""
        shards = self.data_parallel_size
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        return (
            f"global batch {batch_size} = {shards} data shard(s) x {batch_size // shards} examples; "
            f"mesh {axes} on {self.mesh.size} device(s) of {jax.process_count()} process(es)"
        )


def _devices_of(backend: str | None) -> list[Any]:
    try:
        return jax.devices(backend)
    except RuntimeError as e:
        raise ConfigError(
            f"PjitPartitioner.backend = {backend!r}: there are no such devices here. None takes those that there are: "
            f"{jax.device_count()} of platform {jax.default_backend()!r}."
        ) from e


def like_params(tree: Any, of_params: Any, params_shapes: Any, default: Any) -> Any:
    """A tree like `tree` whose leaves are those of `of_params`, for whatever is like a parameter; else `default`.

    A leaf is like a parameter if its path ends with the parameter's (`0.mu.decoder.mlp.wi.kernel` with
    `decoder.mlp.wi.kernel`), and its shape is the same.

    >>> shapes = {"w": jax.ShapeDtypeStruct((2, 3), np.float32)}
    >>> like_params({"mu": shapes, "count": shapes["w"]}, {"w": "w's"}, shapes, default="")
    {'count': '', 'mu': {'w': "w's"}}
    """
    by_path = {
        keystr(path, simple=True, separator="/"): (value, tuple(leaf.shape))
        for (path, leaf), value in zip(
            jax.tree_util.tree_leaves_with_path(params_shapes), jax.tree.leaves(of_params), strict=True
        )
    }

    def value(path: Any, leaf: Any) -> Any:
        parts = keystr(path, simple=True, separator="/").split("/")
        for start in range(len(parts)):
            match = by_path.get("/".join(parts[start:]))
            if match and match[1] == tuple(leaf.shape):
                return match[0]
        return default

    return jax.tree_util.tree_map_with_path(value, tree)


class _Context(NamedTuple):
    partitioner: PjitPartitioner
    manual: bool  # whether the data axes are
    transport: Any = None


class _Contexts(threading.local):
    """The contexts entered in this thread: one program may be traced in the background while another is traced here."""

    def __init__(self) -> None:
        self.stack: list[_Context] = []


_contexts = _Contexts()


@contextlib.contextmanager
def _entered(partitioner: PjitPartitioner, manual: bool, transport: Any = None) -> Iterator[None]:
    _contexts.stack.append(_Context(partitioner, manual, transport))
    try:
        yield
    finally:
        _contexts.stack.pop()


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Constrains an activation's sharding by logical names; the identity outside a partitioner's contexts."""
    sharding = activation_sharding(names)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def activation_sharding(names: Sequence[str | None]) -> PartitionSpec | NamedSharding | None:
    """What `constrain` constrains to, for use where the context is left already; None: to nothing."""
    if not _contexts.stack:
        return None
    partitioner, manual, _ = _contexts.stack[-1]
    if partitioner.mesh.size == 1:
        return None
    spec = _current_spec(names)
    if manual and partitioner.batch_axes:  # inside shard_map: a PartitionSpec refers to its mesh
        return spec
    return NamedSharding(partitioner.mesh, spec)


def platform() -> str | None:
    """Of the devices that the program being traced is for ('tpu', 'cpu'); None outside a partitioner's contexts."""
    return _contexts.stack[-1][0].mesh.devices.flat[0].platform if _contexts.stack else None


def knows_devices() -> bool:
    """Whether `on_each_device` knows how arrays are divided: inside a partitioner's contexts, or with a single device."""
    return bool(_contexts.stack) or jax.device_count() == 1


def parts(names: Sequence[str | None]) -> tuple[int, ...]:
    """Into how many parts `on_each_device` divides each dimension of an array with these logical axes."""
    if not _contexts.stack:
        return (1,) * len(names)
    mesh = _contexts.stack[-1][0].mesh
    return tuple(math.prod(mesh.shape[a] for a in names_of(axes)) for axes in _current_spec(names))


def on_each_device(
    fn: Callable[..., Any], in_names: Sequence[Sequence[str | None]], out_names: Sequence[Any]
) -> Callable[..., Any]:
    """fn on each device's part of its arguments, for programs that the compiler cannot divide: kernels.

    A `shard_map` over the mesh axes that are not manual yet: inside the step's own, over `model`; elsewhere over all.

    Args:
      in_names, out_names: logical axes of the arguments and of the result, or of each of several results; their sizes must
        be multiples of `parts`.
    """
    if not _contexts.stack:
        return fn
    # Also on a mesh of one device: inside a shard_map the program knows what it is compiled for.
    partitioner, manual, _ = _contexts.stack[-1]
    inside = manual and bool(partitioner.batch_axes)  # a shard_map inside another refers to its mesh
    here = jax.sharding.get_abstract_mesh()
    axes = set(here.axis_names) - set(here.manual_axes) if inside else set(partitioner.mesh.axis_names)
    return jax.shard_map(
        fn,
        mesh=None if inside else partitioner.mesh,
        in_specs=tuple(map(_current_spec, in_names)),
        out_specs=tuple(map(_current_spec, out_names)) if isinstance(out_names[0], tuple) else _current_spec(out_names),
        axis_names=axes,
        check_vma=False,  # as in the step's
    )


def _current_spec(names: Sequence[str | None]) -> PartitionSpec:
    """Over the mesh axes that are not manual in the current context."""
    partitioner, manual, _ = _contexts.stack[-1]
    return logical_to_mesh_axes(names, partitioner.automatic_rules if manual else partitioner.logical_axis_rules)


def has_sharded_parameters() -> bool:
    """Whether the program being traced sees shards of parameters, not whole ones, so that `gather_parameter` is needed.

    True inside `PjitPartitioner.manual()` under rules that shard parameters over data axes (FSDP).
    """
    if not _contexts.stack:
        return False
    context = _contexts.stack[-1]
    return context.manual and context.partitioner.shards_parameters_over_data


def gather_parameter(
    shard: jax.Array, names: Sequence[str | None], shape: Sequence[int], dtype: Any, sent_as: Any = None
) -> jax.Array:
    """The whole parameter, in `dtype`, from this device's shard of it; a cast where parameters are not sharded.

    See `perex_t5x.partitioning.gather.gather_by_spec`.

    Args:
      shard: this device's part along the axes that are sharded over data axes.
      names, shape: logical axes and shape of the whole parameter.
      dtype: of the result.
      sent_as: dtype to send it in, if it is not `dtype`.
    """
    if not has_sharded_parameters():
        return shard.astype(dtype)
    partitioner, _, transport = _contexts.stack[-1]
    spec, _ = partitioner.parameter_spec(names, shape)
    manual, automatic = partitioner.divided(spec)
    return gather_by_spec(shard, manual, dtype, sent_as, partitioner.scatter_stages, automatic, transport)
