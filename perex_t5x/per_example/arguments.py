"""The arguments of a loss: which are differentiated, which have an example axis, and what is wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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


def parameter_names(arguments: Sequence[Any], roles: Roles) -> list[str]:
    """Names of the differentiated leaves, 'layers/w'; with several argnums the argument's number comes first."""
    names = []
    for i in roles.argnums:
        prefix = "" if roles.single else f"{i}/"
        for path, _ in jax.tree_util.tree_leaves_with_path(arguments[i]):
            names.append(prefix + (jax.tree_util.keystr(path, simple=True, separator="/") or f"argument {i}"))
    return names


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
