"""Rematerialisation: what the backward pass keeps of each layer's forward pass, and what it computes again.

`T5Config.remat_policy` is one of

- 'none': everything is kept; 'full': each layer's input alone;
- values by name, in the device's memory or in the host's: 'save:context,mlp_in', 'offload:mlp_in',
  'save:context;offload:mlp_in'. A layer names the values of `NAMES` with `named`;
- a preset, which stands for such a list (`PRESETS`; T5X's and MaxText's names);
- a name of `jax.checkpoint_policies` that takes no arguments;
- 'auto': on TPUs the one of `LADDER` with the fewest cycles, by the compiler's estimate, whose step fits into the devices'
  memory (`choose`). On CPUs, where memory is cheaper than time, 'none'.

Parameters gathered for a layer (FSDP) are never kept: they are gathered again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.partitioning.gather import keep_all_but_gathered
from perex_t5x.per_example.kernels.dispatch import for_tpu

Policy = Callable[..., Any]

# Attention's inputs (with their positions), its result for each head, the residual stream after its output projection;
# the arguments of the MLP's activations, all of them under one name.
NAMES = ("query", "key", "value", "context", "out", "mlp_in")

PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "minimal": "save:query,key,value,out,mlp_in",
        "minimal_with_context": "save:query,key,value,context,out,mlp_in",
        "minimal_offloaded": "offload:query,key,value,out,mlp_in",
        "save_all_named": "save:query,key,value,context,out,mlp_in",
        "save_qkv": "save:query,key,value",
        "save_qkv_proj": "save:query,key,value",
        "save_out_proj": "save:out",
        "save_dot_except_mlp": "save:query,key,value,out",
        "save_dot_with_context_except_mlp": "save:query,key,value,context,out",
        "qkv_proj_offloaded": "offload:query,key,value",
    }
)

JAX_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)

# From the least recomputation to the least memory.
LADDER = (
    "save_all_named",
    "save:context,out,mlp_in",
    "save:query,key,value,context,out",
    "save:context,out",
    "save:context",
    "full",
)

KNOWN = ("none", "full", "auto", *PRESETS, *JAX_POLICIES)


@dataclass(frozen=True)
class Named:
    """Values kept by name: on the device, and in the host's memory."""

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


def named(x: Any, name: str) -> Any:
    """x, an array or a tree of them, which policies may keep under this name."""
    assert name in NAMES, name
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), x)


def parse(policy: str) -> Named | None:
    """The values that a policy names; None where it is none of names. Raises `ConfigError` for what is not a policy.

    >>> parse("save:context;offload:mlp_in")
    Named(save=('context',), offload=('mlp_in',))
    >>> parse("save_qkv").save, parse("full")
    (('query', 'key', 'value'), None)
    """
    policy = PRESETS.get(policy, policy)
    if policy in KNOWN:
        return None
    if not isinstance(policy, str) or ":" not in policy:
        _refuse(policy, f"unknown.{did_you_mean(str(policy), KNOWN)} Known: {', '.join(KNOWN)}, or 'save:' and names")
    lists: dict[str, tuple[str, ...]] = {}
    for part in policy.split(";"):
        verb, _, values = (x.strip() for x in part.partition(":"))
        if verb not in ("save", "offload") or verb in lists:
            _refuse(policy, f"{part.strip()!r} is not one list of names after 'save:' or 'offload:'")
        lists[verb] = tuple(name.strip() for name in values.split(","))
        for name in lists[verb]:
            if name not in NAMES:
                _refuse(policy, f"unknown value {name!r}.{did_you_mean(name, NAMES)} Values: {', '.join(NAMES)}")
    both = [name for name in lists.get("save", ()) if name in lists.get("offload", ())]
    if both:
        _refuse(policy, f"{both[0]!r} is both saved and offloaded")
    return Named(**lists)


@dataclass(frozen=True)
class Attempt:
    """A step compiled with a policy.

    Attributes:
      fits: into the devices' memory.
      note: what it takes, or why it does not fit.
      cycles: by the compiler's estimate; None where there is none, or the step does not fit.
      program: what was compiled, if it is wanted.
    """

    policy: str
    fits: bool
    note: str = ""
    cycles: int | None = None
    program: Any = None


@dataclass(frozen=True)
class Choice:
    """What was tried for 'auto', in order."""

    attempts: tuple[Attempt, ...]

    @property
    def best(self) -> Attempt | None:
        """The one with the fewest cycles that fits; the first of those without an estimate; None where none fits."""
        fitting = [a for a in self.attempts if a.fits]
        return min(fitting, key=lambda a: a.cycles or 0, default=None)

    def lines(self) -> list[str]:
        """One on each attempt, and what was taken."""
        tried = [f"remat_policy = {a.policy!r}: {a.note or 'fits'}" for a in self.attempts]
        taken = f"remat_policy = {self.best.policy!r} is taken" if self.best else "none of them fits"
        return [*tried, taken]


def choose(policies: Sequence[str], attempt: Callable[[str], Attempt], all: bool = False) -> Choice:
    """Resolves 'auto': compiles the step with some of the policies, given in the order of their recomputation.

    A policy that keeps less than one that fits is not tried: it would compute the same, and more. Without estimates of
    cycles the first that fits is taken.

    Args:
      attempt: compiles the step with a policy.
      all: try every policy, for a table of them.

    >>> cycles = {"save:query": 7, "save:out": 5, "full": 9}
    >>> choice = choose(list(cycles), lambda policy: Attempt(policy, True, "", cycles[policy]))
    >>> choice.best.policy, [a.policy for a in choice.attempts]
    ('save:out', ['save:query', 'save:out'])
    """
    attempts: list[Attempt] = []
    for policy in policies:
        fitting = [a for a in attempts if a.fits]
        if not all and any(a.cycles is None or _kept(policy) < _kept(a.policy) for a in fitting):
            continue
        attempts.append(attempt(policy))
        # Programs take memory on the devices: only the best so far is worth it.
        best = Choice(tuple(attempts)).best
        attempts = [a if a is best else replace(a, program=None) for a in attempts]
    return Choice(tuple(attempts))


def _kept(policy: str) -> frozenset[str]:
    values = parse(policy)
    return frozenset() if values is None else frozenset((*values.save, *values.offload))


def policy_for_jax(policy: str, gathers: bool) -> Policy | None:
    """What `jax.checkpoint` takes; None for no rematerialisation.

    Args:
      policy: `T5Config.remat_policy`.
      gathers: whether layers gather their parameters (FSDP).
    """
    if policy == "auto":  # a program of which nobody asks whether it fits, such as an evaluation
        policy = "full" if for_tpu() else "none"
    values = parse(policy)
    if values is not None:
        if not (values.offload and for_tpu()):  # on a CPU the host's memory is the device's
            return jax.checkpoint_policies.save_only_these_names(*values.save, *values.offload)
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=values.save,
            names_which_can_be_offloaded=values.offload,
            offload_src="device",
            offload_dst="pinned_host",
        )
    if gathers and policy in ("none", "everything_saveable"):
        return keep_all_but_gathered  # else all layers' gathered parameters would be kept for the backward pass
    if policy == "none":
        return None
    return getattr(jax.checkpoint_policies, "nothing_saveable" if policy == "full" else policy)


def _refuse(policy: str, what: str) -> None:
    raise ConfigError(f"T5Config.remat_policy = {policy!r}: {what}. Example: 'save:context,mlp_in;offload:query'.")
