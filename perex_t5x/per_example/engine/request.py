"""One request to the engine: the loss's arguments, checked and laid out by units, and the gradient of one unit."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from perex_t5x.per_example.engine import jaxprs, shard_map
from perex_t5x.per_example.engine.shard_map import AutoSharding
from perex_t5x.per_example.metrics import BATCH_MEAN, POSITIONS, Metric, positions_of
from perex_t5x.per_example.reductions.reducer import ReductionContext, ReductionSpec
from perex_t5x.per_example.statistic import Statistic

# --- the roles of arguments -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which of the loss's arguments are differentiated, which have an example axis, which are PRNG keys."""

    argnums: tuple[int, ...]
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    single: bool  # argnums was an int: the gradient is a tree, not a tuple of trees

    @classmethod
    def make(cls, argnums: Any, batch_argnums: Any, rng_argnums: Any) -> Roles:
        single = isinstance(argnums, int)
        roles = cls(_tuple(argnums), _tuple(batch_argnums), _tuple(rng_argnums), single)
        if not roles.argnums:
            raise ValueError("argnums is empty: name the arguments to differentiate.")
        if not roles.batch_argnums:
            raise ValueError("batch_argnums is empty: name the arguments that have an example axis.")
        every = [*roles.argnums, *roles.batch_argnums, *roles.rng_argnums]
        for i in every:
            if i < 0:
                raise ValueError(f"argument {i}: count arguments from 0, negative positions are not supported.")
            if every.count(i) > 1:
                raise ValueError(
                    f"argument {i} has two roles: argnums={roles.argnums}, batch_argnums={roles.batch_argnums}, "
                    f"rng_argnums={roles.rng_argnums}."
                )
        return roles

    def check_arity(self, given: int) -> None:
        """Raises if a role names an argument that was not given."""
        for name in ("argnums", "batch_argnums", "rng_argnums"):
            for i in getattr(self, name):
                if i >= given:
                    raise ValueError(f"{name} names argument {i}, but the loss was given {given}.")


def parameter_filter(parameters: str | Callable[[str], bool] | None) -> Callable[[str], bool] | None:
    """A function from a parameter's name to whether its gradient is wanted."""
    if parameters is None or callable(parameters):
        return parameters
    try:
        pattern = re.compile(parameters)
    except (re.error, TypeError) as e:
        raise ValueError(
            f"parameters = {parameters!r}: give a regular expression or a function of the name; {e}."
        ) from e
    return lambda name: pattern.search(name) is not None


