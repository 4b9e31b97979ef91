"""Where each gradient is produced, and what stands between there and the program's result.

The program is the gradient of *one* example's loss. From each gradient's result we walk back:

- permutations of elements (transpose, reshape, ...) commute with "apply φ, then sum over examples": they are deferred and
  applied to the reduced arrays (`Permuted`);
- elementwise functions of one variable (a cast, a sign) are absorbed into φ (`Mapped`);
- a gradient that is put together from parts that do not overlap (slices of one parameter, each used elsewhere) is several
  gradients, each reduced separately (`Concatenated`);
- a sum over the devices that share the batch (psum, reduce-scatter) is deferred as well (`CrossDeviceSum`);
- a `scan` that stacks gradients of its layers, a `remat`, or a `cond` is entered: the reduction happens inside its body
  (`InControlFlow`);
- anything else, up to and including the first equation that contracts (a matrix product, a convolution, a scatter-add, a
  sum), is the *producer*: a small function from batched arrays to one example's gradient, to be reduced without ever holding
  all examples' gradients (`Producer`);
- gradients that come out of one another, or that pass a function of parameters alone, have one producer together, of any
  equations (`Joint`; see `engine.cones`);
- what cannot be followed is computed for all examples at once, then reduced: exact, but of size N × parameter
  (`Materialized`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np
from jax.extend import core

from perex_t5x.per_example.engine import cones, jaxprs, primitives, shard_map


@dataclasses.dataclass(frozen=True)
class Materialized:
    """A value (or a literal) that exists for all examples."""

    var: Any
    note: str = ""  # as of `Producer`
    held: tuple[core.Var, ...] = ()


@dataclasses.dataclass(frozen=True)
class Permuted:
    """Elements of `child`, moved."""

    eqn: core.JaxprEqn
    child: Any


@dataclasses.dataclass(frozen=True)
class Mapped:
    """An elementwise function of one variable."""

    eqn: core.JaxprEqn
    child: Any


@dataclasses.dataclass(frozen=True)
class Concatenated:
    """Parts that fill `shape` without overlap: (start of the part, its shape, its node)."""

    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], Any], ...]


@dataclasses.dataclass(frozen=True)
class InControlFlow:
    """Result `index` of a loop, branch or remat whose body is entered."""

    eqn: core.JaxprEqn
    index: int


@dataclasses.dataclass(frozen=True)
class Producer:
    """`root` computed from `leaves` by `eqns`, for one example at a time."""

    eqns: tuple[core.JaxprEqn, ...]
    root: core.Var
    leaves: tuple[core.Var, ...]
    note: str = ""  # why arrays of the gradient's size are materialised for all examples, if they are
    held: tuple[core.Var, ...] = ()  # those arrays
    one_at_a_time: bool = False  # even if the gradient is smaller than what it is made of: values on the way are not


@dataclasses.dataclass(frozen=True)
class Joint:
    """Root number `index` of a cone."""

    cone: cones.Cone
    index: int
    note: str = ""
    held: tuple[core.Var, ...] = ()

    @property
    def alone(self) -> Producer:
        """The same gradient without those that share its cone."""
        cone = self.cone.to(self.cone.roots[self.index])
        return Producer(cone.eqns, cone.roots[0], cone.leaves, self.note, self.held, one_at_a_time=True)


@dataclasses.dataclass(frozen=True)
class CrossDeviceSum:
    """A sum over the devices that share the batch: done after φ and after each device's own sum."""

    eqns: tuple[core.JaxprEqn, ...]  # in order: see `shard_map.sum_ending_in`
    child: Any


Node = Materialized | Permuted | Mapped | Concatenated | InControlFlow | Producer | Joint | CrossDeviceSum


@dataclasses.dataclass
class Plan:
    nodes: dict[int, Node]  # by result of the program
    deferred: set[int]  # ids of equations that are not run for all examples
    needed: set[core.Var]  # what must be computed

    def due(self, jaxpr: core.Jaxpr) -> dict[int, list[int]]:
        """Number of equations -> the results that can be reduced once that many have run, and not before.

        Reduced at the first opportunity, and not at the end, a gradient does not keep the activations that it is made of
        alive until the rest has run.
        """
        made = {v: count for count, eqn in enumerate(jaxpr.eqns, 1) for v in eqn.outvars}
        by_count: dict[int, list[int]] = {}
        for index, node in self.nodes.items():
            after = max((made.get(v, 0) for v in inputs_of(node)), default=0)
            by_count.setdefault(after, []).append(index)
        return by_count


