"""Kernels of attention with an axis for the heads, as T5X's scalable T5 has them, or with heads and widths as one axis.

    query, key, value   [embed, heads, head_dim]   or [embed, heads * head_dim]
    out                 [heads, head_dim, embed]   or [heads * head_dim, embed]

Leaves of an optimizer's state follow. Layers are by themselves, or along axis 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from perex_t5x.checkpoint_formats import layers, optimizer_states
from perex_t5x.checkpoint_formats import leaves as leaves_lib
from perex_t5x.checkpoint_formats.leaves import Leaf
from perex_t5x.errors import ConfigError

_KERNEL = re.compile(r"attention/(query|key|value|out)/kernel(/|$)")


def head_dim_of(leaves: Mapping[str, Leaf]) -> int | None:
    """The width of a head, where kernels have an axis for heads; None where they have not."""
    extra = layers.layout_of(leaves) in ("axis0", "axis1")
    for name, leaf in leaves.items():
        if name.startswith("target/") and name.endswith("attention/query/kernel") and len(leaf.shape) - extra == 3:
            return leaf.shape[-1]
    return None


def changed(leaves: Mapping[str, Leaf], head_dim: int | None) -> dict[str, tuple[str, Leaf]]:
    """New name and leaf of those that change: heads become one axis with their widths, or of width `head_dim` by themselves.

    Rows and columns of Adafactor's state of a matrix by itself may change their names: see `layers`.
    """
    layout = layers.layout_of(leaves)
    if layout == "axis1":
        raise ConfigError(
            "heads are joined or split where layers are unrolled or along axis 0: give --layers=axis0, too."
        )
    lead = 1 if layout == "axis0" else 0
    parameters = optimizer_states.parameters_of(leaves)
    of = optimizer_states.slots(leaves, parameters)
    found = {}
    for name, leaf in leaves.items():
        slot = of.get(name)
        if not _KERNEL.search(name) or not (slot or name.startswith("target/")):
            continue
        parameter = slot.parameter if slot else name.removeprefix("target/")
        before = leaves[f"target/{parameter}"].shape
        rank = len(before) - lead
        if rank != (3 if head_dim is None else 2) or (slot and leaf.shape == (1,)):
            continue
        is_out = parameter.endswith("out/kernel")
        kind = slot.kind if slot else ""
        matrix = before[lead:] if head_dim else _joined(before[lead:], 0 if is_out else 1)
        swaps = not lead and layers.swaps(slot, matrix)
        if swaps and head_dim:
            kind = layers.swapped(kind)
        new = layers.swapped(name) if swaps else name
        if kind == "v_row":
            found[name] = new, leaves_lib.renamed(leaf, new)
            continue
        at = lead if is_out or kind == "v_col" else lead + 1
        shape = _joined(leaf.shape, at) if head_dim is None else _split(name, leaf.shape, at, head_dim)
        found[name] = new, leaves_lib.reshaped(leaf, shape, new)
    return found


def _joined(shape: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*shape[:at], int(np.prod(shape[at : at + 2])), *shape[at + 2 :])


def _split(name: str, shape: tuple[int, ...], at: int, head_dim: int) -> tuple[int, ...]:
    if shape[at] % head_dim:
        raise ConfigError(f"head_dim = {head_dim} does not divide axis {at} of {name}, {list(shape)}.")
    return (*shape[:at], shape[at] // head_dim, head_dim, *shape[at + 1 :])