@dataclasses.dataclass(frozen=True)
class Selected:
    """The leaves that are differentiated, among those of the arguments `argnums`.

    Attributes:
      names: of the selected leaves, 'layers/w'; with several argnums the argument's number comes first.
      chosen: of all leaves of those arguments, which are selected.
      tree: the structure of the gradient: of the argument, or of a tuple of arguments.
      shapes: of the selected leaves.
    """

    roles: Roles
    names: tuple[str, ...]
    chosen: tuple[bool, ...]
    tree: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def make(cls, arguments: Sequence[Any], roles: Roles, wanted: Callable[[str], bool] | None) -> Selected:
        names, leaves = [], []
        for i in roles.argnums:
            prefix = "" if roles.single else f"{i}/"
            for path, leaf in jax.tree_util.tree_leaves_with_path(arguments[i]):
                names.append(prefix + (jax.tree_util.keystr(path, simple=True, separator="/") or f"argument {i}"))
                leaves.append(leaf)
        chosen = [wanted is None or bool(wanted(name)) for name in names]
        if not any(chosen):
            listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(f"parameters selects none of the parameters: {listed or 'there are none'}.")
        for name, leaf, c in zip(names, leaves, chosen, strict=True):
            if c and jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
                raise ValueError(
                    f"parameter {name} has dtype {jnp.result_type(leaf)}: φ of a complex gradient is not defined here. Give "
                    "its real and its imaginary part as two parameters, and join them in the loss with "
                    "jax.lax.complex(re, im); or leave it out with parameters=..."
                )
            if c and not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ValueError(
                    f"parameter {name} has dtype {jnp.result_type(leaf)}, which has no gradient: leave it out with "
                    "parameters=..., or give it as another argument."
                )
        differentiated = tuple(arguments[i] for i in roles.argnums)
        tree = jax.tree.structure(differentiated[0] if roles.single else differentiated)
        picked = [(n, jnp.shape(x)) for n, x, c in zip(names, leaves, chosen, strict=True) if c]
        return cls(roles, tuple(n for n, _ in picked), tuple(chosen), tree, tuple(shape for _, shape in picked))

    def leaves(self, arguments: Sequence[Any]) -> list[Any]:
        every = jax.tree.leaves(tuple(arguments[i] for i in self.roles.argnums))
        return [x for x, c in zip(every, self.chosen, strict=True) if c]

    def others(self, arguments: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """What is shared and held constant: leaves that are not selected, and the other arguments."""
        every = jax.tree.leaves(tuple(arguments[i] for i in self.roles.argnums))
        given = {*self.roles.argnums, *self.roles.batch_argnums}
        return (
            [x for x, c in zip(every, self.chosen, strict=True) if not c],
            {i: a for i, a in enumerate(arguments) if i not in given},
        )

    def fill(self, differentiated: Sequence[Any], others: tuple[list[Any], dict[int, Any]], arity: int) -> list[Any]:
        """The loss's arguments again; those with an example axis are left None."""
        mine, constant = iter(differentiated), iter(others[0])
        filled = self.tree.unflatten([next(mine) if c else next(constant) for c in self.chosen])
        full: list[Any] = [None] * arity
        for i, a in zip(self.roles.argnums, (filled,) if self.roles.single else filled, strict=True):
            full[i] = a
        for i, a in others[1].items():
            full[i] = a
        return full

    def trees(self, values: dict[str, Sequence[Any]]) -> dict[str, Any]:
        """Name -> a tree like the parameters, with None for those that are not selected."""
        result = {}
        for name, leaves in values.items():
            rest = iter(leaves)
            result[name] = self.tree.unflatten([next(rest) if c else None for c in self.chosen])
        return result

    def of_each(self, tree: Any, what: str) -> list[Any]:
        """The entries of a tree like the parameters that belong to the selected leaves; `what` it is, for an error."""
        try:
            every = self.tree.flatten_up_to(tree)
        except (ValueError, TypeError) as e:
            raise ValueError(f"{what} does not have the parameters' structure: {e}") from e
        return [x for x, c in zip(every, self.chosen, strict=True) if c]

    def operands(
        self, given: Mapping[str, Any], statistics: Sequence[Statistic], metrics: Sequence[Metric] = ()
    ) -> list[dict[str, Any]]:
        """Of each selected leaf, the operands that the statistics and metrics see, by name."""
        needed: dict[str, str] = {}
        for kind, readers in (("statistic", statistics), ("metric", metrics)):
            for reader in readers:
                needed |= {name: f"{kind} {reader.name!r}" for name in reader.operands if name not in needed}
        makes_positions = needed.pop(POSITIONS, None) is not None
        for name, reader in needed.items():
            if name not in given:
                raise ValueError(
                    f"{reader} needs the operand {name!r}: give operands={{{name!r}: ...}}, a tree like the parameters."
                )
        if unknown := sorted(set(given) - set(needed)):
            raise ValueError(f"operands has {', '.join(map(repr, unknown))}, which no statistic sees, nor a metric.")
        found: list[dict[str, Any]] = [
            {POSITIONS: positions_of(shape)} if makes_positions else {} for shape in self.shapes
        ]
        for name, tree in given.items():
            mine = self.of_each(tree, f"operand {name!r}")
            for i, (x, parameter, shape) in enumerate(zip(mine, self.names, self.shapes, strict=True)):
                if jnp.shape(x) != shape:
                    raise ValueError(
                        f"operand {name!r} of {parameter} has shape {jnp.shape(x)}; φ is elementwise, and the parameter has "
                        f"{shape}."
                    )
                found[i][name] = jnp.asarray(x)
        return found

    def auto_shardings(self, shardings: Any) -> list[AutoSharding | None]:
        """Of the selected leaves, from a tree like the parameters; Nones without one."""
        if shardings is None:
            return [None] * len(self.names)
        mine = self.of_each(shardings, "shardings")
        return [AutoSharding.of(s, len(shape)) for s, shape in zip(mine, self.shapes, strict=True)]


def closed_over(
    loss_fn: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any], roles: Roles
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A loss of arrays alone, and its arguments: the loss's extra arguments that are none (a flag, a name, a function) reach
    it as they are, as they do under `jax.grad`, and so do keyword arguments."""
    extra = {
        i: a for i, a in enumerate(arguments) if i not in (*roles.argnums, *roles.batch_argnums, *roles.rng_argnums)
    }
    leaves, tree = jax.tree.flatten((extra, dict(keywords)))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    if not keywords and all(is_array):
        return loss_fn, arguments
    statics = [None if a else x for x, a in zip(leaves, is_array, strict=True)]

    def loss(*given: Any) -> Any:
        *positional, arrays = given
        mine = iter(arrays)
        extra, keywords = tree.unflatten([next(mine) if a else x for x, a in zip(statics, is_array, strict=True)])
        return loss_fn(*(extra.get(i, a) for i, a in enumerate(positional)), **keywords)

    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]
    return loss, (*(None if i in extra else a for i, a in enumerate(arguments)), arrays)


def _check_keys(arguments: Sequence[Any], options: Options) -> None:
    for i in options.roles.rng_argnums:
        for path, key in jax.tree_util.tree_leaves_with_path(arguments[i]):
            name = f"rng_argnums names argument {i}{jax.tree_util.keystr(path)}, which"
            dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
            is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
            if not (is_typed and shape == ()) and not (dtype == jnp.uint32 and shape in ((2,), (4,))):
                what = f"{dtype}{list(shape)}" if dtype is not None and shape is not None else repr(key)
                raise ValueError(
                    f"{name} is not a PRNG key but {what}. Give jax.random.key(seed), or a tree of such keys."
                )
            implementation = str(jax.random.key_impl(key)) if is_typed else {2: "threefry2x32", 4: "rbg"}[shape[0]]
            if "rbg" in implementation and options.method in ("surgery", "vmap"):
                raise ValueError(
                    f"{name} is a key of {implementation!r}: drawn for several examples at once, its numbers are not those "
                    "drawn for each alone, so that dropout would change with microbatch_size. Use "
                    "jax.random.key(seed, impl='threefry2x32'), or method='map'."
                )


def _tuple(x: int | Sequence[int]) -> tuple[int, ...]:
    return (x,) if isinstance(x, int) else tuple(x)


def num_examples(arguments: Sequence[Any], roles: Roles) -> int:
    """The common length of the leading axes; names the leaves that disagree."""
    roles.check_arity(len(arguments))
    sizes: dict[str, int] = {}
    for i in roles.batch_argnums:
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments[i]):
            name = f"argument {i}{jax.tree_util.keystr(path)}"
            if jnp.ndim(leaf) == 0:
                raise ValueError(f"{name} is a scalar: every leaf of a batch needs a leading axis of examples.")
            sizes[name] = jnp.shape(leaf)[0]
    if not sizes:
        raise ValueError("the batch has no arrays.")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(f"the leaves of the batch have different numbers of examples: {listed}.")
    (count,) = set(sizes.values())
    if count == 0:
        raise ValueError("the batch has zero examples.")
    return count


def check_divides(what: str, part: Any, whole_name: str, whole: int) -> None:
    if isinstance(part, bool) or not isinstance(part, int | np.integer) or part < 1:
        raise ValueError(f"{what} = {part!r}: must be a positive whole number.")
    if whole % part:
        near = [d for d in range(1, whole + 1) if whole % d == 0]
        best = min(near, key=lambda d: (abs(d - part), d))
        raise ValueError(f"{what} = {part} does not divide {whole_name} = {whole}. Nearest that does: {best}.")


# --- the request ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    statistics: tuple[Statistic, ...]
    method: str
    roles: Roles
    parameters: Callable[[str], bool] | None
    has_aux: bool
    group_size: int
    microbatch_size: int | str | None
    unit: str
    token_fallback: bool
    reduction: str
    norms: bool
    clip_norm: Any  # see `clipping`
    non_finite: str
    strict: bool
    data_axes: tuple[str, ...] = ()
    transport: Any = None
    shardings: Any = None
    kernels: bool = True
    clip_memory: float = 0.0
    clip_strategy: str = "auto"
    metrics: tuple[Metric, ...] = ()

    @property
    def operand_names(self) -> frozenset[str]:
        """Of the trees that are given with the call."""
        names = {name for x in (*self.statistics, *self.metrics) for name in x.operands}
        return frozenset(names - {POSITIONS})

    @property
    def needs_mean(self) -> bool:
        """Whether the batch's mean gradient is an operand, which the call computes itself."""
        return BATCH_MEAN in self.operand_names


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a request; those of units have a leading axis M, then one of the b examples."""

    differentiated: list[Any]  # selected leaves
    others: Any
    batch: Any
    indices_Mxb: jax.Array
    weights_Mxb: jax.Array | None
    operands: list[dict[str, Any]]  # of each selected leaf

    @property
    def num_units(self) -> int:
        return self.indices_Mxb.shape[0]


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of one call, checked and laid out.

    Attributes:
      count: examples on this device.
      microbatch: units at a time.
      context: what all reductions of this request have in common; a chunk of units completes it.
      shardings, sharded_over: of each selected parameter, see `ReductionSpec`.
      weight_fn: a function of one unit's loss and gradient norm that gives its weight; None: `Inputs.weights_Mxb`.
      clip_norms: of each selected parameter, where it is clipped by itself; else None.
      weights_are_mask: whether no example can have a weight other than 0 and 1: there are none, or booleans.
    """

    loss_fn: Callable[..., Any]
    options: Options
    selected: Selected
    arity: int
    count: int
    microbatch: int
    inputs: Inputs
    context: ReductionContext
    shardings: list[AutoSharding | None]
    sharded_over: list[tuple[str, ...] | None]
    weight_fn: Callable[[Any, Any], Any] | None = None
    clip_norms: list[Any] | None = None
    weights_are_mask: bool = True

    @classmethod
    def make(
        cls,
        loss_fn: Any,
        options: Options,
        arguments: tuple[Any, ...],
        weights: Any,
        first_index: Any,
        operands: Mapping[str, Any],
    ) -> Request:
        roles, b = options.roles, options.group_size
        count = num_examples(arguments, roles)
        check_divides("group_size", b, "the number of examples", count)
        units = micro = count // b
        if isinstance(options.microbatch_size, int | np.integer):
            check_divides("microbatch_size", options.microbatch_size, "the number of examples", count)
            check_divides("group_size", b, "microbatch_size", options.microbatch_size)
            micro = int(options.microbatch_size) // b
        elif options.microbatch_size not in (None, "auto"):
            check_divides("microbatch_size", options.microbatch_size, "the number of examples", count)
        _check_keys(arguments, options)
        if any(m.pairwise for m in options.metrics):
            _check_pairs(options, micro < units)
        selected = Selected.make(arguments, roles, options.parameters)
        shard_map.check_data_axes(options.data_axes)
        # Examples are numbered over all devices: a key's fold_in, and so dropout, must not depend on the mesh.
        first = jnp.asarray(first_index, jnp.uint32)
        if options.data_axes:
            first += jnp.asarray(count * shard_map.device_index(options.data_axes), jnp.uint32)
        indices = first + jax.lax.iota(jnp.uint32, count)
        rows = jax.tree.map(
            lambda x: jnp.reshape(x, (units, b, *jnp.shape(x)[1:])), tuple(arguments[i] for i in roles.batch_argnums)
        )
        inputs = Inputs(
            differentiated=selected.leaves(arguments),
            others=selected.others(arguments),
            batch=rows,
            indices_Mxb=indices.reshape(units, b),
            weights_Mxb=None if callable(weights) else _weights(weights, count, b),
            operands=selected.operands(operands, options.statistics, options.metrics),
        )
        # Without data_axes the statistics are of this device's examples, and a loss may still not mix devices': whatever
        # the batch varies over, or (check_vma=False, nothing known) any manual axis, may divide the examples.
        device_axes = (
            frozenset(options.data_axes) or shard_map.varying_axes(inputs.batch) or frozenset(shard_map.manual_axes())
        )
        varying = shard_map.varying_axes(inputs)
        sharded_over: list[tuple[str, ...] | None] = [None] * len(inputs.differentiated)
        if varying:
            differs = [shard_map.varying_axes(x) for x in inputs.differentiated]
            sharded_over = [tuple(a for a in options.data_axes if a in axes) for axes in differs]
        context = ReductionContext(
            options.statistics,
            units,
            unit=options.unit,
            kernels=options.kernels,
            varying=varying,
            device_axes=device_axes,
            data_axes=options.data_axes,
            transport=options.transport,
        )
        # Parameters too: JAX would otherwise sum the gradient of one that is the same on all devices over their examples.
        inputs = shard_map.vary(inputs, varying)
        shardings = selected.auto_shardings(options.shardings)
        if callable(weights):
            _check_weight_function(weights)
        clip_norms = None
        if clips_by_parameter(options.clip_norm):
            clip_norms = selected.of_each(options.clip_norm, "clip_norm")
            for name, limit in zip(selected.names, clip_norms, strict=True):
                check_clip_norm(limit, f"clip_norm of {name}")
        return cls(
            loss_fn,
            options,
            selected,
            len(arguments),
            count,
            micro,
            inputs,
            context,
            shardings,
            sharded_over,
            weights if callable(weights) else None,
            clip_norms,
            weights_are_mask=weights is None or (not callable(weights) and jnp.asarray(weights).dtype == bool),
        )

    @property
    def norms_first(self) -> bool:
        """Whether every example's norm must be known before the first sum."""
        options = self.options
        return options.clip_norm is not None or options.non_finite == "skip" or self.weight_fn is not None

    def specs(self, inputs: Inputs, initial: Sequence[Any] | None) -> list[ReductionSpec]:
        """How each selected parameter's gradient is to be reduced; `initial`: sums to add to, one entry per parameter."""
        return [
            ReductionSpec(
                initial=None if initial is None else initial[i],
                sharding=s,
                sharded_over=axes,
                operands=inputs.operands[i],
                parameter=self.selected.names[i],
            )
            for i, (s, axes) in enumerate(zip(self.shardings, self.sharded_over, strict=True))
        ]

    @property
    def num_devices(self) -> int:
        """How many devices' examples the statistics are of."""
        return shard_map.num_devices(self.options.data_axes)

    def shapes(self) -> Any:
        leaves, tree = jax.tree.flatten(self.inputs)
        return tree, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)

    def unit_gradient(self) -> Callable[..., Any]:
        """(differentiated, others, batch, indices, weights) of one unit -> ((its loss, (losses, aux)), gradients)."""
        roles, options = self.options.roles, self.options
        # Where the batch loss is the sum of the examples' losses, the mean of B ∇ℓ_i is its gradient.
        scale = self.count * self.num_devices if options.reduction == "sum" else 1

        def example(differentiated: Any, others: Any, row: Any, index: jax.Array) -> Any:
            full = self.selected.fill(differentiated, others, self.arity)
            for i in roles.rng_argnums:
                full[i] = jax.tree.map(lambda key: jax.random.fold_in(key, index), full[i])
            for i, a in zip(roles.batch_argnums, row, strict=True):
                full[i] = jax.tree.map(_batch_of_one, a)
            loss, aux = _with_aux(self.loss_fn(*full), options.has_aux)
            return _scalar(loss), aux

        def unit(differentiated: Any, others: Any, batch: Any, indices_b: jax.Array, weights_b: Any) -> Any:
            # A unit of one example needs no `vmap`, and no axis of size one for the examples of a group.
            if indices_b.shape[0] == 1:
                row, index = jax.tree.map(lambda x: jax.lax.squeeze(x, [0]), (batch, indices_b))
                loss, aux = example(differentiated, others, row, index)
                scaled = loss if scale == 1 else scale * loss
                return scaled, jax.tree.map(lambda x: _batch_of_one(jnp.asarray(x)), (loss, aux))
            if weights_b is not None:
                # An example that is left out is replaced by one that is not: its NaN stay out of the gradient as well.
                stand_in = jnp.where(weights_b != 0, jnp.arange(weights_b.shape[0]), jnp.argmax(weights_b != 0))
                batch = jax.tree.map(lambda x: x[stand_in], batch)
            one = lambda x: example(differentiated, others, *x)  # noqa: E731
            # Methods that take one example after another do so within a group, too: what JAX cannot batch, keys whose
            # numbers depend on how many are drawn together, and effects in order rest on it.
            together = options.method in ("surgery", "vmap")
            losses_b, aux_b = (jax.vmap(one) if together else functools.partial(jax.lax.map, one))((batch, indices_b))
            if weights_b is None:
                return scale * jnp.mean(losses_b), (losses_b, aux_b)
            total = jnp.sum(weights_b)
            share_b = weights_b / one_if_zero(total)
            return scale * jnp.sum(share_b.astype(losses_b.dtype) * losses_b), (losses_b, aux_b)

        return jax.value_and_grad(unit, has_aux=True)