def inputs_of(node: Node) -> Iterator[core.Var]:
    """The variables that must have values before the node can be reduced."""
    for end in ends_of(node):
        match end:
            case Materialized(var=v) if isinstance(v, core.Var):
                yield v
            case Producer(leaves=leaves) | Joint(cone=cones.Cone(leaves=leaves)):
                yield from leaves
            case InControlFlow(eqn=eqn, index=i):
                yield eqn.outvars[i]  # the reduction inside is done when its loop, branch or remat has run


def make_plan(
    jaxpr: core.Jaxpr,
    wanted: Iterable[int],
    batched: Sequence[bool],
    data_axes: frozenset[str] = frozenset(),
    enter_branches: bool = True,
) -> Plan:
    """Plans the reduction of the results `wanted` of a program, of whose arguments those marked differ by example.

    `data_axes` are the mesh axes over which devices have examples of their own. `enter_branches`: whether gradients that
    come out of a `cond` are reduced inside it.
    """
    wanted = tuple(wanted)
    sources, uses = jaxprs.source_of(jaxpr), jaxprs.use_counts(jaxpr)
    depends = jaxprs.dependent(jaxpr, batched)
    moves: set[int] = set()  # ids of equations that are applied to the reduced arrays, or belong to φ

    def walk(v: Any) -> Node:
        if isinstance(v, core.Literal) or v not in sources:
            return Materialized(v)
        eqn, index = sources[v]
        name = eqn.primitive.name
        if uses[v] > 1:
            # Deferring its equations would leave the other reader without a value, and computing them twice is not free.
            return Materialized(v)
        if crossing := shard_map.sum_ending_in(eqn, data_axes, sources, uses):
            moves.update(id(e) for e in crossing)
            return CrossDeviceSum(crossing, walk(crossing[0].invars[0]))
        # The carry of a scan mixes steps; only what it stacks is one step's gradient as it is. (Gradients that are added up
        # in a carry have been taken out of it before: `rewrites.extraction`.)
        if name == "cond" and not enter_branches:
            return Materialized(v)
        if name in primitives.REMAT | {"cond", "shard_map"} or (name == "scan" and index >= eqn.params["num_carry"]):
            return InControlFlow(eqn, index)
        if is_permutation(eqn):
            moves.add(id(eqn))
            return Permuted(eqn, walk(eqn.invars[0]))
        if is_unary(eqn):
            moves.add(id(eqn))
            return Mapped(eqn, walk(eqn.invars[0]))
        # Before producers: an add of two pads is also a cheap equation, but apart its summands are smaller gradients.
        if parts := _parts(v, sources, uses):
            used, boxes = parts
            moves.update(id(e) for e in used)
            return Concatenated(jaxprs.shape_of(v), tuple((start, jaxprs.shape_of(x), walk(x)) for start, x in boxes))
        if name in primitives.CONTRACTIONS | primitives.CHEAP or is_accumulation(eqn):
            return produce(jaxpr, v, sources, uses, depends)
        return Materialized(v)

    nodes = {i: walk(jaxpr.outvars[i]) for i in wanted}
    side = cones.parameter_side(jaxpr, wanted, tuple(batched))

    def run_for_all() -> tuple[set[int], set[core.Var], set[core.Var]]:
        """Equations that are deferred; what is needed; and what of that is computed for all examples."""
        ends = [end for node in nodes.values() for end in ends_of(node)]
        deferred = moves | {id(e) for end in ends for e in _equations(end)}
        needed = _needed(jaxpr, nodes, deferred)
        return deferred, needed, {v for v in needed if v in sources and id(sources[v][0]) not in deferred}

    deferred, needed, for_all = run_for_all()
    ends = [end for node in nodes.values() for end in ends_of(node)]
    entered = {id(end.eqn) for end in ends if isinstance(end, InControlFlow)}
    roots = [v for end in ends if isinstance(v := _root(end), core.Var)]
    if found := cones.find(jaxpr, side, roots, moves, entered, for_all, depends):
        joint: dict[core.Var, list[Joint]] = {}
        for cone in found:
            for k, root in enumerate(cone.roots):
                joint.setdefault(root, []).append(Joint(cone, k))
        nodes = {i: _with_ends(node, lambda end: _taken(joint, end)) for i, node in nodes.items()}
        deferred, needed, for_all = run_for_all()
    activation = cones.largest_activation(jaxpr, side, for_all, depends)
    held = _held(jaxpr, wanted, side & for_all, depends, activation)
    nodes = {i: _with_ends(node, lambda end: _with_held(end, held, sources)) for i, node in nodes.items()}
    return Plan(nodes, deferred, needed)


