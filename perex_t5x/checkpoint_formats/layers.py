"""Layers of a network: one entry each, or all in one array along an axis; and the way from each of these to the others.

| layout | names | |
|---|---|---|
| 'unrolled' | `decoder/layers_0/...`, `decoder/layers_1/...` | T5X's T5 and decoder-only examples; ours |
| 'axis0' | `decoder/layers/...` | ours with `scan_layers` |
| 'axis1' | `decoder/decoder/...` | T5X's scalable T5 |

Leaves of an optimizer's state follow their parameters. Nothing is read: each result is a view of what is there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from perex_t5x.checkpoint_files import DamagedError
from perex_t5x.checkpoint_formats import leaves as leaves_lib
from perex_t5x.checkpoint_formats.leaves import Leaf
from perex_t5x.checkpoint_formats.optimizer_states import Slot, parameters_of, slots
from perex_t5x.errors import ConfigError

Layout = Literal["unrolled", "axis0", "axis1"]
LAYOUTS = ("unrolled", "axis0", "axis1")
_LAYER = re.compile(
    r"(?P<stack>encoder|decoder)/(?:layers_(?P<number>\d+)|(?P<ours>layers)|(?P<t5x>(?P=stack)))/(?P<rest>.+)"
)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a parameter is: `stack`/layer `number`/`rest`; `number` None of all layers in one array."""

    stack: str
    number: int | None
    rest: str
    layout: Layout

    @classmethod
    def of(cls, parameter: str) -> _Place | None:
        match = _LAYER.fullmatch(parameter)
        if match is None:
            return None
        if match["number"] is not None:
            return cls(match["stack"], int(match["number"]), match["rest"], "unrolled")
        return cls(match["stack"], None, match["rest"], "axis0" if match["ours"] else "axis1")

    def name(self, layout: Layout, number: int | None = None) -> str:
        between = {"unrolled": f"layers_{number}", "axis0": "layers", "axis1": self.stack}[layout]
        return f"{self.stack}/{between}/{self.rest}"


def layout_of(leaves: Mapping[str, Leaf]) -> Layout | None:
    """The layout of a checkpoint's parameters; None where there are no layers under the names above."""
    found: set[Layout] = {place.layout for parameter in parameters_of(leaves) if (place := _Place.of(parameter))}
    if len(found) > 1:
        raise ConfigError(f"the layers of this checkpoint are stored in several ways: {', '.join(sorted(found))}.")
    return found.pop() if found else None


@dataclasses.dataclass(frozen=True)
class Moved:
    """A leaf in another layout, and those that it is made of."""

    leaf: Leaf
    sources: tuple[str, ...]
    how: str  # 'kept', 'stacked', 'split', 'axis moved'


def rearranged(leaves: Mapping[str, Leaf], layout: Layout) -> dict[str, Moved]:
    """All leaves with their layers in `layout`. Raises `ConfigError` for what cannot be brought into it."""
    present = layout_of(leaves)
    if present is None or present == layout:
        return {name: Moved(leaf, (name,), "kept") for name, leaf in leaves.items()}
    parameters = parameters_of(leaves)
    of = slots(leaves, parameters)
    result: dict[str, Moved] = {}
    gathered: dict[str, dict[int, str]] = {}  # name in the new layout -> layer -> name
    for name, leaf in leaves.items():
        slot = of.get(name)
        parameter = name.removeprefix("target/") if name.startswith("target/") else slot.parameter if slot else ""
        place = _Place.of(parameter)
        if place is None:
            result[name] = Moved(leaf, (name,), "kept")
        elif place.number is not None:
            new = _renamed(name, parameter, place.name(layout))
            new = swapped(new) if swaps(slot, leaves[f"target/{parameter}"].shape) else new
            gathered.setdefault(new, {})[place.number] = name
        else:
            whole = leaves[f"target/{parameter}"]
            for new, moved in _from_stack(leaf, slot, whole, place, parameter, layout):
                result[new] = Moved(moved, (name,), "axis moved" if layout != "unrolled" else "split")
    for new, numbered in gathered.items():
        if sorted(numbered) != list(range(len(numbered))):
            missing = min(set(range(max(numbered) + 1)) - set(numbered))
            raise DamagedError(f"{new} is made of all layers, and of layer {missing} it is missing.")
        names = tuple(numbered[number] for number in range(len(numbered)))
        slot = of.get(names[0])
        parameter = slot.parameter if slot else names[0].removeprefix("target/")
        whole = leaves[f"target/{parameter}"].shape
        result[new] = Moved(_to_stack([leaves[name] for name in names], slot, whole, layout, new), names, "stacked")
    return result


def _renamed(name: str, parameter: str, new: str) -> str:
    """The name of a leaf whose parameter gets another name."""
    start = name.index(f"/{parameter}") + 1
    return name[:start] + new + name[start + len(parameter) :]


def _is_placeholder(slot: Slot | None, shape: tuple[int, ...], parameter_shape: tuple[int, ...]) -> bool:
    """Whether a leaf stands for one of Adafactor's that this parameter has not: a single number, whatever the layout."""
    return slot is not None and slot.kind in ("v_row", "v_col", "v", "m") and shape == (1,) and parameter_shape != (1,)


