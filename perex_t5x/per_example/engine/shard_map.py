"""The engine inside `jax.shard_map`: every device has its own examples.

There are two traps, and both would be silent:

- With `check_vma=True` JAX sums the gradient of a replicated parameter over devices automatically, so φ would see sums of
  different devices' examples. `vary` makes parameters differ by device before anything is differentiated.
- A parameter that is gathered inside the loss (FSDP) has a gradient that ends in a reduce-scatter, which adds different
  devices' examples. There φ and the sum over a device's own examples come first, then the collective: see
  `plan.CrossDeviceSum`.

Any other collective over the data axes would mix examples of different devices inside the loss, and is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from perex_t5x.per_example import collectives
from perex_t5x.per_example.engine import jaxprs, primitives


def varying_axes(tree: Any) -> frozenset[str]:
    """Over which axes of a `shard_map` (with check_vma=True) some array of a tree differs."""
    # NumPy arrays and Python numbers are the same on every device.
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The same values, known to differ over `axes`."""
    if not axes:
        return tree

    def one(x: Any) -> Any:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        # Casting what varies already is an error of JAX's, so only the missing axes.
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(one, jax.tree.map(jnp.asarray, tree))


def manual_axes() -> tuple[str, ...]:
    """The axes of the enclosing `shard_map`s."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def automatic_axes() -> frozenset[str]:
    """Mesh axes that no enclosing `shard_map` has made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset() if mesh.empty else frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def check_data_axes(axes: Sequence[str]) -> None:
    """Raises unless all of them are axes of an enclosing `shard_map`."""
    manual = manual_axes()
    for axis in axes:
        if axis not in manual:
            here = f"the axes here are {', '.join(manual)}" if manual else "this call is not inside a shard_map"
            raise ValueError(
                f"data_axes names {axis!r}, but {here}. Statistics over devices are computed inside jax.shard_map with "
                "these axes manual."
            )


