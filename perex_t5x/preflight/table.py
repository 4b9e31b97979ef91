"""Collectives as a table that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perex_t5x.preflight.hlo.program import Collective

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer

_SMALL = 1000  # bytes
HEADER = ("collective", "axes", "where", "a step", "arrays", "type", "bytes each", "bytes a step", "over")


def rows(collectives: Sequence[Collective], loops: Mapping[str, int], each: bool = False) -> list[tuple[str, ...]]:
    """Lines of the table, in the program's order, below `HEADER`.

    Collectives of the same kind, axes, place and type are one line, unless `each`; those of a few numbers keep apart.

    Args:
      collectives: from `Program.collectives`.
      loops: name -> turns of the loops that a reader knows by name, outermost first: {'microbatch': 4, 'layer': 12}.
      each: one line for each.
    """
    lines: dict[Any, list[Collective]] = {}
    for c in collectives:
        key = (kind_name(c), c.axes, place(c.loops, loops), c.dtypes, c.network, c.bytes < _SMALL)
        lines.setdefault((*key, c.name) if each else key, []).append(c)
    table = []
    for (kind, axes, where, dtypes, network, *_), members in lines.items():
        table.append(
            (
                kind,
                ", ".join(axes) or "-",
                where,
                str(sum(c.executions for c in members)),
                _range([c.arrays for c in members], str),
                ", ".join(dtypes),
                _range([c.bytes for c in members], format_bytes),
                format_bytes(sum(c.bytes_per_step for c in members)),
                network or "-",
            )
        )
    return table


def kind_name(collective: Collective) -> str:
    if collective.part_of:
        return f"{collective.part_of}, as permutes"
    return collective.kind


def place(trips: Sequence[int | None], loops: Mapping[str, int]) -> str:
    """Where in the step a collective with these loops around it stands, in a reader's words.

    A loop of which the compiler has taken the first or the last turn out still counts as the same loop.

    >>> loops = {"microbatch": 4, "layer": 12}
    >>> place((), loops), place((4,), loops), place((4, 12), loops), place((11,), loops), place((4, 7), loops)
    ('once', 'per microbatch', 'per microbatch, layer', 'per layer', 'per microbatch, turn of 7')
    """
    if not trips:
        return "once"
    open_names = dict(loops)
    words = []
    for turns in trips:
        name = next((n for n, size in open_names.items() if size > 1 and turns in (size, size - 1)), None)
        if name is None:
            words.append("turn of a loop" if turns is None else f"turn of {turns}")
            continue
        words.append(name)
        open_names = dict(list(open_names.items())[list(open_names).index(name) + 1 :])
    return "per " + ", ".join(words)


def loop_sizes(trainer: Trainer) -> dict[str, int]:
    """The loops of a trainer's step by name, outermost first."""
    from perex_t5x import models

    config = trainer.model.config
    sizes = {"microbatch": trainer.options.num_microbatches}
    if not config.scan_layers:
        return sizes
    if isinstance(trainer.model, models.EncoderDecoderModel) and config.num_encoder_layers != config.num_decoder_layers:
        return sizes | {"encoder layer": config.num_encoder_layers, "decoder layer": config.num_decoder_layers}
    return sizes | {"layer": config.num_decoder_layers}


def format_bytes(size: int) -> str:
    """In units of 1000.

    >>> format_bytes(512), format_bytes(12_345), format_bytes(6_291_456)
    ('512 B', '12.3 kB', '6.29 MB')
    """
    if size < 1000:
        return f"{size} B"
    value, units = float(size), iter(("kB", "MB", "GB", "TB"))
    unit = ""
    while value >= 1000:
        value, unit = value / 1000, next(units)
    return f"{value:.3g} {unit}"


def _range(values: Sequence[int], write: Callable[[int], str]) -> str:
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def as_text(table: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """The table below its header, in columns or as Markdown."""
    if markdown:
        lines = [HEADER, ["---"] * len(HEADER), *table]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[i]) for line in (HEADER, *table)) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (HEADER, *table)
    )
