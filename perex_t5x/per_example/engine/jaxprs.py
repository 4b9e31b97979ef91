"""Small tools on jaxprs: inline calls, evaluate one equation (plain or batched), find what depends on what."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Callable, Container, Iterable, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from perex_t5x.per_example.engine import primitives

# Frames of these files are not the user's: `source_line` skips them.
_PER_EXAMPLE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (os.path.dirname(os.path.abspath(jax.__file__)) + os.sep, _PER_EXAMPLE + os.sep)

_NO_SCOPE = contextlib.nullcontext()
F = TypeVar("F", bound=Callable[..., Any])

# --- evaluating -------------------------------------------------------------------------------------------------------


def bind(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
    """Applies one equation."""
    return bind_with(eqn, arguments, eqn.params)


def bind_with(eqn: core.JaxprEqn, arguments: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Applies the primitive of an equation with other parameters."""
    # With its name, by which profiles and preflight tell the parts of a step apart.
    name = str(eqn.source_info.name_stack)
    with jax.named_scope(name) if name else _NO_SCOPE:
        # Some primitives (custom_jvp_call, ...) store their parameters in another form than `bind` takes them.
        out = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def closed(jaxpr: Any) -> core.ClosedJaxpr:
    """Some primitives carry a Jaxpr, some a ClosedJaxpr."""
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


def evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], rule: Callable[..., list[Any]] = bind
) -> list[Any]:
    """Evaluates a jaxpr; `rule(eqn, arguments)` applies an equation."""
    env: dict[core.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))
    run_equations(jaxpr.eqns, env, rule)
    return [read(v, env) for v in jaxpr.outvars]


def run_equations(eqns: Iterable[core.JaxprEqn], env: dict[Any, Any], rule: Callable[..., list[Any]] = bind) -> None:
    """Applies equations one after the other; `env` has the values of variables, and gets those of the results."""
    for eqn in eqns:
        outs = rule(eqn, [read(v, env) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))


def read(v: Any, env: dict[Any, Any]) -> Any:
    return v.val if isinstance(v, core.Literal) else env[v]


def behind_barrier(remat: core.JaxprEqn, arguments: Sequence[Any]) -> Sequence[Any]:
    """The inputs of a rematerialised region, behind an optimisation barrier if the region asks for it.

    Once its body is inlined, the recomputation looks to the compiler like the forward pass a second time. Common
    subexpression elimination would merge the two and keep the activations alive that remat was to save; the barrier makes
    the inputs look like other values.
    """
    if remat.params.get("differentiated") and remat.params.get("prevent_cse"):
        return jax.lax.optimization_barrier(tuple(arguments))
    return arguments