def ends_of(node: Node) -> Iterator[Materialized | InControlFlow | Producer | Joint]:
    """Where the walk back has ended."""
    match node:
        case Permuted(child=child) | Mapped(child=child) | CrossDeviceSum(child=child):
            yield from ends_of(child)
        case Concatenated(parts=parts):
            for _, _, child in parts:
                yield from ends_of(child)
        case _:
            yield node


def _with_ends(node: Node, replaced: Callable[[Any], Node]) -> Node:
    match node:
        case Permuted(child=child) | Mapped(child=child) | CrossDeviceSum(child=child):
            return dataclasses.replace(node, child=_with_ends(child, replaced))
        case Concatenated(shape=shape, parts=parts):
            return Concatenated(shape, tuple((at, size, _with_ends(child, replaced)) for at, size, child in parts))
    return replaced(node)


def _root(end: Materialized | InControlFlow | Producer | Joint) -> Any:
    match end:
        case Materialized(var=v):
            return v
        case InControlFlow(eqn=eqn, index=i):
            return eqn.outvars[i]
        case Producer(root=v):
            return v
        case Joint(cone=cone, index=k):
            return cone.roots[k]


def _equations(end: Materialized | InControlFlow | Producer | Joint) -> tuple[core.JaxprEqn, ...]:
    """Equations that are not run for all examples."""
    match end:
        case Producer(eqns=eqns):
            return eqns
        case Joint(cone=cone):
            return tuple(eqn for eqn in cone.eqns if id(eqn) not in cone.repeated)
    return ()


def _taken(joint: dict[core.Var, list[Joint]], end: Any) -> Any:
    """The next of the joint gradients with this end's root, if there is one: several results may have the same root."""
    root = _root(end)
    return joint[root].pop(0) if isinstance(root, core.Var) and joint.get(root) else end


def _held(
    jaxpr: core.Jaxpr, wanted: tuple[int, ...], for_all: Set[core.Var], depends: Set[core.Var], activation: int
) -> set[core.Var]:
    """Of what is computed for all examples: what is larger than activations, and what is made of that.

    What the other results need is not held on account of a gradient, nor is what is computed beside it: activations.
    """
    forward = {id(eqn) for eqn in cones.needed_besides(jaxpr, wanted)}
    held: set[core.Var] = set()
    for eqn in jaxpr.eqns:
        for v in eqn.outvars if id(eqn) not in forward else ():
            from_held = any(x in held for x in eqn.invars if isinstance(x, core.Var))
            if v in for_all and (from_held or jaxprs.size_of(v) > activation or _grows(v, eqn, depends)):
                held.add(v)
    return held


def _with_held(end: Any, held: set[core.Var], sources: dict[core.Var, tuple[core.JaxprEqn, int]]) -> Any:
    """The same with what is held for all examples in order to reduce it, and why."""
    if isinstance(end, InControlFlow) or not held:
        return end
    mine: dict[core.Var, None] = {}
    todo = [v for v in inputs_of(end) if v in held]
    while todo:
        v = todo.pop()
        if v not in mine:
            mine[v] = None
            todo.extend(x for x in sources[v][0].invars if isinstance(x, core.Var) and x in held)
    if not mine:
        return end
    begins = next(v for v in mine if not any(x in held for x in sources[v][0].invars if isinstance(x, core.Var)))
    return dataclasses.replace(end, held=tuple(mine), note=_reason(sources[begins][0].primitive.name))


