"""Named as MIXTURE_OR_TASK_MODULE: the tiny task, and what TROUBLE says goes wrong, such as `hang in 1 at 4`.

With TROUBLE_ATTEMPT only in attempts of `launch/local` whose name ends so. The trouble comes when that process makes the
batch of that step, in the thread that makes batches: its main thread waits.
"""

import os
import signal
import threading

import jax

import tests.tiny_tasks  # noqa: F401
from perex_t5x.data import cached

kind, _, where, _, step = os.environ.get("TROUBLE", "none in 0 at 0").split()

_batch = cached.CachedFeed.batch


def _troubled_batch(self, number, sharding=None):
    if self.num_steps is None and jax.process_index() == int(where) and number == int(step):
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "suspend":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "hang":
            threading.Event().wait()
        if kind == "error":
            raise OSError("the disk of the data is gone")
    return _batch(self, number, sharding)


if kind != "none" and os.environ.get("PEREX_T5X_ATTEMPT", "").endswith(os.environ.get("TROUBLE_ATTEMPT", "")):
    cached.CachedFeed.batch = _troubled_batch
