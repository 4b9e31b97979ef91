"""Leaves of optimizer states by what they are: which slot, of which parameter, in which of the layouts we know.

| | name |
|---|---|
| optax, here and in T5X | `state/param_states/0/mu/<parameter>`, `.../0/nu/<parameter>`, `.../0/count` |
| optax's Adafactor | `state/param_states/0/v_row/<parameter>`, `v_col`, `v`; momentum in `.../4/ema/<parameter>` |
| T5X's Adafactor | `state/param_states/<parameter>/v_row`, `v_col`, `v`, `m`; no count beside `state/step` |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

STATES = "state/param_states/"
_FACTORED = ("v_row", "v_col", "v")
_ADAFACTOR = (*_FACTORED, "m")
_MOMENTS = ("mu", "nu")
_SAME = {"ema": "m"}  # optax's name of Adafactor's momentum -> T5X's


@dataclasses.dataclass(frozen=True)
class Slot:
    """A leaf of an optimizer's state.

    Attributes:
      kind: 'mu', 'nu', 'v_row', 'v_col', 'v', 'm', 'count', or whatever else its name says.
      parameter: the parameter's name without 'target/'; '' of a count.
      group: what stands before the kind, such as '0/' or '1/0/'; '' in T5X's Adafactor.
    """

    kind: str
    parameter: str
    group: str = ""


def slots(names: Iterable[str], parameters: Collection[str]) -> dict[str, Slot]:
    """What each leaf is of those that belong to an optimizer; leaves of no known layout are left out.

    Args:
      names: of all leaves.
      parameters: names, without 'target/'.

    >>> names = ["state/param_states/0/mu/decoder/w", "state/param_states/decoder/w/v_row", "state/param_states/0/count"]
    >>> for slot in slots(names, {"decoder/w"}).values():
    ...     print(slot)
    Slot(kind='mu', parameter='decoder/w', group='0/')
    Slot(kind='v_row', parameter='decoder/w', group='')
    Slot(kind='count', parameter='', group='0/')
    """
    found = {}
    for name in names:
        if not name.startswith(STATES):
            continue
        parts = name.removeprefix(STATES).split("/")
        if "/".join(parts[:-1]) in parameters and parts[-1] in _ADAFACTOR:
            found[name] = Slot(parts[-1], "/".join(parts[:-1]))
        elif parts[-1] == "count":
            found[name] = Slot("count", "", _joined(parts[:-1]))
        else:
            for start in range(1, len(parts)):
                if "/".join(parts[start:]) in parameters:
                    kind = _SAME.get(parts[start - 1], parts[start - 1])
                    found[name] = Slot(kind, "/".join(parts[start:]), _joined(parts[: start - 1]))
                    break
    return found


def _joined(parts: list[str]) -> str:
    return "".join(f"{part}/" for part in parts)


def parameters_of(names: Iterable[str]) -> set[str]:
    return {name.removeprefix("target/") for name in names if name.startswith("target/")}


def counterparts(wanted: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Which saved leaf holds what a wanted one of an optimizer's state is, where the names differ and it is one alone.

    A count of Adafactor, which T5X has not, is the step: both count updates.

    >>> saved = ["target/w", "state/step", "state/param_states/w/v_row", "state/param_states/w/m"]
    >>> wanted = ["target/w", "state/param_states/0/v_row/w", "state/param_states/0/count"]
    >>> counterparts(wanted, saved)
    {'state/param_states/0/v_row/w': 'state/param_states/w/v_row', 'state/param_states/0/count': 'state/step'}
    """
    wanted, saved = list(wanted), list(saved)
    here = slots(wanted, parameters_of(wanted))
    there = slots(saved, parameters_of(saved))
    by_slot: dict[tuple[str, str], list[str]] = {}
    for name, slot in there.items():
        by_slot.setdefault((slot.kind, slot.parameter), []).append(name)
    found: dict[str, str] = {}
    groups: dict[str, set[str]] = {}  # group here -> groups there
    kinds: dict[str, set[str]] = {}  # group here -> kinds in it
    for name, slot in here.items():
        kinds.setdefault(slot.group, set()).add(slot.kind)
        candidates = by_slot.get((slot.kind, slot.parameter), [])
        if slot.kind in (*_MOMENTS, *_ADAFACTOR) and len(candidates) == 1:
            found[name] = candidates[0]
            groups.setdefault(slot.group, set()).add(there[candidates[0]].group)
    for name, slot in here.items():
        if slot.kind != "count" or name in saved:
            continue
        origin = {f"{STATES}{group}count" for group in groups.get(slot.group, ())} & set(saved)
        if len(origin) == 1:
            found[name] = origin.pop()
        elif kinds[slot.group] & set(_ADAFACTOR) and groups.get(slot.group) == {""} and "state/step" in saved:
            found[name] = "state/step"
    return {name: source for name, source in found.items() if name != source and name not in saved}


def is_negligible(name: str, shape: tuple[int, ...], slot: Slot | None) -> bool:
    """Whether a leaf that nobody reads is no loss: a count of a schedule, or what stands where Adafactor has no momentum."""
    if slot is None:
        return False
    return (slot.kind == "count" and shape == ()) or (slot.kind in _ADAFACTOR and shape == (1,))


def in_t5x(names: Mapping[str, Any] | Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """New names of the leaves of one optimizer's state as T5X lays it out, and parameters that lack Adafactor's `m`.

    Adafactor's become T5X's own; Adam's moments get the place they have in `optax.adamw`. Others keep their names.
    """
    names = list(names)
    parameters = parameters_of(names)
    of = slots(names, parameters)
    renamed: dict[str, str] = {}
    factored = {slot.parameter for slot in of.values() if slot.kind in _FACTORED}
    adam = {slot.group for slot in of.values() if slot.kind in _MOMENTS}
    for name, slot in of.items():
        if slot.kind in _ADAFACTOR and slot.parameter in factored:
            renamed[name] = f"{STATES}{slot.parameter}/{slot.kind}"
        elif adam == {slot.group} and slot.kind in (*_MOMENTS, "count"):
            renamed[name] = f"{STATES}0/{slot.kind}" + (f"/{slot.parameter}" if slot.parameter else "")
    with_momentum = {slot.parameter for slot in of.values() if slot.kind == "m"}
    return {a: b for a, b in renamed.items() if a != b}, sorted(factored - with_momentum)
