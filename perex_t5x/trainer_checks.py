"""Argument validation of `perex_t5x.trainer.Trainer`: what excludes each other, and what does not divide."""

from __future__ import annotations

from collections.abc import Sequence

from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.gradients import GradientOptions
from perex_t5x.optimizers import Privacy
from perex_t5x.partitioning import nearest_divisor
from perex_t5x.per_example import Statistic
from perex_t5x.per_example.statistic import BUILT_IN


def check_options(options: GradientOptions) -> None:
    """Raises for options that exclude each other."""
    if options.unit == "token":
        for name, value, needed in (("group_size", options.group_size, 1), ("clip_norm", options.clip_norm, None)):
            if value != needed:
                raise ConfigError(
                    f"Trainer.unit = 'token' with Trainer.{name} = {value!r}: examples' gradients are not formed, so they "
                    f"cannot be {'grouped' if name == 'group_size' else 'clipped'}. Set Trainer.{name} = {needed}, or "
                    "Trainer.unit = 'example'."
                )


def check_batch_size(options: GradientOptions, shards: int, batch_size: int, binding: str) -> None:
    """Raises unless the global batch splits evenly over microbatches, data shards and groups."""
    count = options.num_microbatches
    if batch_size % count:
        raise ConfigError(f"{binding} = {batch_size} is not divisible by Trainer.num_microbatches = {count}.")
    micro = batch_size // count
    per = f" in each of {count} microbatches" if count > 1 else ""
    if micro % shards:
        step = shards * count
        lower, upper = batch_size // step * step, -(-batch_size // step) * step
        nearest = f"{upper}" if lower == 0 else f"{lower} or {upper}"
        raise ConfigError(
            f"{binding} = {batch_size} (the global batch) gives {micro} examples{per}, not divisible by the "
            f"{shards} data shards of the mesh. Nearest that is: {nearest}."
        )
    size, group = options.microbatch_size, options.group_size
    on_device = micro // shards
    where = f"the {on_device} examples{per}" + (f" on each of {shards} data shards" if shards > 1 else "")
    for name, part, hint in (("group_size", group, ""), ("microbatch_size", size, "; 'auto' chooses by itself")):
        if isinstance(part, int) and on_device % part:
            raise ConfigError(
                f"Trainer.{name} = {part} does not divide {where} of {binding} = {batch_size}. "
                f"Nearest that does: {nearest_divisor(on_device, part)}{hint}."
            )
    if isinstance(size, int) and size % group:
        raise ConfigError(
            f"Trainer.group_size = {group} does not divide Trainer.microbatch_size = {size}: a group is computed in one "
            "microbatch."
        )


def check_needs(needs: Sequence[str | Statistic], unit: str) -> None:
    """Raises for a statistic that is not known, or that cannot be taken over tokens."""
    for name in needs:
        if isinstance(name, str) and name not in BUILT_IN:
            raise ConfigError(
                f"the optimizer needs the statistic {name!r}, which is not known.{did_you_mean(name, BUILT_IN)} Known are "
                f"{', '.join(BUILT_IN)}; declare another one as an object among the optimizer's needs: "
                f"per_example.Statistic({name!r}, ...)."
            )
        statistic = BUILT_IN[name] if isinstance(name, str) else name
        if unit == "token" and not statistic.factorable:
            raise ConfigError(
                f"Trainer.unit = 'token' needs factorable statistics, φ(ab) = φ(a)φ(b), and the optimizer's "
                f"{statistic.name!r} is not declared as one. Use Trainer.unit = 'example', or declare it with "
                "per_example.Statistic(..., factorable=True) if it is."
            )


def check_privacy(privacy: Privacy, options: GradientOptions, batch_size: int) -> None:
    """Raises where the step would not be what a private optimizer promises."""
    clip_norm = privacy.clip_norm
    for name, value, needed, why in (
        ("clip_norm", options.clip_norm, (None, clip_norm), f"the optimizer clips at its own, {clip_norm:g}"),
        ("group_size", options.group_size, (1,), "it is single examples that are clipped"),
        ("unit", options.unit, ("example",), "it is examples that are clipped"),
        ("transport_dtype", options.transport_dtype, (None,), "rounded sums are not bounded by the clipping"),
    ):
        if value not in needed:
            raise ConfigError(
                f"Trainer.{name} = {value!r} with a differentially private optimizer (optimizers.dp): {why}. "
                f"Set Trainer.{name} = {needed[0]!r}."
            )
    if privacy.batch_size != batch_size:
        raise ConfigError(
            f"optimizers.dp.batch_size = {privacy.batch_size}, and a batch has {batch_size} examples. Set "
            "optimizers.dp.batch_size = %BATCH_SIZE."
        )
