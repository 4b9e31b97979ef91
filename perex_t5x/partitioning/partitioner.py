"""Mesh, logical axis rules, and the sharding of any pytree.

Three mesh axes, always present: `replica` (slices over the data-centre network), `data` and `model`.
A parameter or activation carries *logical* axis names (`embed`, `mlp`, ...); rules map these to mesh axes,
the first rule that still fits wins:

    rules = standard_logical_axis_rules(activation_partitioning_dims=1, parameter_partitioning_dims=1)
    logical_to_mesh_axes(("embed", "mlp"), rules)          # PartitionSpec(None, 'model')
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from perex_t5x.errors import ConfigError
from perex_t5x.partitioning.axes import DATA_AXES, MESH_AXES, MeshAxes, names_of, only_axes
from perex_t5x.partitioning.gather import gather_by_spec

LogicalAxisRules = Sequence[tuple[str, MeshAxes]]


def standard_logical_axis_rules(
    activation_partitioning_dims: int = 1,
    parameter_partitioning_dims: int = 1,
    additional_rules: LogicalAxisRules | None = None,
) -> LogicalAxisRules:
    """Returns T5X's standard rules, as (logical axis, mesh axis) pairs in order of priority.

    Args:
      activation_partitioning_dims: 2 also shards the `embed` axis of activations over `model`.
      parameter_partitioning_dims: 2 also shards the `embed` axis of parameters over `data` (FSDP).
      additional_rules: appended, for axis names of one's own.

    >>> dict(standard_logical_axis_rules())["mlp"]
    'model'
    >>> ("embed", "data") in standard_logical_axis_rules(parameter_partitioning_dims=2)
    True
    """
    for name, dims in (
        ("activation_partitioning_dims", activation_partitioning_dims),
        ("parameter_partitioning_dims", parameter_partitioning_dims),
    ):
        if dims not in (1, 2):
            raise ConfigError(f"standard_logical_axis_rules.{name} = {dims!r}: must be 1 or 2.")
    rules: list[tuple[str, MeshAxes]] = [
        ("batch", DATA_AXES),
        ("vocab", "model"),
        ("mlp", "model"),
        ("heads", "model"),
        ("joined_kv", "model"),
    ]
    if activation_partitioning_dims == 2:
        rules.append(("embed", "model"))
    if parameter_partitioning_dims == 2:
        rules.append(("embed", "data"))
    rules += [(name, None) for name in ("embed", "kv", "length", "layers", "relpos_buckets")]
    return (*rules, *(additional_rules or ()))


def logical_to_mesh_axes(names: Sequence[str | None], rules: LogicalAxisRules) -> PartitionSpec:
    """Maps logical axis names to a `PartitionSpec`; a mesh axis is used at most once.

    >>> rules = [("batch", "data"), ("length", None), ("embed", "data"), ("embed", None)]
    >>> tuple(logical_to_mesh_axes(("batch", "length", "embed"), rules))
    ('data', None, None)
    """
    unknown = [n for n in names if n is not None and n not in {rule[0] for rule in rules}]
    if unknown:
        raise ConfigError(
            f"no logical axis rule for {unknown[0]!r} (axes {tuple(names)}). Add ({unknown[0]!r}, None) "
            "or a mesh axis to PjitPartitioner.logical_axis_rules, for instance through "
            "standard_logical_axis_rules.additional_rules."
        )
    spec: list[MeshAxes] = [None] * len(names)
    settled = [name is None for name in names]
    used: set[str] = set()
    for logical, mesh_axes in rules:
        for i, name in enumerate(names):
            if settled[i] or name != logical:
                continue
            wanted = names_of(mesh_axes)
            if used & set(wanted):
                continue  # a later rule for the same name may still fit
            spec[i] = mesh_axes
            settled[i] = True
            used |= set(wanted)
    return PartitionSpec(*spec)


class _Regions(threading.local):
    """Per thread: programs are traced in the background while others are traced in the foreground."""

    def __init__(self) -> None:
        self.stack: list[tuple[PjitPartitioner, bool]] = []  # (partitioner, whether the data axes are manual)


_regions = _Regions()


@contextlib.contextmanager
def _region(partitioner: PjitPartitioner, manual: bool) -> Iterator[None]:
    _regions.stack.append((partitioner, manual))
    try:
        yield
    finally:
        _regions.stack.pop()


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Constrains an activation's sharding by logical names; the identity outside a partitioner's contexts."""
    if not _regions.stack:
        return x
    partitioner, manual = _regions.stack[-1]
    if partitioner.mesh.size == 1:
        return x
    spec = logical_to_mesh_axes(names, partitioner.automatic_rules if manual else partitioner.logical_axis_rules)
    if manual and partitioner.batch_axes:  # the mesh is that of the shard_map around
        return jax.lax.with_sharding_constraint(x, spec)
    return jax.lax.with_sharding_constraint(x, NamedSharding(partitioner.mesh, spec))