def _reason(primitive: str) -> str:
    """Completes "... have to be materialised because"; says what can be done about it."""
    if primitive == "scan":
        return (
            "lax.scan stacks them, and they are used further outside of its body; what is applied to all layers' parameters "
            "before the loop can be applied to one layer's inside it"
        )
    return f"{primitive} computes them, together with other values"


def produce(
    jaxpr: core.Jaxpr,
    root: core.Var,
    sources: dict[core.Var, tuple[core.JaxprEqn, int]],
    uses: dict[core.Var, int],
    depends: Set[core.Var] | None = None,
) -> Producer:
    """The producer of `root`: as much of what comes before it as is no smaller than what it is made of.

    The leaves are computed for all examples at once, so the cut has to be where values are small; and what is inside runs
    once per example, so it should not contain more than necessary.
    """
    order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}

    def belongs(eqn: core.JaxprEqn, v: core.Var) -> bool:
        is_known = eqn.primitive.name in primitives.CONTRACTIONS | primitives.CHEAP or is_accumulation(eqn)
        if uses[v] > 1 or len(eqn.outvars) > 1 or not is_known:
            return False
        # What is smaller than the gradient may exist for all examples, unless what it is made of is smaller still.
        made_of = sum(
            jaxprs.size_of(x) for x in eqn.invars if isinstance(x, core.Var) and (not depends or x in depends)
        )
        return jaxprs.size_of(v) >= jaxprs.size_of(root) or jaxprs.size_of(v) > made_of

    eqns: list[core.JaxprEqn] = []
    leaves: dict[core.Var, None] = {}
    todo: list[Any] = [root]
    while todo:
        v = todo.pop()
        if isinstance(v, core.Literal) or v in leaves:
            continue
        eqn = sources[v][0] if v in sources else None
        if eqn is None or not (v is root or belongs(eqn, v)):
            leaves[v] = None
            continue
        eqns.append(eqn)
        contracts = eqn.primitive.name in primitives.CONTRACTIONS or is_accumulation(eqn)
        for i, x in enumerate(eqn.invars):
            # Of a contraction only the array that a scatter-add begins with is looked into: it is usually zeros.
            if not contracts or (eqn.primitive.name == "scatter-add" and i == 0):
                todo.append(x)
            elif isinstance(x, core.Var):
                leaves[x] = None
    eqns.sort(key=lambda eqn: order[id(eqn)])
    made = {v for eqn in eqns for v in eqn.outvars}
    return Producer(tuple(eqns), root, tuple(v for v in leaves if v not in made))


def _grows(v: core.Var, eqn: core.JaxprEqn, depends: Set[core.Var]) -> bool:
    """Whether a result is larger than all that differs by example of what its equation combines; of a loop, in one step."""
    flags = jaxprs.are_in(eqn.invars, depends)
    if sum(flags) < 2:  # with shared arrays alone an activation's cotangent may grow, too: r @ w.T, of a wide layer
        return False
    result, inputs = v, list(zip(eqn.invars, flags, strict=True))
    if eqn.primitive.name == "scan":
        body, index = eqn.params["jaxpr"].jaxpr, eqn.outvars.index(v)
        result, inputs = body.outvars[index], list(zip(body.invars, jaxprs.body_flags(eqn, flags), strict=True))
        if index < eqn.params["num_carry"]:  # it is not made of itself
            del inputs[eqn.params["num_consts"] + index]
    return jaxprs.size_of(result) > sum(jaxprs.size_of(x) for x, flag in inputs if flag)


def is_accumulation(eqn: core.JaxprEqn) -> bool:
    """A scan that only adds up one array over its steps: `rewrites.extraction` makes them."""
    return eqn.primitive.name == "scan" and eqn.params["num_carry"] == 1 and len(eqn.outvars) == 1


