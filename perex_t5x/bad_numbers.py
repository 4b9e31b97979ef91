"""Losses and updates that are not finite, and losses that jump: what counts as one, and what a run then does.

train_script.train.bad_numbers = @bad_numbers.BadNumbers()
bad_numbers.BadNumbers:
  most_skipped = 3         # an update that is not finite is left out; the fourth in a row is too many
  loss_spike = 3.0         # a loss of more than three times the median of the last 100 steps is, too
  then = 'roll_back'       # to the newest checkpoint, leaving out the batches of these steps
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from absl import logging

from perex_t5x import arguments
from perex_t5x.arguments import Count, Interval, PositiveInt
from perex_t5x.data.feed import Feed


@dataclass(frozen=True)
class BadNumbers:
    """What a run does about bad numbers. By default the first loss that is not finite stops it.

    Attributes:
      most_skipped: an update is left out where it or the loss is not finite: parameters and optimizer state stay as they
        are, and the step counts. So many in a row are; one more is too many. 0: none is left out.
      loss_spike: a loss is too large beyond this multiple of the median loss of the `window` steps before it; None: none is.
      window: steps that are looked back at; before there are so many there are no spikes.
      then: what is done about too many or too large: 'stop', with exit code 5; or 'roll_back' to the newest checkpoint and
        train on without the batches of the steps to blame: those whose updates were left out, or the one whose loss it was
        and the one before it.
      rollbacks: at most so many, of one process; then it stops.
    """

    most_skipped: Count = 0
    loss_spike: Annotated[float, Interval("(1, ∞)")] | None = None
    window: PositiveInt = 100
    then: Literal["stop", "roll_back"] = "stop"
    rollbacks: PositiveInt = 3

    def __post_init__(self) -> None:
        arguments.check_fields(self)


@dataclass(frozen=True)
class Finding:
    """Why a run cannot simply continue: in a few words, and the first step that is to blame.

    A loss shows what the update before it has done, so that step is to blame, too.
    """

    words: str
    first_step: int


class Watch:
    """Looks at the loss of each step, in order.

    Args:
      rules: what is too much.
      kept: `to_keep()` of the watch that this one continues; None: none.

    >>> watch = Watch(BadNumbers(most_skipped=1, loss_spike=2.0, window=3))
    >>> [watch.look(step, loss, False) for step, loss in enumerate([1.0, 1.2, 0.9], 1)]
    [None, None, None]
    >>> watch.look(4, math.nan, True), watch.look(5, math.nan, True)
    (None, Finding(words='2 updates in a row are not finite', first_step=4))
    >>> watch.look(6, 2.1, False).words
    'the loss 2.1 is more than 2 times the median 1 of the last 3 steps'
    """

    def __init__(self, rules: BadNumbers, kept: Mapping[str, Any] | None = None):
        kept = kept or {}
        self._rules = rules
        self._losses = collections.deque(kept.get("losses", ()), maxlen=rules.window if rules.loss_spike else 0)
        self._in_a_row = int(kept.get("in_a_row", 0))

    def to_keep(self) -> dict[str, Any]:
        """What a checkpoint has to remember, as JSON."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row}

    def look(self, step: int, loss: float, skipped: bool) -> Finding | None:
        """What is wrong after this step; None if nothing is. `skipped`: whether the update was left out."""
        rules = self._rules
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if skipped:
            words = f"{self._in_a_row} updates in a row are not finite"
            return Finding(words, step - self._in_a_row + 1) if self._in_a_row > rules.most_skipped else None
        if not math.isfinite(loss):
            return Finding(f"the loss is {loss}", max(1, step - 1))
        if rules.loss_spike and len(self._losses) == rules.window:
            median = statistics.median(self._losses)
            if loss > rules.loss_spike * median > 0:
                return Finding(
                    f"the loss {loss:.4g} is more than {rules.loss_spike:g} times the median {median:.4g} of the last "
                    f"{rules.window} steps",
                    max(1, step - 1),
                )
        self._losses.append(loss)
        return None


class SkippingFeed(Feed):
    """A feed without some of its batches: the batch of a step is the inner feed's, counted without those left out.

    Args:
      feed: the inner one.
      skipped: numbers of its batches that are left out.
      start: the number of the batch that the inner feed gives next.
    """

    def __init__(self, feed: Feed, skipped: Sequence[int], start: int):
        self._feed, self.skipped = feed, sorted(set(skipped))
        self.element_spec, self.num_examples = feed.element_spec, feed.num_examples
        self.num_steps, self.fingerprint, self.has_state = feed.num_steps, feed.fingerprint, feed.has_state
        self.description = f"{feed.description}; without {len(self.skipped)} batches that led to bad numbers"
        self._next = start

    def number(self, step: int) -> int:
        """The inner feed's number of the batch of a step."""
        number = step
        for left_out in self.skipped:  # ascending
            if left_out <= number:
                number += 1
        return number

    def batch(self, step: int, sharding: Any = None) -> dict[str, Any]:
        number = self.number(step)
        for left_out in range(self._next, number) if self.has_state else ():  # a stream gives all of them, in sequence
            self._feed.batch(left_out, sharding)
        self._next = number + 1
        return self._feed.batch(number, sharding)

    def _position(self, step: int) -> dict[str, Any]:
        return {}  # it is the inner feed's

    def position(self, step: int) -> dict[str, Any]:
        return {**self._feed.position(self.number(step)), "skipped": self.skipped}

    def save_state(self, directory: str, step: int | None = None) -> None:
        self._feed.save_state(directory, None if step is None else self.number(step))

    def restore(self, directory: str) -> None:
        self._feed.restore(directory)


def to_leave_out(feed: Feed, first_step: int, last_step: int, resumed_step: int) -> list[int]:
    """Numbers of the batches of these steps, as far as they come after the checkpoint, and of those that `feed` leaves out
    already: the checkpoint may not know of them yet."""
    number = feed.number if isinstance(feed, SkippingFeed) else int
    known = feed.skipped if isinstance(feed, SkippingFeed) else []
    # Batches are numbered from 0, steps from 1.
    to_blame = [number(step - 1) for step in range(max(first_step, resumed_step + 1), last_step + 1)]
    logging.warning("The batches %s of the data are left out from here on.", to_blame)
    return sorted({*to_blame, *known})
