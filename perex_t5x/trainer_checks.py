"""What can be known to be wrong with a trainer before its step is compiled, and how to say it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.monitoring import Monitor
from perex_t5x.partitioning import nearest_divisor
from perex_t5x.per_example import GradStatistics, Statistic
from perex_t5x.per_example.statistic import BUILT_IN

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer, TrainState

NON_FINITE = ("keep", "skip")
TRANSPORT_DTYPES = (None, "bfloat16", "float16")


def check_arguments(trainer: Trainer) -> None:
    """Raises for an argument that is wrong by itself."""
    if trainer.num_microbatches < 1:
        raise ConfigError(f"Trainer.num_microbatches = {trainer.num_microbatches}: must be None or at least 1.")
    size = trainer.microbatch_size
    if size not in (None, "auto") and not _is_positive_int(size):
        raise ConfigError(f"Trainer.microbatch_size = {size!r}: must be None, 'auto' or at least 1.")
    if trainer.transport_dtype not in TRANSPORT_DTYPES:
        raise ConfigError(
            f"Trainer.transport_dtype = {trainer.transport_dtype!r}: must be None or one of "
            f"{', '.join(repr(d) for d in TRANSPORT_DTYPES if d)}."
        )
    if not _is_positive_int(trainer.group_size):
        raise ConfigError(f"Trainer.group_size = {trainer.group_size!r}: must be at least 1.")
    clip = trainer.clip_norm
    if clip is not None and (not isinstance(clip, int | float) or not clip > 0):
        raise ConfigError(f"Trainer.clip_norm = {clip!r}: must be None or a positive norm.")
    if trainer.non_finite not in NON_FINITE:
        raise ConfigError(
            f"Trainer.non_finite = {trainer.non_finite!r}: must be one of {', '.join(map(repr, NON_FINITE))}."
            f"{did_you_mean(str(trainer.non_finite), NON_FINITE)}"
        )
    if trainer.monitor is not None and not isinstance(trainer.monitor, Monitor):
        raise ConfigError(
            f"Trainer.monitor = {trainer.monitor!r}: give @monitoring.Monitor(), with parentheses, or None."
        )


def as_statistics(statistics: Any) -> dict[str, Statistic]:
    """Name -> object, from the `statistics` given to a trainer."""
    found: dict[str, Statistic] = {}
    for s in statistics if isinstance(statistics, list | tuple) else (statistics,):
        if not isinstance(s, Statistic):
            raise ConfigError(
                f"Trainer.statistics has {s!r}: give a list of per_example.Statistic objects, in Gin "
                "[@my_module.my_statistic()] with a function of yours that makes one."
            )
        if s.name in BUILT_IN or s.name in found:
            raise ConfigError(f"Trainer.statistics: the name {s.name!r} is taken; give yours another.")
        found[s.name] = s
    return found


def check_batch_size(trainer: Trainer, batch_size: int, binding: str) -> None:
    """Raises unless the global batch splits evenly over microbatches, data shards and groups."""
    count = trainer.num_microbatches
    if batch_size % count:
        raise ConfigError(f"{binding} = {batch_size} is not divisible by Trainer.num_microbatches = {count}.")
    shards = trainer.partitioner.data_parallel_size
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
    size, group = trainer.microbatch_size, trainer.group_size
    mine = micro // shards
    where = f"the {mine} examples{per}" + (f" on each of {shards} data shards" if shards > 1 else "")
    if mine % group:
        raise ConfigError(
            f"Trainer.group_size = {group} does not divide {where} of {binding} = {batch_size}. "
            f"Nearest that does: {nearest_divisor(mine, group)}."
        )
    if isinstance(size, int) and mine % size:
        raise ConfigError(
            f"Trainer.microbatch_size = {size} does not divide {where} of {binding} = {batch_size}. "
            f"Nearest that does: {nearest_divisor(mine, size)}; 'auto' chooses by itself."
        )
    if isinstance(size, int) and size % group:
        raise ConfigError(
            f"Trainer.group_size = {group} does not divide Trainer.microbatch_size = {size}: groups are computed whole."
        )


def check_statistics(trainer: Trainer, shapes: TrainState, batch_size: int) -> None:
    """Raises for an optimizer that needs what is not there, or several examples where there is one."""
    known = {**BUILT_IN, **trainer.statistics}
    for name in trainer.needs(shapes.params):
        if name not in known:
            raise ConfigError(
                f"the optimizer needs the statistic {name!r}, which is not known.{did_you_mean(name, known)} Known are "
                f"{', '.join(known)}; give others with Trainer.statistics = [@my_module.my_statistic()], a function that "
                f"returns per_example.Statistic({name!r}, ...)."
            )
    if batch_size // trainer.group_size > 1:
        return
    where = f"BATCH_SIZE = {batch_size}"
    if trainer.group_size > 1:
        where += f" with Trainer.group_size = {trainer.group_size}"
    if trainer.monitor is not None:
        raise ConfigError(
            f"Trainer.monitor measures the noise between examples, and {where} has none. Raise BATCH_SIZE, or set "
            "Trainer.monitor = None."
        )
    try:
        jax.eval_shape(lambda: _update_with_one_group(trainer, shapes))
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from e


def _update_with_one_group(trainer: Trainer, shapes: TrainState) -> Any:
    """An update whose number of groups is known while it is traced."""
    params, opt_state = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), (shapes.params, shapes.opt_state))
    one = np.float32(1.0)
    averages = {name: params for name in trainer.needs(params)}
    statistics = GradStatistics(averages, one, np.int32(1), one, one, trainer.group_size)
    return trainer.optimizer.update(params, opt_state, params, one, statistics=statistics)


def _is_positive_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1
