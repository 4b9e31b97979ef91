"""What an optimizer may know of the run around it, beside gradients and parameters: logical axes, and the run's step.

optax hands neither to a transformation's `init`, and its wrappers (`chain`, `multi_transform`) pass on parameters alone. So
the trainer enters `run_context` while it traces, and a transformation asks here. A loop of one's own may do so, too.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr

Axes = tuple[str | None, ...]


class _RunContext(NamedTuple):
    axes: Mapping[str, Axes] | None = None
    step: Any = None


_NOWHERE = _RunContext()
_current: contextvars.ContextVar[_RunContext] = contextvars.ContextVar("run_context", default=_NOWHERE)


def name_of(path: Any) -> str:
    """A leaf's name: 'decoder/layers_0/mlp/wi/kernel'."""
    return keystr(path, simple=True, separator="/")


@contextlib.contextmanager
def run_context(boxed_params: Any = None, step: Any = None) -> Iterator[None]:
    """Context in which optimizers know the logical axes of parameters, and the run's step.

    Args:
      boxed_params: a tree like the parameters whose leaves have `names` (`flax.linen.LogicallyPartitioned`), or are tuples
        of names; what else is in it has no known axes. None: nothing is known.
      step: of the run, from 0; None: optimizers count by themselves.

    >>> with run_context({"w": ("embed", "mlp")}):
    ...     logical_axes("w"), logical_axes("b"), run_step()
    (('embed', 'mlp'), None, None)
    >>> logical_axes("w") is None
    True
    """

    def is_named(x: Any) -> bool:
        return hasattr(x, "names") or (isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x))

    axes = None
    if boxed_params is not None:
        leaves = jax.tree_util.tree_leaves_with_path(boxed_params, is_leaf=is_named)
        axes = {name_of(path): tuple(getattr(x, "names", x)) for path, x in leaves if is_named(x)}
    token = _current.set(_RunContext(axes, step))
    try:
        yield
    finally:
        _current.reset(token)


def logical_axes(name: str) -> Axes | None:
    """Of a parameter, by its name; None where nothing is known."""
    return (_current.get().axes or {}).get(name)


def run_step() -> Any | None:
    """The number of steps that the run has made; None outside of a run."""
    return _current.get().step
