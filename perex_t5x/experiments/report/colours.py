"""Colours that stay apart for colour-blind readers, on white and on black, and dashes where colours run out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# Hues after Okabe and Ito, darker on white and lighter on black.
_LIGHT = ("#0072b2", "#d55e00", "#00815f", "#b8578f", "#3795cf", "#b77b00", "#6a4ca3", "#5a5a5a")
_DARK = ("#59aef0", "#ff8c4a", "#2fc79a", "#e69ac6", "#9bd4f7", "#f2c14e", "#b9a0ec", "#bdbdbd")
_DASHES = ([1, 0], [6, 3], [2, 2], [9, 3, 2, 3])
# From dark to bright with even steps, so that order is seen without hue.
_SCALE = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a legend: what it stands for, and how that is drawn."""

    key: str
    light: str
    dark: str
    dash: tuple[int, ...] = (1, 0)


def distinct(keys: Sequence[str]) -> list[Entry]:
    """A colour each; from the ninth on with dashes, and from the 33rd on they repeat.

    >>> entries = distinct([str(i) for i in range(9)])
    >>> entries[0].light == entries[8].light, entries[0].dash == entries[8].dash
    (True, False)
    """
    n = len(_LIGHT)
    return [Entry(k, _LIGHT[i % n], _DARK[i % n], tuple(_DASHES[i // n % len(_DASHES)])) for i, k in enumerate(keys)]


def ordered(keys: Sequence[str]) -> list[Entry]:
    """Colours of one scale, in the keys' order; its pale end is left out on white, its dark end on black."""
    steps = [i / max(1, len(keys) - 1) for i in range(len(keys))]
    return [Entry(key, _at(0.8 * step), _at(0.32 + 0.68 * step)) for key, step in zip(keys, steps, strict=True)]


def _at(share: float) -> str:
    place = share * (len(_SCALE) - 1)
    i = min(int(place), len(_SCALE) - 2)
    mixed = (a + (b - a) * (place - i) for a, b in zip(_SCALE[i], _SCALE[i + 1], strict=True))
    return "#" + "".join(f"{round(c):02x}" for c in mixed)