def _batch_of_one(x: Any) -> jax.Array:
    """A loss expects a batch, if of one example. As x[None], which takes longer to trace."""
    return jax.lax.expand_dims(x, [0])


def _weights(weights: Any, count: int, b: int) -> jax.Array | None:
    if weights is None:
        return None
    weights = jnp.asarray(weights)
    if weights.shape != (count,):
        raise ValueError(f"weights has shape {weights.shape}: one per example is needed, ({count},).")
    # Integer and bfloat16 weights: their sums would be wrong, or rounded.
    return weights.astype(jnp.promote_types(weights.dtype, jnp.float32)).reshape(-1, b)


def _check_weight_function(fn: Callable[[Any, Any], Any]) -> None:
    """Of one unit: a function that looks at the others would give other weights with other microbatches and devices."""
    losses, norms = (jnp.asarray(np.random.default_rng(seed).uniform(0.5, 2.0, 5), jnp.float32) for seed in (0, 1))
    one = jax.eval_shape(fn, losses[0], norms[0])
    if getattr(one, "shape", None) != ():
        raise ValueError(
            "weights is a function: it must turn the loss and the gradient norm of one example, two numbers, into one, but "
            f"it returns {getattr(one, 'shape', type(one).__name__)}."
        )
    try:
        with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            together, alone = np.asarray(fn(losses, norms)), np.asarray(jax.vmap(fn)(losses, norms))
    except Exception:  # it closes over something traced, or takes numbers only: then it cannot look at other examples
        return
    if together.shape == alone.shape and not np.allclose(together, alone, rtol=1e-4, equal_nan=True):
        raise ValueError(
            "weights is a function: it must see one example's loss and norm alone, but of several it gives other weights "
            "than of each. Leave out what normalises: the statistics are divided by the sum of the weights."
        )