def holds_parts() -> bool:
    """Whether parameters may have to be gathered here: see `gather`."""
    return bool(_regions.stack) and _regions.stack[-1][1] and _regions.stack[-1][0].shards_parameters_over_data


def gather(
    part: jax.Array,
    names: Sequence[str | None],
    shape: Sequence[int],
    dtype: Any,
    sent_as: Any = None,
) -> jax.Array:
    """A parameter whole, in `dtype`, from the part of it that this device has; outside `PjitPartitioner.manual`, a cast.

    See `gathering.gather_by_spec`.

    Args:
      part: along the axes that are sharded over data axes.
      names, shape: logical axes and whole shape of the parameter.
      dtype: of the result.
      sent_as: dtype to send it in, if it is not `dtype`.
    """
    if not holds_parts():
        return part.astype(dtype)
    partitioner = _regions.stack[-1][0]
    spec, _ = partitioner.parameter_spec(names, shape)
    manual, automatic = partitioner.divided(spec)
    return gather_by_spec(part, manual, dtype, sent_as, partitioner.scatter_stages, automatic)


def _mesh_shape(
    num_devices: int,
    num_partitions: int | None,
    model_parallel_submesh: Sequence[int] | None,
) -> tuple[int, int]:
    """Returns (data, model) sizes for the devices of one slice."""
    if model_parallel_submesh:
        submesh = math.prod(model_parallel_submesh)
        if num_partitions not in (None, 1, submesh):
            raise ConfigError(
                f"PjitPartitioner.num_partitions = {num_partitions} and model_parallel_submesh = "
                f"{tuple(model_parallel_submesh)} (product {submesh}) disagree: give one of them."
            )
        num_partitions = submesh
    model = num_partitions or 1
    if model < 1 or num_devices % model:
        nearest = nearest_divisor(num_devices, model)
        raise ConfigError(
            f"PjitPartitioner.num_partitions = {model} does not divide the {num_devices} device(s) here. "
            f"The nearest that does: num_partitions = {nearest} (mesh data {num_devices // nearest} "
            f"x model {nearest})."
        )
    return num_devices // model, model


