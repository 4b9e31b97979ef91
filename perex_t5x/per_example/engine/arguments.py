"""The loss's arguments: their roles, the parameters selected among them, and what is checked before anything is computed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from perex_t5x.per_example.engine.shard_map import AutoSharding
from perex_t5x.per_example.metrics import POSITIONS, Metric, positions_of
from perex_t5x.per_example.statistic import Statistic


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
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) and not isinstance(leaf, int | float | complex):
                raise ValueError(
                    f"parameter {name} is no array, but {leaf!r}: give arrays alone, and let the loss close over the rest "
                    "(Equinox: eqx.partition(model, eqx.is_inexact_array), and eqx.combine in the loss)."
                )
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


def check_keys(arguments: Sequence[Any], roles: Roles, method: str) -> None:
    """Raises unless the arguments that are said to be PRNG keys are, of a kind that `method` can take."""
    for i in roles.rng_argnums:
        for path, key in jax.tree_util.tree_leaves_with_path(arguments[i]):
            name = f"rng_argnums names argument {i}{jax.tree_util.keystr(path)}, which"
            dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
            is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
            if not (is_typed and shape == ()) and not (dtype == jnp.uint32 and shape in ((2,), (4,))):
                what = f"{dtype}{list(shape)}" if dtype is not None and shape is not None else repr(key)
                raise ValueError(
                    f"{name} is not a PRNG key but {what}. Give jax.random.key(seed), or a tree of such keys."
                )
            implementation = str(jax.random.key_impl(key)) if is_typed else "threefry2x32" if shape == (2,) else "rbg"
            if "rbg" in implementation and method in ("surgery", "vmap"):
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


# --- clip_norm, and weights that are a function ------------------------------------------------------------------------


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


def check_weight_function(fn: Callable[[Any, Any], Any]) -> None:
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