def clips_by_parameter(clip_norm: Any) -> bool:
    """Whether it is a tree of limits, one for each parameter."""
    return clip_norm is not None and not callable(clip_norm) and not _is_number(clip_norm)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.generic | np.ndarray | jax.Array) and jnp.ndim(x) == 0


def check_clip_norm(limit: Any, what: str = "clip_norm") -> None:
    """Raises unless it is a positive number; of one that is traced, unless it is a number."""
    if isinstance(limit, bool) or not _is_number(limit):
        raise ValueError(f"{what} = {limit!r}: must be a positive number.")
    if not isinstance(limit, Tracer) and not limit > 0:
        raise ValueError(f"{what} = {limit!r}: must be positive.")


def _check_pairs(options: Options, has_microbatches: bool) -> None:
    names = ", ".join(repr(m.name) for m in options.metrics if m.pairwise)
    instead = "per_example.metrics.sketch(dim) gives vectors whose inner products estimate the same."
    if has_microbatches or options.microbatch_size == "auto":
        raise ValueError(f"metric {names} needs all examples at a time: microbatch_size=None. {instead}")
    if options.data_axes:
        raise ValueError(
            f"metric {names} is of the examples of one device, which divides the batch over {options.data_axes}. {instead}"
        )
    if options.method == "map":
        raise ValueError(f"metric {names}: method='map' has one gradient at a time; use 'surgery' or 'vmap'. {instead}")