class PjitPartitioner:
    """Places arrays on a mesh (`replica`, `data`, `model`) by logical axis rules.

    Args:
      num_partitions: size of the `model` axis; the rest of the devices form `data`. Honoured on every
        backend, CPU included.
      model_parallel_submesh: T5X's way to say the same on a TPU torus; its product is the `model` axis, and
        `jax.make_mesh` finds the placement.
      ici_mesh_shape: explicit (replica, data, model) sizes within a slice, instead of `num_partitions`.
      dcn_mesh_shape: explicit (replica, data, model) sizes across slices; the mesh is their product.
      logical_axis_rules: see `standard_logical_axis_rules`, the default.
      devices: what to build the mesh from; all devices by default.
    """

    def __init__(
        self,
        num_partitions: int | None = None,
        model_parallel_submesh: Sequence[int] | None = None,
        ici_mesh_shape: Sequence[int] | None = None,
        dcn_mesh_shape: Sequence[int] | None = None,
        logical_axis_rules: LogicalAxisRules | None = None,
        devices: Sequence[Any] | None = None,
    ):
        if (num_partitions not in (None, 1) or model_parallel_submesh) and ici_mesh_shape:
            raise ConfigError("PjitPartitioner: give either num_partitions / model_parallel_submesh or ici_mesh_shape.")
        rules = standard_logical_axis_rules() if logical_axis_rules is None else logical_axis_rules
        self.logical_axis_rules = tuple((name, axes) for name, axes in rules)
        for name, axes in self.logical_axis_rules:
            for axis in names_of(axes):
                if axis not in MESH_AXES:
                    raise ConfigError(
                        f"PjitPartitioner.logical_axis_rules maps {name!r} to {axis!r}; the mesh axes are {MESH_AXES}."
                    )
                if name == "layers" and axis in DATA_AXES:
                    raise ConfigError(
                        f"PjitPartitioner.logical_axis_rules maps 'layers' to {axis!r}: every device runs every layer. "
                        "Shard 'embed' over 'data' instead (standard_logical_axis_rules.parameter_partitioning_dims = 2)."
                    )
        self.mesh = _make_mesh(
            num_partitions,
            model_parallel_submesh,
            ici_mesh_shape,
            dcn_mesh_shape,
            list(devices) if devices is not None else jax.devices(),
        )

    @property
    def data_parallel_size(self) -> int:
        """Over how many shards the batch is split."""
        return self.mesh.shape["replica"] * self.mesh.shape["data"]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The data axes that divide the batch: those with more than one device."""
        return tuple(a for a in DATA_AXES if self.mesh.shape[a] > 1)

    def divided(self, spec: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """A parameter's sharding over the axes that divide the batch, and over the others; axes of one device left out."""
        others = [a for a in MESH_AXES if self.mesh.shape[a] > 1 and a not in self.batch_axes]
        return only_axes(spec, self.batch_axes), only_axes(spec, others)

    @functools.cached_property
    def scatter_stages(self) -> Mapping[str, tuple[int, ...]]:
        """Of data axes that lie along several dimensions of a TPU torus, their sizes along each.

        Over such an axis the TPU compiler turns a reduce-scatter into an all-reduce; over one dimension after the other it
        does not.
        """
        grid, found = self.mesh.devices, {}
        for axis in self.batch_axes:
            along = np.moveaxis(grid, MESH_AXES.index(axis), 0).reshape(grid.shape[MESH_AXES.index(axis)], -1)[:, 0]
            sizes = torus_sizes([getattr(device, "coords", None) for device in along])
            if len(sizes) > 1:
                found[axis] = sizes
        return found

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
        """The rules where the data axes are manual: without them."""
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
        """Context in which the models' activation constraints hold; enter it while tracing."""
        return _region(self, manual=False)

    def manual(self) -> contextlib.AbstractContextManager[None]:
        """The same inside a `shard_map` over the data axes: each device has its own rows, and gathers parameters."""
        return _region(self, manual=True)

    def params_shardings(self, boxed_params: Any) -> Any:
        """Sharding of every parameter from its logical axis names (`nn.with_logical_partitioning`)."""

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            names = leaf.names if isinstance(leaf, nn.LogicallyPartitioned) else ()
            shape = getattr(leaf, "value", leaf).shape
            if not names:
                return self.replicated
            spec, dropped = self.parameter_spec(names, shape)
            for i, axes, size in dropped:
                logging.warning(
                    "parameter %s: dimension %d of %s is not divisible by mesh axis %s (%d); replicated there.",
                    path_name(path), i, tuple(shape), axes, size,
                )  # fmt: skip
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(
            sharding, boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
        )

    def parameter_spec(
        self, names: Sequence[str | None], shape: Sequence[int]
    ) -> tuple[PartitionSpec, list[tuple[int, MeshAxes, int]]]:
        """Where a parameter lies; and the (dimension, axes, their size) that do not divide it, and are left out."""
        spec = list(logical_to_mesh_axes(names, self.logical_axis_rules))
        dropped = []
        for i, axes in enumerate(spec):
            size = math.prod(self.mesh.shape[a] for a in names_of(axes))
            if shape[i] % size:
                dropped.append((i, axes, size))
                spec[i] = None
        return PartitionSpec(*spec), dropped

    def shardings_like_params(self, tree: Any, params_shardings: Any, params_shapes: Any) -> Any:
        """Sharding of any pytree (an optimizer state, say) by matching its leaves to parameters.

        A leaf whose path ends with a parameter's path and whose shape is the parameter's gets its sharding
        (`0.mu.decoder.mlp.wi.kernel` ends with `decoder.mlp.wi.kernel`). Everything else, counters and
        factored moments among them, is replicated.
        """
        by_path = {
            path_name(path): (sharding, tuple(shape.shape))
            for (path, sharding), shape in zip(
                jax.tree_util.tree_leaves_with_path(params_shardings),
                jax.tree.leaves(params_shapes),
                strict=True,
            )
        }

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            parts = path_name(path).split("/")
            for start in range(len(parts)):
                match = by_path.get("/".join(parts[start:]))
                if match and match[1] == tuple(leaf.shape):
                    return match[0]
            return self.replicated

        return jax.tree_util.tree_map_with_path(sharding, tree)

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
        """One line that settles what BATCH_SIZE means, e.g. 'global batch 128 = 8 data shards x 16'."""
        shards = self.data_parallel_size
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        return (
            f"global batch {batch_size} = {shards} data shard(s) x {batch_size // shards} examples; "
            f"mesh {axes} on {self.mesh.size} device(s) of {jax.process_count()} process(es)"
        )


