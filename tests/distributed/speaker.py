"""A process for the launcher's tests: says who it is and what it was given, then does as it is told; without JAX."""

import os
import signal
import sys
import time


def on_signal(number, frame):
    print("asked to stop by", signal.Signals(number).name, flush=True)
    sys.exit(130)


def main(arguments):
    index = os.environ["JAX_PROCESS_ID"]
    print("arguments", *arguments)
    print("devices", os.environ["XLA_FLAGS"].split("=")[-1], os.environ["JAX_NUM_PROCESSES"], file=sys.stderr)
    if index == "0":
        print("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1")
        print("step 1/2  loss 3.1  ETA 0:01", end="\r" if os.environ.get("PEREX_T5X_PROGRESS_OVERWRITE") else "\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in arguments else on_signal)
    signal.signal(signal.SIGINT, on_signal)
    print("ready", os.getpid(), flush=True)
    for argument in arguments:
        if argument.startswith("codes:"):  # a file with the exit codes of the attempts to come
            with open(argument.removeprefix("codes:"), "r+", encoding="utf-8") as f:
                code, *rest = f.read().split()
                f.seek(0)
                f.truncate()
                f.write(" ".join(rest))
            if int(code) < 0:
                os.kill(os.getpid(), -int(code))
            sys.exit(int(code))
    if f"fail{index}" in arguments:
        sys.exit(7)
    while "wait" in arguments:
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