def _with_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        if isinstance(out, tuple | list | dict):
            raise ValueError(
                f"the loss returns a {type(out).__name__}; it must return a scalar. If it is (loss, aux), say has_aux=True."
            )
        return out, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        what = (
            f"{len(out)} values"
            if isinstance(out, tuple | list)
            else "one array"
            if hasattr(out, "shape")
            else repr(out)
        )
        raise ValueError(f"has_aux=True: the loss must return (loss, aux), but it returns {what}.")
    return out[0], out[1]


def _scalar(loss: Any) -> jax.Array:
    # [1] is accepted: a loss that keeps the leading axis of its one example is a scalar for our purposes.
    loss = jnp.asarray(loss)
    if loss.size != 1:
        raise ValueError(
            f"the loss of one example has shape {loss.shape}; it must be a scalar. The loss is called with one example, "
            "its leading axis kept: reduce over it (mean or sum)."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"the loss has dtype {loss.dtype}; it must be floating.")
    return loss.reshape(())


def one_if_zero(x: jax.Array) -> jax.Array:
    return jnp.where(x != 0, x, 1.0)


def unit_rows(inputs: Inputs) -> tuple[Any, ...]:
    """What differs between units, and is given to the gradient."""
    # Units of one example do not need their weight: it does not change their gradient, only their share of the sums.
    return inputs.batch, inputs.indices_Mxb, inputs.weights_Mxb if inputs.indices_Mxb.shape[1] > 1 else None


def trace(gradient: Any, inputs: Inputs) -> tuple[Any, Any]:
    """The gradient program of one unit, and the shapes of its results."""
    # One unit, without an example axis: the engine adds the axis itself, to those equations that it runs for all.
    row = jax.tree.map(lambda x: jaxprs.struct(jax.typeof(x), x.shape[1:]), unit_rows(inputs))
    try:
        return jax.make_jaxpr(gradient, return_shape=True)(inputs.differentiated, inputs.others, *row)
    except ValueError as e:
        if "Unsupported pcast" not in str(e):
            raise
        raise ValueError(
            "the loss makes something vary over devices (jax.lax.pcast) that does so already: the arguments of the loss, "
            "parameters included, vary here. Leave it out."
        ) from e