def is_permutation(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":  # only where it adds axes of size one
        return (
            len(eqn.invars) == 1
            and isinstance(eqn.invars[0], core.Var)
            and jaxprs.size_of(eqn.invars[0]) == jaxprs.size_of(eqn.outvars[0])
        )
    return eqn.primitive.name in primitives.PERMUTATIONS


def is_unary(eqn: core.JaxprEqn) -> bool:
    """A cast or a sign; not a cast that drops the imaginary part, which is no factor of its argument."""
    return eqn.primitive.name in primitives.UNARY and not (
        np.issubdtype(jaxprs.dtype_of(eqn.invars[0]), np.complexfloating)
        and not np.issubdtype(jaxprs.dtype_of(eqn.outvars[0]), np.complexfloating)
    )


def is_zeros(v: Any, sources: dict[core.Var, tuple[core.JaxprEqn, int]]) -> bool:
    """Whether a value is zero, visibly."""
    if isinstance(v, core.Literal):
        return not v.val
    eqn = sources[v][0] if v in sources else None
    return eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "pvary") and is_zeros(eqn.invars[0], sources)


def _parts(
    root: core.Var, sources: dict[core.Var, tuple[core.JaxprEqn, int]], uses: dict[core.Var, int]
) -> tuple[list[core.JaxprEqn], list[tuple[tuple[int, ...], Any]]] | None:
    """If `root` is put together from parts that fill it without overlap: the equations that do it, and the parts.

    The gradient of `w[:k]` is a pad of zeros around a smaller gradient, so that of a parameter used in slices is a sum of
    pads. φ of such a sum is not the sum of φ, unless every element comes from one part alone: parts may not overlap. And
    they must fill the whole, since φ(0) of an element that no part has need not be 0.
    """
    used: list[core.JaxprEqn] = []
    boxes: list[tuple[tuple[int, ...], Any]] = []
    ndim = len(jaxprs.shape_of(root))

    todo: list[Any] = [root]
    while todo:
        v = todo.pop()
        if isinstance(v, core.Literal) or v not in sources or (v is not root and uses[v] > 1):
            return None
        eqn = sources[v][0]
        used.append(eqn)
        match eqn.primitive.name:
            case "add" | "add_any":
                todo.extend(eqn.invars)
            case "concatenate":
                axis, at = eqn.params["dimension"], 0
                for x in eqn.invars:
                    boxes.append((tuple(at * (k == axis) for k in range(ndim)), x))
                    at += jaxprs.shape_of(x)[axis]
            case "pad":
                x, value = eqn.invars
                config = eqn.params["padding_config"]
                if not is_zeros(value, sources) or any(lo < 0 or hi < 0 or inner for lo, hi, inner in config):
                    return None
                boxes.append((tuple(lo for lo, _, _ in config), x))
            case "dynamic_update_slice":
                into, x, *start = eqn.invars
                literals = [s.val for s in start if isinstance(s, core.Literal)]
                if not is_zeros(into, sources) or len(literals) < len(start):
                    return None
                limits = [a - b for a, b in zip(jaxprs.shape_of(v), jaxprs.shape_of(x), strict=True)]
                at = [min(max(int(s), 0), limit) for s, limit in zip(literals, limits, strict=True)]
                boxes.append((tuple(at), x))
            case _:
                return None
    if not all(isinstance(x, core.Var) for _, x in boxes) or sum(jaxprs.size_of(x) for _, x in boxes) != jaxprs.size_of(
        root
    ):
        return None
    # Sizes that add up, and no pair that overlaps: then every element is in exactly one part.
    for (a, x), (b, y) in itertools.combinations(boxes, 2):
        shapes = zip(a, jaxprs.shape_of(x), b, jaxprs.shape_of(y), strict=True)
        if all(i < j + m and j < i + n for i, n, j, m in shapes):
            return None
    return used, boxes


def is_needed(eqn: core.JaxprEqn, needed: Container[core.Var]) -> bool:
    """Whether an equation has to run: for its results, or for what it does besides (a print, a callback, a check)."""
    return bool(eqn.effects) or any(v in needed for v in eqn.outvars)


def _needed(jaxpr: core.Jaxpr, nodes: dict[int, Node], deferred: set[int]) -> set[core.Var]:
    """Variables that the plain results and the nodes' leaves depend on."""
    needed = {v for i, v in enumerate(jaxpr.outvars) if i not in nodes and isinstance(v, core.Var)}
    needed.update(v for node in nodes.values() for v in inputs_of(node))
    # Backwards, so that one pass is enough. Deferred equations need nothing for all examples: their leaves are in already.
    for eqn in reversed(jaxpr.eqns):
        if id(eqn) not in deferred and is_needed(eqn, needed):
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
    return needed
