"""How commands start and end: flags, errors as messages alone, exit codes, status.json.

    run(main, __doc__, flags=define_flags)      a command whose main(args) returns an exit code
    run_gin("perex_t5x.train.train", __doc__)   a command that is a Gin-configured function

This module imports nothing but Python's own library, so that a missing extra is said in one line rather than as a stack
trace, and so that --help is there at once: what a command needs is named as 'module.function' and imported after the flags
are read.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import inspect
import io
import logging
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from perex_t5x import buckets, extras
from perex_t5x.cli import flags as flags_lib
from perex_t5x.cli import status, subprocesses
from perex_t5x.errors import ConfigError, Reason, is_full_disk

GRACE = 30.0  # seconds that a process which has failed may take to end, after all is said and stored


def run(
    main: Callable[..., int | None] | str,
    usage: str | None = None,
    argv: Sequence[str] | None = None,
    *,
    flags: Callable[[], None] | str | None = None,
    extra: str = "train",
    positional: bool = False,
    messages: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Runs `main(args)` as a command and ends with the exit code it returns (None: 0).

    Exit codes are those of `errors.Reason`: 0 done; 2 a configuration error; 130 interrupted; others for each way in which
    a run may fail. A user's error is printed as its message alone, with the exception's notes as the last lines.

    Args:
      main: takes the parsed flags; or its name, 'module.function', imported after the flags are read.
      usage: what --help prints before the flags; None: the docstring of main's module.
      argv: with the program's name first; None: the process's.
      flags: defines the command's flags; or its name.
      extra: the extra (`perex_t5x.extras`) without which nothing is imported.
      positional: whether there are arguments that are not flags; they are then main's second argument, a list.
      messages: further exceptions that are printed as their messages alone.
    """
    given = list(sys.argv if argv is None else argv)
    if argv is None:
        atexit.register(_end_if_failed)  # before libraries register theirs, so after those

    def start() -> int:
        extras.require(extra, _command_name())
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        buckets.set_library_options()
        from absl import app
        from absl import flags as absl_flags

        from perex_t5x.cli import console

        is_parsed = False

        def call(words: Sequence[str]) -> int:
            nonlocal is_parsed
            is_parsed = True
            args = absl_flags.FLAGS
            if isinstance(sys.stdout, io.TextIOWrapper):  # logs hold any bytes, and a terminal may know ASCII alone
                sys.stdout.reconfigure(errors="backslashreplace")
            console.set_up(everything=args.alsologtostderr)
            if words[1:] and not positional:
                raise ConfigError(f"{words[1]!r} is not a flag. Flags are written --name=value.")
            return imported(main)(args, list(words[1:])) if positional else imported(main)(args)

        with flags_lib.defined(None if flags is None else imported(flags), usage or _doc(main)):
            try:
                app.run(call, argv=flags_lib.rewrite(given), flags_parser=flags_lib.parse)
            except SystemExit:
                if is_parsed:
                    raise
        return 0  # absl would end with 1 after --help

    try:
        code = guarded(start, messages)
    except SystemExit as e:
        code = 0 if e.code is None else e.code
    except Exception:
        _end_within(GRACE, Reason.ERROR.exit_code)
        raise
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # at the very end Python would complain, in lines of its own
        output_is_read()
    if code:
        _end_within(GRACE, code if isinstance(code, int) else Reason.ERROR.exit_code)
    sys.exit(code)


_failed_with: int | None = None


def _end_if_failed() -> None:
    """Ends a process that has failed without taking the interpreter apart: libraries whose objects are destroyed then try
    once more to write to a storage that is gone, for many minutes, where nothing of Python's runs any more."""
    if _failed_with is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(_failed_with)


def forget_failure() -> None:
    """For whoever has caught the SystemExit of `run` and goes on: the process does not end with that command's exit code."""
    global _failed_with
    _failed_with = None


def _end_within(seconds: float, code: int) -> None:
    """Ends the process so long after its main thread, if it has not ended by itself: Python waits for the threads of its
    libraries, and those that write to a storage that is gone try for a quarter of an hour. Whoever catches the SystemExit
    and goes on calls `forget_failure`."""
    global _failed_with
    _failed_with = code

    def end() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        if _failed_with is not None:
            os._exit(code)

    threading.Thread(target=end, daemon=True).start()


