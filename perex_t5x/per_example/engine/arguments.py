"""The arguments of a loss: which are differentiated, which have an example axis, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.per_example.engine.sharding import Placement


@dataclasses.dataclass(frozen=True)
class Roles:
    """Positions among the loss's arguments, canonical."""

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

    def like_parameters(self, tree: Any, what: str) -> list[Any]:
        """The selected leaves of another tree of the parameters' structure."""
        try:
            leaves = self.tree.flatten_up_to(tree)
        except (ValueError, TypeError) as e:
            raise ValueError(f"{what} does not have the parameters' structure: {e}") from e
        chosen = [x for x, c in zip(leaves, self.chosen, strict=True) if c]
        for name, x, shape in zip(self.names, chosen, self.shapes, strict=True):
            if x is None or jnp.shape(x) != shape:
                given = "nothing" if x is None else f"shape {jnp.shape(x)}"
                raise ValueError(f"{what} has {given} for parameter {name} of shape {shape}.")
        return chosen

    def places(self, shardings: Any) -> list[Placement | None]:
        """Of the selected leaves, from a tree like the parameters; Nones without one."""
        if shardings is None:
            return [None] * len(self.names)
        try:
            every = self.tree.flatten_up_to(shardings)
        except (ValueError, TypeError) as e:
            raise ValueError(f"shardings does not have the parameters' structure: {e}") from e
        chosen = [s for s, c in zip(every, self.chosen, strict=True) if c]
        return [Placement.of(s, len(shape)) for s, shape in zip(chosen, self.shapes, strict=True)]


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


def check_divides(what: str, part: int, whole_name: str, whole: int) -> None:
    if isinstance(part, bool) or not isinstance(part, int | np.integer) or part < 1:
        raise ValueError(f"{what} = {part!r}: must be a positive whole number.")
    if whole % part:
        near = [d for d in range(1, whole + 1) if whole % d == 0]
        best = min(near, key=lambda d: (abs(d - part), d))
        raise ValueError(f"{what} = {part} does not divide {whole_name} = {whole}. Nearest that does: {best}.")