def _kept(name: str, slot: Slot | None, shape: tuple[int, ...], whole: tuple[int, ...], axis: int) -> list[int]:
    """Which axes of a parameter of shape `whole`, with layers along `axis`, a leaf of its state has.

    Adafactor's rows and columns are averages over the others. By T5X's rules rows are along 'embed', columns along the rest.
    """
    axes = range(len(whole))
    if shape == whole:
        return list(axes)
    others = [k for k in axes if k != axis]
    if slot is not None and slot.kind in ("v_row", "v_col"):
        embed = _embed_axis(slot.parameter, others)
        by_rule = [k for k in axes if k in (axis, embed)] if slot.kind == "v_row" else [k for k in axes if k != embed]
        for kept in (by_rule, *([k for k in axes if k != lacking] for lacking in others)):
            if tuple(whole[k] for k in kept) == shape:
                return kept
    raise ConfigError(
        f"{name} has shape {list(shape)}, and its parameter {list(whole)} with layers along axis {axis}: where its layers "
        "are is not known. Leave the optimizer's state out with --optimizer_state=drop."
    )


def _embed_axis(parameter: str, axes: list[int]) -> int:
    """Which of a kernel's axes is the residual stream's: the last one of `out` and `wo`, else the first."""
    return axes[-1] if re.search(r"/(out|wo)/kernel$", parameter) else axes[0]


def _from_stack(
    leaf: Leaf, slot: Slot | None, whole: Leaf, place: _Place, parameter: str, layout: Layout
) -> list[tuple[str, Leaf]]:
    """The leaves that one with all layers becomes."""
    source = 1 if place.layout == "axis1" else 0
    if len(whole.shape) <= source:
        raise DamagedError(f"{whole.name} has shape {list(whole.shape)}, and no axis {source} of layers.")
    number = whole.shape[source]
    if _is_placeholder(slot, leaf.shape, whole.shape):
        if layout != "unrolled":
            new = _renamed(leaf.name, parameter, place.name(layout))
            return [(new, leaves_lib.renamed(leaf, new))]
        new_names = [_renamed(leaf.name, parameter, place.name("unrolled", i)) for i in range(number)]
        return [(new, leaves_lib.renamed(leaf, new)) for new in new_names]
    kept = _kept(leaf.name, slot, leaf.shape, whole.shape, source)
    axis = kept.index(source)
    if layout != "unrolled":
        order = [k for k in range(len(whole.shape)) if k != source]
        order.insert(1 if layout == "axis1" else 0, source)
        to = [k for k in order if k in kept].index(source)
        new = _renamed(leaf.name, parameter, place.name(layout))
        return [(new, leaves_lib.axis_moved(leaf, axis, to, new))]
    swap = swaps(slot, [size for k, size in enumerate(whole.shape) if k != source])
    names = [_renamed(leaf.name, parameter, place.name("unrolled", i)) for i in range(number)]
    names = [swapped(name) for name in names] if swap else names
    return [(name, leaves_lib.taken(leaf, i, axis, name)) for i, name in enumerate(names)]


def swaps(slot: Slot | None, shape: Sequence[int]) -> bool:
    """Whether rows and columns of Adafactor's state of a matrix change their names between one array of layers and many.

    In one array T5X's rules name them, and `v_row` is what keeps the axis 'embed'; of a matrix by itself `v_row` is what
    keeps the shorter axis, or of a square one the first. What is computed from both is the same.
    """
    if slot is None or slot.kind not in ("v_row", "v_col") or len(shape) != 2:
        return False
    return int(np.argsort(shape, kind="stable")[0]) != _embed_axis(slot.parameter, [0, 1])


def swapped(name: str) -> str:
    """
    >>> swapped("state/param_states/w/v_row"), swapped("v_col")
    ('state/param_states/w/v_col', 'v_row')
    """
    return re.sub(r"\bv_(row|col)\b", lambda match: "v_col" if match[1] == "row" else "v_row", name)


def _to_stack(parts: list[Leaf], slot: Slot | None, whole: tuple[int, ...], layout: Layout, name: str) -> Leaf:
    """All layers of one leaf in one array; `whole` is the shape of one layer's parameter."""
    axis = 1 if layout == "axis1" else 0
    first = parts[0]
    if _is_placeholder(slot, first.shape, whole):
        return leaves_lib.renamed(first, name)
    stack = (*whole[:axis], len(parts), *whole[axis:])
    if first.shape == whole or slot is None:
        return leaves_lib.stacked(parts, axis, name)
    if swaps(slot, whole):
        slot = dataclasses.replace(slot, kind=swapped(slot.kind))
    others = [k for k in range(len(stack)) if k != axis]
    embed = _embed_axis(slot.parameter, others)
    by_rule = [embed] if slot.kind == "v_row" else [k for k in others if k != embed]
    for kept in (by_rule, *([k for k in others if k != lacking] for lacking in others)):
        if tuple(stack[k] for k in kept) == first.shape:
            return leaves_lib.stacked(parts, sum(k < axis for k in kept), name)
    raise ConfigError(
        f"{first.name} has shape {list(first.shape)}, and its parameter {list(whole)}: how its layers are stacked is "
        "not known. Leave the optimizer's state out with --optimizer_state=drop."
    )
