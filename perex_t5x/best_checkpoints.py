"""T5X's way to say that the best checkpoints are kept, in terms of `utils.SaveCheckpointConfig`.

utils.SaveCheckpointConfig:
  keep = 2
  checkpointer_cls = @checkpoints.SaveBestCheckpointer
checkpoints.SaveBestCheckpointer.metric_name_to_monitor = 'inference_eval/my_task/accuracy'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from perex_t5x import arguments
from perex_t5x.arguments import PositiveInt


@dataclass
class SaveBestCheckpointer:
    """Keeps the newest checkpoint, and `SaveCheckpointConfig.keep` of the best.

    Attributes:
      metric_name_to_monitor: '<folder>/<metric>', such as 'train/accuracy' or 'training_eval/my_task/loss'. What is
        'inference_eval/TASK/eval/accuracy' in T5X is 'inference_eval/TASK/accuracy' here; both are understood.
      metric_mode: whether large values are good ('max') or small ones.
      keep_checkpoints_without_metrics: whether those that were not evaluated are kept, too.
      force_keep_period: checkpoints of steps that this number divides are kept, too.
      keep_dataset_checkpoints: of T5X; every checkpoint has its data position.

    >>> SaveBestCheckpointer("training_eval/task/loss", "min").settings(2)["keep_best"]
    2
    """

    metric_name_to_monitor: str | None = "train/accuracy"
    metric_mode: Literal["min", "max"] = "max"
    keep_checkpoints_without_metrics: bool = True
    force_keep_period: PositiveInt | None = None
    keep_dataset_checkpoints: PositiveInt | None = None

    def __post_init__(self) -> None:
        arguments.check_fields(self)

    def settings(self, keep: int | None) -> dict[str, Any]:
        """Of a `SaveCheckpointConfig`, where T5X's `keep` is the number of the best; None keeps all."""
        if keep is None or self.metric_name_to_monitor is None:
            return {"keep_every": self.force_keep_period} if keep is not None else {}
        return {
            "keep": 1,
            "keep_best": keep,
            "keep_best_metric": self.metric_name_to_monitor.replace("/eval/", "/"),
            "keep_best_mode": self.metric_mode,
            "keep_unmeasured": self.keep_checkpoints_without_metrics,
            "keep_every": self.force_keep_period,
        }


@dataclass
class OrbaxCheckpointManagerInterface(SaveBestCheckpointer):
    """The same as a `checkpoint_manager_cls`, where without a metric the newest are kept."""

    metric_name_to_monitor: str | None = None