def for_manual_axes(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The body of a `shard_map`, calls inlined, for one whose values do not carry the axes they vary over
    (check_vma=False)."""

    def rule(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
        # Without check_vma a cast between "varying" and "invariant" is the identity, and JAX refuses to bind it.
        if eqn.primitive.name in ("pvary", "pcast"):
            return list(arguments)
        if eqn.primitive.name == "psum_invariant":
            return [jax.lax.psum(x, tuple(eqn.params["axes"])) for x in arguments]
        return bind(eqn, arguments)

    flat = lambda *arguments: evaluate(program.jaxpr, program.consts, arguments, rule)  # noqa: E731
    return jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in program.in_avals))


def struct(aval: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """Shape (or another one) and dtype of a value, and over which axes of a `shard_map` it varies."""
    shape = aval.shape if shape is None else tuple(shape)
    if not aval.manual_axis_type.varying:
        return jax.ShapeDtypeStruct(shape, aval.dtype)
    # A shape alone would be traced as invariant, and a program traced with it would be another program (no psum needed).
    anywhere = NamedSharding(aval.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=anywhere, manual_axis_type=aval.manual_axis_type)


def of_shape(aval: Any, shape: Sequence[int]) -> Any:
    """The type of a value that has another shape, and is like this one otherwise."""
    mesh = aval.sharding.mesh
    return aval.update(shape=tuple(shape), sharding=None if mesh.empty else NamedSharding(mesh, PartitionSpec()))


def for_all(value: Any, num_examples: int) -> jax.Array:
    """A value that all examples share, for each of them: [N, ...]."""
    return jnp.broadcast_to(value, (num_examples, *jnp.shape(value)))


def contract_leading(eqn: core.JaxprEqn, operands: Sequence[Any], **changed: Any) -> Any:
    """A `dot_general` without batch axes, of operands that both have one more leading axis: contracted as well."""
    contracted, _ = eqn.params["dimension_numbers"]
    shifted = tuple((0, *(a + 1 for a in axes)) for axes in contracted)
    params = {**eqn.params, "dimension_numbers": (shifted, ((), ())), **changed}
    return bind_with(eqn, operands, params)[0]


# --- writing ----------------------------------------------------------------------------------------------------------


class Writer:
    """A program in the making, of equations taken over from others.

    Taking an equation over costs a fraction of tracing it again, and it keeps its line of the user's code.
    """

    def __init__(self, program: core.ClosedJaxpr) -> None:
        """`program` is what the new one replaces: it has the same arguments, and may use the same constants."""
        self._of = program.jaxpr
        self._constants: dict[core.Var, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        self._eqns: list[core.JaxprEqn] = []

    def take(self, eqn: core.JaxprEqn, invars: Sequence[Any]) -> None:
        """An equation as it is, of these variables; its results keep their names."""
        same = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
        self._eqns.append(eqn if same else eqn.replace(invars=list(invars)))

    def add(
        self,
        eqn: core.JaxprEqn,
        invars: Sequence[Any],
        out_avals: Sequence[Any],
        params: dict[str, Any] | None = None,
        primitive: core.Primitive | None = None,
    ) -> list[core.Var]:
        """An equation like this one, with other variables, and perhaps parameters; returns its results.

        With another primitive, one without effects, all that is kept is the line of the user's code.
        """
        outs = [core.Var(aval) for aval in out_avals]
        effects = None if primitive is None else core.no_effects
        self._eqns.append(eqn.replace(list(invars), outs, primitive, params, effects))
        return outs

    def inline(self, body: core.ClosedJaxpr, invars: Sequence[Any], remat: bool = False) -> list[Any]:
        """The equations of a body, calls within it inlined; returns what its results are called here."""
        names: dict[core.Var, Any] = dict(zip(body.jaxpr.invars, invars, strict=True))
        for v, value in zip(body.jaxpr.constvars, body.consts, strict=True):
            names[v] = core.Var(v.aval)
            self._constants[names[v]] = value
        name = lambda v: v if isinstance(v, core.Literal) else names[v]  # noqa: E731
        for eqn in body.jaxpr.eqns:
            outs = self.inline_call(eqn, [name(v) for v in eqn.invars], remat)
            if outs is None:
                # Under new names, since a body that is used twice would otherwise clash with itself.
                outs = self.add(eqn, [name(v) for v in eqn.invars], [v.aval for v in eqn.outvars])
            names.update(zip(eqn.outvars, outs, strict=True))
        return [name(v) for v in body.jaxpr.outvars]

    def inline_call(self, eqn: core.JaxprEqn, invars: Sequence[Any], remat: bool) -> list[Any] | None:
        """Of a call (or, if so asked, a rematerialised region), its body's equations; None for any other equation."""
        if remat and eqn.primitive.name in primitives.REMAT:
            invars = self.trace(functools.partial(behind_barrier, eqn), invars)
            return self.inline(closed(eqn.params["jaxpr"]), invars, remat)
        body = primitives.INLINED_CALLS.get(eqn.primitive.name)
        return None if body is None else self.inline(closed(eqn.params[body]), invars, remat)

    def trace(self, fn: Callable[[list[Any]], Sequence[Any]], invars: Sequence[Any]) -> list[Any]:
        """The equations of a function of the list of these variables' values."""
        variables = list(dict.fromkeys(v for v in invars if isinstance(v, core.Var)))

        def of_variables(*values: Any) -> list[Any]:
            env = dict(zip(variables, values, strict=True))
            return list(fn([read(v, env) for v in invars]))

        return self.inline(jax.make_jaxpr(of_variables)(*(struct(v.aval) for v in variables)), variables)

    def program(self, outvars: Sequence[Any]) -> core.ClosedJaxpr:
        """What has been written, with these results."""
        effects = frozenset().union(*(eqn.effects for eqn in self._eqns))
        jaxpr = core.Jaxpr(
            list(self._constants), self._of.invars, list(outvars), self._eqns, effects, self._of.debug_info
        )
        return core.ClosedJaxpr(jaxpr, list(self._constants.values()))


def inline(program: core.ClosedJaxpr, remat: bool = False) -> core.ClosedJaxpr:
    """The same program with `jit` and `custom_*` calls inlined; loops and branches stay, and remat unless asked for."""
    inlined = {*primitives.INLINED_CALLS, *(primitives.REMAT if remat else ())}
    if not any(eqn.primitive.name in inlined for eqn in program.jaxpr.eqns):
        return program
    writer, names = Writer(program), dict[core.Var, Any]()
    name = lambda v: names.get(v, v) if isinstance(v, core.Var) else v  # noqa: E731
    for eqn in program.jaxpr.eqns:
        invars = [name(v) for v in eqn.invars]
        outs = writer.inline_call(eqn, invars, remat)
        if outs is None:
            writer.take(eqn, invars)
        else:
            names.update(zip(eqn.outvars, outs, strict=True))
    return writer.program([name(v) for v in program.jaxpr.outvars])


# --- reading ----------------------------------------------------------------------------------------------------------


def remembered(fn: F) -> F:
    """A function of a program (and of what can be a dictionary's key) that reads it once: programs do not change.

    What it returns is shared by all who ask, so none of them may change it.
    """
    known: weakref.WeakKeyDictionary[core.Jaxpr, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(fn)
    def once(jaxpr: core.Jaxpr, *rest: Any) -> Any:
        answers = known.setdefault(jaxpr, {})
        if rest not in answers:
            answers[rest] = fn(jaxpr, *rest)
        return answers[rest]

    return once  # type: ignore[return-value]


def shape_of(v: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return v.aval.shape


def dtype_of(v: Any) -> Any:
    return v.aval.dtype


def size_of(v: Any) -> int:
    return math.prod(v.aval.shape)


def source_line(eqns: Iterable[core.JaxprEqn]) -> str | None:
    """'file.py:12 (function)', the innermost line of the user's of the first equation that has one."""
    for eqn in eqns:
        # Equations that a transformation made (a transpose, say) may have no frames.
        for frame in getattr(eqn.source_info.traceback, "frames", None) or ():
            if not frame.file_name.startswith(_LIBRARIES):
                short = os.sep.join(frame.file_name.split(os.sep)[-3:])
                return f"{short}:{frame.line_num} ({frame.function_name})"
    return None


def body_flags(eqn: core.JaxprEqn, batched: Sequence[bool]) -> list[bool]:
    """Of a scan: which of its body's arguments depend on the example, if these of the scan do."""
    bodies = bodies_of(eqn, batched)
    assert bodies is not None, eqn
    return bodies[0][1]


def split_scan(items: Sequence[Any], params: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """A scan's inputs: (constants, first carry, what it scans over)."""
    items, n, k = list(items), params["num_consts"], params["num_consts"] + params["num_carry"]
    return items[:n], items[n:k], items[k:]


@remembered
def source_of(jaxpr: core.Jaxpr) -> dict[core.Var, tuple[core.JaxprEqn, int]]:
    """Which equation makes a variable, and as which of its results."""
    return {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}


@remembered
def use_counts(jaxpr: core.Jaxpr) -> dict[core.Var, int]:
    """How often each variable is read, the program's results included."""
    counts: dict[core.Var, int] = {}
    for v in [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]:
        if isinstance(v, core.Var):
            counts[v] = counts.get(v, 0) + 1
    return counts


def inner(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs within an equation."""
    programs = []
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            if isinstance(item, core.ClosedJaxpr):
                programs.append(item.jaxpr)
            elif isinstance(item, core.Jaxpr):
                programs.append(item)
    return programs


# --- what depends on the example --------------------------------------------------------------------------------------


def are_in(variables: Iterable[Any], some: Container[Any]) -> list[bool]:
    """Of each variable, whether it is among `some`; literals are not."""
    return [isinstance(v, core.Var) and v in some for v in variables]


def dependent(jaxpr: core.Jaxpr, batched: Sequence[bool]) -> Set[core.Var]:
    """Variables that depend on the example, if these arguments do."""
    return _dependent(jaxpr, tuple(batched))


@remembered
def _dependent(jaxpr: core.Jaxpr, batched: tuple[bool, ...]) -> Set[core.Var]:
    depends = {v for v, b in zip(jaxpr.invars, batched, strict=True) if b}
    for eqn in jaxpr.eqns:
        flags = are_in(eqn.invars, depends)
        if any(flags):
            depends.update(v for v, f in zip(eqn.outvars, flow(eqn, flags), strict=True) if f)
    return depends


def flow(eqn: core.JaxprEqn, batched: Sequence[bool]) -> list[bool]:
    """Which results of an equation depend on the example, if these arguments do.

    Those of scans, branches and remat are looked into; of other equations all results do if any argument does.
    """
    if eqn.primitive.name == "optimization_barrier":  # it hands each argument on, parameters too
        return list(batched)
    bodies = bodies_of(eqn, batched)
    if bodies is None or not any(batched):
        return [any(batched)] * len(eqn.outvars)
    per_body = [batched_outputs(body, flags) for body, flags in bodies]
    return [any(flags) for flags in zip(*per_body, strict=True)]


def bodies_of(eqn: core.JaxprEqn, batched: Sequence[bool]) -> list[tuple[core.Jaxpr, list[bool]]] | None:
    """The programs of a scan, branch or remat, and which of their arguments depend on the example; None for others."""
    name, batched = eqn.primitive.name, list(batched)
    if name in primitives.REMAT or name == "shard_map" or name in primitives.INLINED_CALLS:
        return [(closed(eqn.params[primitives.INLINED_CALLS.get(name, "jaxpr")]).jaxpr, batched)]
    # A branch that depends on the example makes every result depend on it: the general answer is right for that.
    if name == "cond" and not batched[0]:
        return [(branch.jaxpr, batched[1:]) for branch in eqn.params["branches"]]
    if name != "scan":
        return None
    body = eqn.params["jaxpr"].jaxpr
    consts, carry, xs = split_scan(batched, eqn.params)
    # A carry that starts out shared may come to depend on the example in the first step, and others on it in the second:
    # repeat until nothing changes.
    while True:
        outs = batched_outputs(body, [*consts, *carry, *xs])[: len(carry)]
        grown = [c or o for c, o in zip(carry, outs, strict=True)]
        if grown == carry:
            return [(body, [*consts, *carry, *xs])]
        carry = grown


def batched_outputs(jaxpr: core.Jaxpr, batched: Sequence[bool]) -> list[bool]:
    """Which results depend on the example."""
    return are_in(jaxpr.outvars, dependent(jaxpr, batched))