def run_gin(function: Callable[..., Any] | str, usage: str | None, argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `function`, its arguments bound by Gin, as a command.

    A function given as 'module.function' is imported only once the other processes are found: an import may use a device.
    Of several processes all end with the exit code of the first that fails.
    """

    def main(args: Any) -> None:
        from perex_t5x.cli import gin_command

        gin_command.call(lambda: imported(function, in_main=True), args)

    run(main, usage, argv, flags=flags_lib.define_training_flags)


def guarded(function: Callable[[], int | None], messages: tuple[type[Exception], ...] = ()) -> int:
    """The exit code of `function()`. Its errors are printed as messages alone; what is unexpected is raised.

    Either way status.json says how it ended, and after a signal which it was. SIGTERM and SIGHUP interrupt like Ctrl-C.
    """
    status.begin()
    with contextlib.suppress(
        OSError, ValueError, AttributeError, RuntimeError
    ):  # stderr is no file, or not this thread
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # whoever supervises a process that hangs can see where
    with contextlib.ExitStack() as stack:
        stack.callback(status.ended)
        stack.enter_context(_interrupted_by_signals())
        try:
            code = function() or 0
        except SystemExit as e:  # of absl: --help, or the code that the command returned
            if e.code in (0, None):
                status.write(Reason.DONE)
            elif isinstance(e.code, int):
                status.write(Reason.of_exit_code(e.code))
            raise
        except KeyboardInterrupt as e:
            _stop_together()
            return _failed(e, Reason.INTERRUPTED)
        except Exception as e:
            if isinstance(e, BrokenPipeError) and not output_is_read():  # `| head` has what it wants
                status.write(Reason.INTERRUPTED, said := "nobody reads the output any more")
                _end_all_processes(said, Reason.INTERRUPTED, e, said)
                return Reason.INTERRUPTED.exit_code
            if signal_name := status.interruption():  # what a library has made of it
                return _failed(KeyboardInterrupt(f"stopped by {signal_name}"), Reason.INTERRUPTED)
            if is_full_disk(e):
                return _failed(e, Reason.NO_SPACE)
            reason = getattr(e, "reason", None)
            if isinstance(reason, Reason) or isinstance(e, messages):
                return _failed(e, reason if isinstance(reason, Reason) else Reason.ERROR)
            message = f"{type(e).__name__}: {cleaned(str(e))}"
            status.write(Reason.ERROR, message)
            _end_all_processes(message, Reason.ERROR, e, traceback.format_exc())
            raise
        status.write(Reason.of_exit_code(code))
        return code


def output_is_read() -> bool:
    """Whether someone reads standard output; if not, it is pointed nowhere, so that the process's end does not complain."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # no file: a notebook's
        return True
    poll = select.poll()
    poll.register(number, 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return False
    return True


def cleaned(message: str) -> str:
    """Gin adds a line for every configurable that was being made; the messages name their bindings themselves."""
    return re.sub(r"\n\s*In call to configurable .*", "", message)


def imported(function: Callable[..., Any] | str, in_main: bool = False) -> Callable[..., Any]:
    """A function by its name; `in_main` also, with its module's other functions, where Gin files that say
    `import __main__ as train_script` look for them."""
    if not isinstance(function, str):
        return function
    name, _, attribute = function.rpartition(".")
    module = importlib.import_module(name)
    if in_main:
        own = {k: v for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == name and k[0] != "_"}
        vars(sys.modules["__main__"]).update(own)
    return getattr(module, attribute)


def _doc(function: Callable[..., Any] | str) -> str | None:
    return sys.modules[imported(function).__module__].__doc__


def _command_name() -> str:
    """As a user calls it: perex_t5x.train, launch/gke.py."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return "/".join(sys.argv[0].split(os.sep)[-2:])
    return spec.name.removesuffix(".__main__")


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, once: a second one ends the process as it would without us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        status.interrupted_by(signal.Signals(number).name)
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    # What is ignored stays ignored: that is how nohup works.
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [n for n in wanted if signal.getsignal(n) is not signal.SIG_IGN]
    with subprocesses.forwarding(interrupt, numbers):
        yield


def _failed(error: BaseException, reason: Reason) -> int:
    """Prints an error as its message and notes; the exit code."""
    message = cleaned(str(error))
    if reason is Reason.INTERRUPTED:
        shown = f"\n{message or 'interrupted'}"
    else:
        start = "" if isinstance(error, extras.MissingExtraError) else "\n"  # below a progress bar
        shown = f"{start}ERROR: {message}"
    status.write(reason, message, finding=getattr(error, "finding", ""), step=getattr(error, "step", None))
    _end_all_processes(message, reason, error, shown)
    print("\n".join([shown, *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)
    return reason.exit_code


def _end_all_processes(message: str, reason: Reason, error: BaseException, shown: str) -> None:
    """Ends this process and the others, if there are any. Looked up: most errors are found before JAX is imported."""
    if distributed := sys.modules.get("perex_t5x.distributed"):
        distributed.fail(message, reason, error=error, shown=shown)


def _stop_together() -> None:
    """Where all processes have stopped at the same step, one of them says so."""
    distributed = sys.modules.get("perex_t5x.distributed")
    if distributed and distributed.stop_together() and not distributed.is_writer():
        status.write(Reason.INTERRUPTED)
        sys.exit(Reason.INTERRUPTED.exit_code)
