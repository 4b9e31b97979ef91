"""A command that ends as it is told, through the harness of all commands; with others, where the flags name them."""

import errno
import os
import signal
import sys
import threading
import time

from perex_t5x import cli
from perex_t5x.cli import status
from perex_t5x.cli.flags import define_training_flags
from perex_t5x.errors import ConfigError, DivergedError, TrainingError


class Late:
    def __del__(self):
        time.sleep(600)


def main(args, words):
    how = words[0]
    if args.process_count:
        return among_others(args, how)
    if how == "returns":
        return int(words[1])
    if how == "interrupted":
        status.at_step(7)
        print("ready", flush=True)
        time.sleep(60)
    if how == "swallowed":  # as native code that calls back does, or a library that is being imported
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            if words[1] == "error":
                raise ImportError("initialising the extension") from None
        from perex_t5x.interrupts import Interrupts

        with Interrupts():
            print("training", flush=True)
            time.sleep(60)
    if how == "stuck":  # as a library that writes to a storage that is gone
        cli.GRACE = 0.2
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise TrainingError("it cannot continue") if words[1] == "expected" else RuntimeError("a bug")
    if how == "torn_down":  # as a library's object that writes once more when it is destroyed
        sys.modules["late"] = Late()
        raise TrainingError("it cannot continue")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "done":
        raise {
            "configuration": ConfigError("BATCH_SIZE = 3: no"),
            "diverged": DivergedError("the loss of step 3 is nan: stopped", 3, "the loss is nan"),
            "no_space": OSError(errno.ENOSPC, "No space left on device"),
            "failed": TrainingError("it cannot continue"),
            "error": RuntimeError("a bug"),
        }[how]
    return None


def among_others(args, how):
    """Meets the others; then `INDEX dies` or `INDEX fails` ends one of them in the middle of a step."""
    from perex_t5x import distributed

    info = distributed.connect(
        args.coordinator_address,
        args.process_count,
        args.process_index,
        cluster_detection="off",
        initialization_timeout=args.initialization_timeout,
        heartbeat_timeout=args.heartbeat_timeout,
    )
    index, _, what = how.partition(" ")
    if info.index == int(index):
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConfigError("TRAIN_STEPS = 0: no")
    for step in range(1, 10_000):
        distributed.doing(f"making step {step}")
        status.at_step(step)
        time.sleep(0.05)


if __name__ == "__main__":
    cli.run(main, __doc__, flags=define_training_flags, positional=True)