def num_devices(axes: Sequence[str]) -> int:
    """How many devices share the batch."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def device_index(axes: Sequence[str]) -> Any:
    """The number of this device among those that share the batch; the first axis is the slowest, as in a sharding."""
    return jax.lax.axis_index(tuple(axes)) if axes else 0


def axes_of(eqn: core.JaxprEqn) -> tuple[str, ...]:
    """The mesh axes over which an equation communicates; () for others."""
    if eqn.primitive.name in primitives.LOCAL_TO_DEVICE:
        return ()
    # `axes` also names reductions' dimensions, by number: only strings are mesh axes.
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = names if isinstance(names, tuple | list) else (names,)
    return tuple(a for a in names if isinstance(a, str))


def communicates(eqn: core.JaxprEqn, batched: Sequence[bool], axes: frozenset[str]) -> core.JaxprEqn | None:
    """The equation, itself or within, that communicates values of examples over one of `axes`; None if there is none."""
    if not any(batched):
        return None
    if axes.intersection(axes_of(eqn)):
        return eqn
    if not jaxprs.inner(eqn):
        return None
    # Of other primitives with programs inside (while, custom calls) it is not known what depends on what: assume all.
    bodies = jaxprs.bodies_of(eqn, batched) if len(batched) == len(eqn.invars) else None
    if bodies is None:
        bodies = [(body, [True] * len(body.invars)) for body in jaxprs.inner(eqn)]
    for body, flags in bodies:
        depends = jaxprs.dependent(body, flags)
        for e in body.eqns:
            collective = communicates(e, jaxprs.are_in(e.invars, depends), axes)
            if collective is not None:
                return collective
    return None


def sum_ending_in(
    eqn: core.JaxprEqn, axes: frozenset[str], sources: Mapping[core.Var, Any], uses: Mapping[core.Var, int]
) -> tuple[core.JaxprEqn, ...] | None:
    """The equations, in order, that add something up over data axes, if `eqn` is the last of them; else None.

    One psum or reduce-scatter; or reduce-scatters within groups of devices, which together reach every device once; or a
    `shard_map` over other axes that does nothing but this.
    """
    if eqn.primitive.name == "shard_map":
        return (eqn,) if _only_sums(eqn, axes) else None
    over = axes_of(eqn)
    if (
        eqn.primitive.name not in primitives.CROSS_DEVICE_SUMS
        or not over
        or not axes.issuperset(over)
        or len(eqn.outvars) > 1
    ):
        return None
    # Without groups it is a sum over all devices of the axis, in one equation.
    if eqn.params.get("axis_index_groups") is None:
        return (eqn,)
    # Scatters within groups, one stage after the other, sum over all devices only if every device's part meets device 0's
    # exactly once: follow, backwards, the set of devices whose values have reached device 0.
    stages: list[core.JaxprEqn] = []
    reached = {0}
    while _is_stage_like(eqn, stages):
        stages.insert(0, eqn)
        before = {i for group in eqn.params["axis_index_groups"] for i in group if reached.intersection(group)}
        if len(before) != len(reached) * len(eqn.params["axis_index_groups"][0]):
            return None  # some device would be counted twice
        reached = before
        if len(reached) == num_devices(over):
            return tuple(stages)
        v = eqn.invars[0]
        if not isinstance(v, core.Var) or v not in sources or uses[v] > 1:
            return None
        eqn = sources[v][0]
    return None


def _only_sums(region: core.JaxprEqn, axes: frozenset[str]) -> bool:
    """Whether a `shard_map` of one array only adds it up over `axes`, and moves its elements."""
    # Tensor parallelism's gather of a parameter, transposed, is such a region: one array in and out, divided alike.
    body = region.params["jaxpr"]
    if len(body.invars) != 1 or len(body.outvars) != 1 or region.params["in_specs"] != region.params["out_specs"]:
        return False
    sources, uses = jaxprs.source_of(body), jaxprs.use_counts(body)
    v, has_sum = body.outvars[0], False
    while isinstance(v, core.Var) and v in sources and uses[v] == 1:
        eqn = sources[v][0]
        if crossing := sum_ending_in(eqn, axes, sources, uses):
            v, has_sum = crossing[0].invars[0], True
        elif eqn.primitive.name == "transpose":
            v = eqn.invars[0]
        else:
            return False
    return has_sum and v is body.invars[0]


def summed_axes(eqns: Sequence[core.JaxprEqn]) -> tuple[str, ...]:
    """The mesh axes over which the equations of `sum_ending_in` add up."""
    eqn = eqns[-1]
    if eqn.primitive.name != "shard_map":
        return axes_of(eqn)
    inside = [a for e in eqn.params["jaxpr"].eqns for a in axes_of(e)]
    return tuple(dict.fromkeys(inside))


def gathered(eqns: Sequence[core.JaxprEqn], x: jax.Array) -> jax.Array:
    """The whole of which `cross` with these equations leaves a device its part `x`."""
    for eqn in reversed(eqns):
        if eqn.primitive.name == "shard_map":
            raise NotImplementedError(
                "a statistic or metric with operands, of a parameter that is gathered over data axes inside another "
                "shard_map, is not supported: leave the parameter out with parameters=..., or gather it outside."
            )
        if eqn.primitive.name == "reduce_scatter":
            p = eqn.params
            groups = p["axis_index_groups"]
            x = jax.lax.all_gather(
                x, axes_of(eqn), axis=p["scatter_dimension"], tiled=p["tiled"], axis_index_groups=groups
            )
    return x


def numbered_apart(eqns: Sequence[core.JaxprEqn], x: jax.Array) -> jax.Array:
    """Numbers 0, 1, ... of a device's part, continued over the devices whose parts `gathered` puts together."""
    if not any(eqn.primitive.name == "reduce_scatter" for eqn in eqns):
        return x
    return x + jnp.asarray(device_index(summed_axes(eqns)) * x.size, x.dtype)