def torus_sizes(coordinates: Sequence[Sequence[int] | None]) -> tuple[int, ...]:
    """How many places devices take along each dimension of a torus, slowest first; () if they do not fill it in order.

    >>> torus_sizes([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]), torus_sizes([(0, 1), (0, 2)])
    ((2, 3), (2,))
    >>> torus_sizes([(0, 0), (0, 1), (1, 1), (1, 0)]), torus_sizes([None, None])
    ((), ())
    """
    if None in coordinates:
        return ()
    places = [sorted(set(values)) for values in zip(*coordinates, strict=True)]
    used = [k for k, values in enumerate(places) if len(values) > 1]
    for order in itertools.permutations(used):
        expected = itertools.product(*(places[k] for k in order))
        if [tuple(c[k] for k in order) for c in coordinates] == list(expected):
            return tuple(len(places[k]) for k in order)
    return ()


def path_name(path: Sequence[Any]) -> str:
    """Joins a jax key path with slashes: (DictKey('a'), GetAttrKey('mu')) -> 'a/mu'."""
    parts = []
    for key in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
    return "/".join(parts)


def _make_mesh(
    num_partitions: int | None,
    model_parallel_submesh: Sequence[int] | None,
    ici_mesh_shape: Sequence[int] | None,
    dcn_mesh_shape: Sequence[int] | None,
    devices: list[Any],
) -> Mesh:
    num_slices = len({getattr(d, "slice_index", 0) for d in devices})
    dcn = _three("dcn_mesh_shape", dcn_mesh_shape) if dcn_mesh_shape else (num_slices, 1, 1)
    across = math.prod(dcn)
    if len(devices) % across:
        raise ConfigError(
            f"PjitPartitioner.dcn_mesh_shape = {dcn} asks for {across} slices, which does not divide the "
            f"{len(devices)} device(s) here. The nearest that does: {(nearest_divisor(len(devices), across), 1, 1)}."
        )
    within = len(devices) // across
    if ici_mesh_shape:
        ici = _three("ici_mesh_shape", ici_mesh_shape)
        if math.prod(ici) != within:
            raise ConfigError(
                f"PjitPartitioner.ici_mesh_shape = {ici} has {math.prod(ici)} devices, but there are {within} in a slice. "
                f"The nearest that fits: ici_mesh_shape = {_nearest_shape(within, ici)}."
            )
    else:
        ici = (1, *_mesh_shape(within, num_partitions, model_parallel_submesh))
    if num_slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices=devices, allow_split_physical_axes=True)
        return Mesh(np.asarray(grid), MESH_AXES)
    shape = tuple(i * d for i, d in zip(ici, dcn, strict=True))
    if shape[2] == 1 and all(hasattr(d, "coords") for d in devices):
        # In the order of the torus: each of `replica` and `data` takes whole lines, planes or blocks of it.
        grid = np.array(sorted(devices, key=lambda d: (*d.coords, d.id))).reshape(shape)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES)


def _nearest_shape(devices: int, wanted: Sequence[int]) -> tuple[int, int, int]:
    """The mesh of so many devices whose sizes differ least from those wanted, as ratios.

    >>> _nearest_shape(8, (1, 3, 2)), _nearest_shape(8, (2, 4, 2))
    ((1, 4, 2), (1, 4, 2))
    """
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    shapes = [
        (r, d, devices // r // d) for r in divisors for d in divisors if devices // r % d == 0 and r * d <= devices
    ]
    return min(shapes, key=lambda shape: (sum(abs(math.log(a / b)) for a, b in zip(shape, wanted, strict=True)), shape))


def nearest_divisor(whole: int, wanted: int) -> int:
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: (abs(d - wanted), d))


def _three(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Accepts (data, model) as T5X does, or (replica, data, model)."""
    shape = tuple(int(s) for s in shape)
    if len(shape) == 2:
        shape = (1, *shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(
            f"PjitPartitioner.{name} = {shape}: give (replica, data, model) or (data, model), all positive."
        )
    return shape
