"""Where each gradient is produced, and what lies between there and the program's result.

The program is the gradient of *one* example's loss. From each gradient's result we walk back:

- permutations of elements (transpose, reshape, ...) commute with "apply φ, then sum over examples": they are left for
  afterwards, on the reduced arrays;
- elementwise functions of one variable (a cast, a sign) belong to φ;
- a `scan` that stacks gradients of its layers, or a `remat`, is entered: the reduction happens inside its body;
- anything else, up to and including the first equation that contracts (a matrix product, a convolution, a scatter-add, a
  sum), is the *producer*: a small function from batched arrays to one example's gradient, to be reduced without ever
  holding all examples' gradients;
- what cannot be followed is kept: computed for all examples at once, then reduced. Exact, but of size N × parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jax.extend import core

from perex_t5x.per_example import jaxprs

PERMUTATIONS = {"transpose", "reshape", "squeeze", "rev", "copy", "copy_p"}
UNARY = {"convert_element_type", "neg"}
CONTRACTIONS = {
    "dot_general", "conv_general_dilated", "scatter-add", "reduce_sum", "cumsum", "select_and_scatter_add",
    "reduce_window_sum", "segment_sum",
}  # fmt: skip
# Equations that a producer may consist of besides: cheap, and no larger in than out.
CHEAP = {
    "add", "add_any", "sub", "mul", "div", "neg", "select_n", "pad", "slice", "concatenate", "broadcast_in_dim",
    "dynamic_slice", "dynamic_update_slice", "convert_element_type", "transpose", "reshape", "squeeze", "rev", "copy",
    "copy_p", "reduce_precision", "integer_pow", "square",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kept:
    """A value (or a literal) that exists for all examples."""

    var: Any
    reason: str


@dataclasses.dataclass(frozen=True)
class Permuted:
    eqn: core.JaxprEqn
    child: Any


@dataclasses.dataclass(frozen=True)
class Mapped:
    """An elementwise function of one variable."""

    eqn: core.JaxprEqn
    child: Any


@dataclasses.dataclass(frozen=True)
class Inside:
    """Result `index` of a loop or remat whose body is entered."""

    eqn: core.JaxprEqn
    index: int


@dataclasses.dataclass(frozen=True)
class Producer:
    """`root` computed from `leaves` by `eqns`, for one example at a time."""

    eqns: tuple[core.JaxprEqn, ...]
    root: core.Var
    leaves: tuple[core.Var, ...]


Node = Kept | Permuted | Mapped | Inside | Producer


@dataclasses.dataclass
class Plan:
    nodes: dict[int, Node]  # by result of the program
    deferred: set[int]  # ids of equations that are not run for all examples
    needed: set[core.Var]  # what must be computed


def size(v: Any) -> int:
    return math.prod(v.aval.shape)


def make_plan(jaxpr: core.Jaxpr, wanted: Iterable[int]) -> Plan:
    """Plans the reduction of the results `wanted` of a program."""
    sources, uses = jaxprs.source_of(jaxpr), jaxprs.use_counts(jaxpr)
    order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    deferred: set[int] = set()

    def walk(v: Any) -> Node:
        if isinstance(v, core.Literal) or v not in sources:
            return Kept(v, "is an input of the program")
        eqn, index = sources[v]
        name = eqn.primitive.name
        if uses[v] > 1:
            return Kept(v, "is also used elsewhere")
        if name == "remat2" or name == "checkpoint" or (name == "scan" and index >= eqn.params["num_carry"]):
            return Inside(eqn, index)
        if _is_permutation(eqn):
            deferred.add(id(eqn))
            return Permuted(eqn, walk(eqn.invars[0]))
        if name in UNARY:
            deferred.add(id(eqn))
            return Mapped(eqn, walk(eqn.invars[0]))
        if name in CONTRACTIONS | CHEAP:
            return produce(v)
        return Kept(v, f"comes out of `{name}`")

    def produce(root: core.Var) -> Producer:
        eqns: list[core.JaxprEqn] = []
        leaves: dict[core.Var, None] = {}

        def visit(v: Any) -> None:
            if isinstance(v, core.Literal) or v in leaves:
                return
            eqn = sources[v][0] if v in sources else None
            part = v is root or (
                eqn is not None
                and uses[v] == 1
                and len(eqn.outvars) == 1
                and eqn.primitive.name in CONTRACTIONS | CHEAP
                and size(v) >= size(root)  # what is smaller than the gradient may exist for all examples
            )
            if not part:
                leaves[v] = None
                return
            eqns.append(eqn)
            for i, x in enumerate(eqn.invars):
                # Of a contraction only the array that a scatter-add begins with is looked into: it is usually zeros.
                if eqn.primitive.name not in CONTRACTIONS or (eqn.primitive.name == "scatter-add" and i == 0):
                    visit(x)
                elif isinstance(x, core.Var):
                    leaves[x] = None

        visit(root)
        deferred.update(id(eqn) for eqn in eqns)
        eqns.sort(key=lambda eqn: order[id(eqn)])
        made = {v for eqn in eqns for v in eqn.outvars}
        return Producer(tuple(eqns), root, tuple(v for v in leaves if v not in made))

    nodes = {i: walk(jaxpr.outvars[i]) for i in wanted}
    needed = _needed(jaxpr, nodes, deferred)
    return Plan(nodes, deferred, needed)


def _is_permutation(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":  # only where it adds axes of size one
        return (
            len(eqn.invars) == 1 and isinstance(eqn.invars[0], core.Var) and size(eqn.invars[0]) == size(eqn.outvars[0])
        )
    return eqn.primitive.name in PERMUTATIONS


def _needed(jaxpr: core.Jaxpr, nodes: dict[int, Node], deferred: set[int]) -> set[core.Var]:
    """Variables that the plain results and the nodes' leaves depend on."""
    needed = {v for i, v in enumerate(jaxpr.outvars) if i not in nodes and isinstance(v, core.Var)}
    for node in nodes.values():
        while isinstance(node, Permuted | Mapped):
            node = node.child
        match node:
            case Kept(var=v) if isinstance(v, core.Var):
                needed.add(v)
            case Producer(leaves=leaves):
                needed.update(leaves)
            case Inside(eqn=eqn, index=i):
                needed.add(eqn.outvars[i])
    for eqn in reversed(jaxpr.eqns):
        if id(eqn) not in deferred and any(v in needed for v in eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
    return needed