def cross(eqns: Sequence[core.JaxprEqn], x: jax.Array, transport: Any) -> jax.Array:
    """Applies the equations of `sum_ending_in` to sums, whose dtype need not be the gradient's (float32, not bfloat16)."""
    last = eqns[-1]
    if last.primitive.name == "shard_map":
        p = last.params

        def rule(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
            return [cross([eqn], arguments[0], transport)]

        # Not the equation itself: its types are those of one gradient, and its sums may be sent in another dtype.
        return jax.shard_map(
            lambda x: jaxprs.evaluate(p["jaxpr"], (), [x], rule)[0],
            in_specs=p["in_specs"][0],
            out_specs=p["out_specs"][0],
            axis_names=p["newly_manual_axes"],
            check_vma=False,
        )(x)
    for eqn in eqns:
        # The loss's own collective would add in the narrow dtype on any number of devices: ours decides what is rounded.
        if transport is not None and eqn.primitive.name == "reduce_scatter" and eqn.params["tiled"]:
            p = eqn.params
            x = jnp.moveaxis(x, p["scatter_dimension"], 0)
            x = collectives.scatter_within(x, axes_of(eqn), p["axis_index_groups"], transport)
            x = jnp.moveaxis(x, 0, p["scatter_dimension"])
        else:
            (x,) = jaxprs.bind(eqn, [x])
    return x


def _is_stage_like(eqn: core.JaxprEqn, others: Sequence[core.JaxprEqn]) -> bool:
    if eqn.primitive.name != "reduce_scatter" or eqn.params["axis_index_groups"] is None:
        return False
    same = ("axis_name", "scatter_dimension", "tiled")
    return all(eqn.params[name] == other.params[name] for other in others for name in same)


class MixesDevicesError(ValueError):
    """The loss communicates about examples over the axes that divide them."""

    def __init__(self, primitive: str, axes: frozenset[str], where: str = ""):
        self.primitive, self.axes = primitive, axes
        super().__init__(
            f"the loss has a `{primitive}` over the data axes {tuple(sorted(axes))}{where}, of values that depend on the "
            "example: it would mix examples of different devices, whose gradients could then not be told apart. Compute "
            "normalisers and the like on the whole batch first, and give them as arguments. Parameters may be gathered "
            "(all_gather) where data_axes=(...) names the axes, with nothing but casts and moves of elements before it. If "
            "this axis does not divide the batch, name those that do with data_axes=(...)."
        )

    def located(self, program: core.ClosedJaxpr) -> MixesDevicesError:
        """The same error with the line of the loss, looked up in the program as it was first traced."""

        def lines(jaxpr: core.Jaxpr) -> Iterator[str]:
            for eqn in jaxpr.eqns:
                if eqn.primitive.name == self.primitive and self.axes.intersection(axes_of(eqn)):
                    line = jaxprs.source_line([eqn])
                    if line is not None:
                        yield line
                for inner in jaxprs.inner(eqn):
                    yield from lines(inner)

        line = next(lines(program.jaxpr), None)
        return MixesDevicesError(self.primitive, self.axes, f" at {line}" if line else "")


def refuse(eqn: core.JaxprEqn, batched: Sequence[bool], axes: frozenset[str]) -> None:
    """Raises if an equation communicates values of examples over the axes that divide them."""
    collective = communicates(eqn, batched, axes)
    if collective is not None:
        raise MixesDevicesError(collective.primitive.name, axes.intersection(axes_of(collective)))


@dataclasses.dataclass(frozen=True)
class AutoSharding:
    """A mesh axis (or several, or None) for each dimension of an array; `mesh` is None inside `shard_map`."""

    axes: tuple[Any, ...]
    mesh: Any = None  # a Mesh or an AbstractMesh

    @classmethod
    def of(cls, sharding: Any, ndim: int) -> AutoSharding | None:
        """From a `PartitionSpec` or `NamedSharding`; None where it says nothing."""
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        if spec is None or not any(spec):
            return None
        return cls((*spec, *(None,) * (ndim - len(spec))), mesh)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The array, constrained to this sharding."""
        spec = PartitionSpec(*self.axes)
        return jax.lax.with_sharding_constraint(x, spec if self.mesh is None else NamedSharding(self.mesh, spec))

    def before_permutation(self, eqn: core.JaxprEqn) -> AutoSharding | None:
        """The sharding of a permutation's operand, given its result's; None where it is not simply expressed."""
        old, new = jaxprs.shape_of(eqn.invars[0]), jaxprs.shape_of(eqn.outvars[0])
        if eqn.primitive.name == "transpose":
            axes = [None] * len(old)
            for i, k in enumerate(eqn.params["permutation"]):
                axes[k] = self.axes[i]
            return dataclasses.replace(self, axes=tuple(axes))
        # A reshape that splits or joins dimensions would split or join mesh axes, too. No constraint is better than a wrong
        # one, which the compiler would obey by moving data.
        if _without_ones(old) != _without_ones(new):
            return None
        kept = iter([a for a, size in zip(self.axes, new, strict=True) if size != 1])
        return dataclasses.replace(self, axes=tuple(None if size == 1 else next(kept) for size in old))

    def without_leading(self) -> AutoSharding | None:
        """Of one step's part of an array that a scan stacks; None where the stack itself is divided over devices."""
        return None if self.axes[0] is not None else dataclasses.replace(self, axes=self.axes[1:])

    def transposed(self) -> AutoSharding:
        return dataclasses.replace(self, axes=self.axes[::-1])


def constrain(x: jax.Array, sharding: AutoSharding | None) -> jax.Array:
    return x if sharding is None else sharding(x)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
