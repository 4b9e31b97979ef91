"""Names of TPU slices: the compiler's (v5e:4x4) and the cloud's (v5e-16), without JAX."""

from __future__ import annotations

import math
import re

from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.hardware.chips import CHIPS

# Cloud names count chips on v5e and v6e, and cores, two to a chip, on v4 and v5p.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBIC = {
    8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8", 1024: "8x8x8",
    2048: "8x8x16", 4096: "8x16x16",
}  # fmt: skip
_PODS = {
    **{f"{name}-{size}": f"{name}:{shape}" for name in ("v5e", "v6e") for size, shape in _FLAT.items()},
    **{f"{name}-{size}": f"{name}:{shape}" for name in ("v4", "v5p") for size, shape in _CUBIC.items()},
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e"}


def known_topologies() -> list[str]:
    """The slices that the cloud offers, smallest first within each chip.

    >>> known_topologies()[:3]
    ['v4:2x2x1', 'v4:2x2x2', 'v4:2x2x4']
    """
    return sorted(_PODS.values(), key=lambda name: (name.split(":")[0], num_chips(name)))


def num_chips(topology: str) -> int:
    """Chips of one slice of this topology.

    >>> num_chips("v5e:4x8")
    32
    """
    return math.prod(int(size) for size in topology.partition(":")[2].split("x"))


def canonical_topology(name: str) -> str:
    """The compiler's name of a topology, from that or from a cloud name.

    v5e and v6e names count chips, v4 and v5p names count cores, two to a chip:

    >>> canonical_topology("v5litepod-256"), canonical_topology("v5p-128"), canonical_topology("v6e:4x4")
    ('v5e:16x16', 'v5p:4x4x4', 'v6e:4x4')
    """
    text = str(name).strip().lower()
    for alias, chip_name in _ALIASES.items():
        text = re.sub(rf"^{alias}(?=[:-])", chip_name, text)
    if text in _PODS:
        return _PODS[text]
    if text in _PODS.values() or _is_larger_cube(text):
        return text
    raise ConfigError(_unknown(str(name), text))


def _is_larger_cube(text: str) -> bool:
    """Slices of v4 and v5p beyond the listed ones are made of cubes of 4x4x4."""
    match = re.fullmatch(r"(v4|v5p):(\d+)x(\d+)x(\d+)", text)
    return match is not None and all(int(size) >= 4 and int(size) % 4 == 0 for size in match.groups()[1:])


def _unknown(name: str, text: str) -> str:
    chip_name = re.split("[:-]", text)[0]
    chips = [chip_name] if chip_name in CHIPS else list(CHIPS)
    lines = [
        f"  {c}: " + ", ".join(t.split(":")[1] for t in known_topologies() if t.startswith(f"{c}:")) for c in chips
    ]
    hint = _nearest_size(text) or did_you_mean(text, [*_PODS, *_PODS.values()])
    return f"unknown TPU topology {name!r}.{hint} Write CHIP:SHAPE, such as v5e:4x4. Known are\n" + "\n".join(lines)


def _nearest_size(text: str) -> str:
    """The slice of the nearest size, where the chip is known and a size is given."""
    chip_name, separator, shape = re.match("([^:-]*)(.?)(.*)", text).groups()
    size = math.prod(int(n) for n in re.findall(r"\d+", shape))
    known = {pod: num_chips(t) for pod, t in _PODS.items() if pod.startswith(f"{chip_name}-")}
    if not known or not shape or size < 1:
        return ""
    by_chips = separator == ":"
    nearest = min(known, key=lambda pod: abs(math.log(size / (known[pod] if by_chips else int(pod.split("-")[1])))))
    return f" Did you mean {_PODS[nearest] if by_chips else nearest!r}?"
