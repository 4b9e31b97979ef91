"""All processes meet over plain TCP before JAX connects them: whoever is missing, double or of another count is named.

Process 0 listens at the coordinator's address, the others say who they are and which attempt they belong to, and it answers
all of them at once: come in, or what is wrong. JAX's own service then takes the same port. (JAX alone ends a process with a
C++ stack trace in these cases.)

Whatever a former attempt may have left behind is waited for until the deadline: a process 0 that still listens, or holds the
port, one that does not answer any more, processes that come too late. What then remains is a reason to start again, not an
error of the configuration. Attempts are told apart by what launchers set in the environment (`process_info`); only where it
says that two processes belong to the same attempt is a wrong index or count certain to be the configuration's.

Where the environment variable PEREX_T5X_SECRET is set, every message proves that its sender knows it (HMAC-SHA256), and
whoever does not is sent away. JAX's own service, afterwards, asks nobody for anything: docs/security.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

from absl import logging

from perex_t5x.distributed.process_info import ProcessInfo
from perex_t5x.errors import ConfigError, PeerLostError, Reason, UnreachableError

SECRET = "PEREX_T5X_SECRET"
_GREETING = "perex_t5x rendezvous 1"
_LONGEST = 1 << 20
_RETRY_SECONDS = 0.2
_ACKNOWLEDGE_SECONDS = 10.0  # in which a process 0 that is alive says that it has heard


def meet(info: ProcessInfo, timeout: float) -> list[str]:
    """Waits for all processes; returns their hosts by index.

    Raises:
      ConfigError: processes of one attempt were started with indices or counts that do not fit; the same message in all.
      UnreachableError: some did not come, or lost their way, in time; another attempt may succeed.
      PeerLostError: process 0 ended after all had met.
    """
    return _receive(info, timeout) if info.index == 0 else _call(info, timeout)


# --- process 0 --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Caller:
    connection: socket.socket
    text: bytes = b""
    hello: dict[str, Any] | None = None


def _receive(info: ProcessInfo, timeout: float) -> list[str]:
    deadline = time.monotonic() + timeout
    callers: dict[int, _Caller] = {}  # by file descriptor
    refused: dict[str, str] = {}  # by name: why it was sent away
    own = _hello(info)
    with _listen(info, deadline, timeout) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def drop(caller: _Caller) -> None:
            selector.unregister(caller.connection)
            del callers[caller.connection.fileno()]
            caller.connection.close()

        try:
            while True:
                known = {0: own} | {c.hello["index"]: c.hello for c in callers.values() if c.hello}
                if len(known) == info.count:
                    hosts = [known[i]["host"] for i in range(info.count)]
                    _answer(callers.values(), {"hosts": hosts})
                    return hosts
                left = deadline - time.monotonic()
                if left <= 0:
                    raise UnreachableError(_missing(info, known, refused, timeout))
                for key, _ in selector.select(min(left, 1.0)):
                    if key.fileobj is listener:
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        callers[connection.fileno()] = _Caller(connection)
                        selector.register(connection, selectors.EVENT_READ)
                        continue
                    if (caller := callers.get(key.fd)) is None:  # its place was taken a moment ago
                        continue
                    was_known = caller.hello is not None
                    if not _read(caller):  # it left again, or is not one of ours
                        drop(caller)
                    elif caller.hello is not None and not was_known:
                        if (why := _unfit(own, caller.hello)) is not None:
                            if _name(caller.hello) not in refused:
                                logging.warning("%s", why)
                            refused[_name(caller.hello)] = why
                            _answer([caller], {"refused": why})
                            drop(caller)
                            continue
                        for other in [c for c in callers.values() if c is not caller]:
                            if other.hello and other.hello["index"] == caller.hello["index"]:
                                _check_replaced(own, other.hello, caller.hello)
                                drop(other)
                        _answer([caller], {"waiting": True})
        except (ConfigError, UnreachableError) as e:
            _answer(callers.values(), {"error": str(e), "reason": e.reason})
            raise
        finally:
            for caller in callers.values():
                caller.connection.close()


def _listen(info: ProcessInfo, deadline: float, timeout: float) -> socket.socket:
    """Listens at the coordinator's port, as soon as a process of a former attempt has left it."""
    said = False
    while True:
        try:
            return socket.create_server(
                ("", info.port),
                family=socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET,
                dualstack_ipv6=socket.has_dualstack_ipv6(),
                backlog=1024,
            )
        except OSError as e:
            where = (
                f"process 0 cannot listen at port {info.port} of {socket.gethostname()} (coordinator address "
                f"{info.address}): {e.strerror}"
            )
            if e.errno != errno.EADDRINUSE:
                raise ConfigError(f"{where}. Choose another port.") from e
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"{where}, for {timeout:g} s (--initialization_timeout). A process of an earlier attempt has not "
                    "ended, another run uses it, or another process on this host also has --process_index=0: end it, "
                    "choose another port, or give every process its own index."
                ) from e
            if not said:
                logging.warning("%s; waiting for it", where)
                said = True
            time.sleep(_RETRY_SECONDS)


def _read(caller: _Caller) -> bool:
    """Takes in what has come; False if the caller is to be dropped."""
    try:
        piece = caller.connection.recv(65536)
    except BlockingIOError:
        return True
    except OSError:
        return False
    caller.text += piece
    if not piece or len(caller.text) > _LONGEST:
        return False
    if caller.hello is None and b"\n" in caller.text:
        hello = _decoded(caller.text)
        if hello is None or not _is_hello(hello):
            return False
        caller.hello = hello
    return True


def _same_attempt(a: dict[str, Any], b: dict[str, Any]) -> bool | None:
    """Whether two processes belong to one attempt; None where one of them does not know its own."""
    return a["attempt"] == b["attempt"] if a.get("attempt") and b.get("attempt") else None


def _unfit(own: dict[str, Any], hello: dict[str, Any]) -> str | None:
    """Why a caller cannot be one of this run's processes, None if it can; one of another attempt may just be late."""
    if not _is_proven(hello):
        return f"{_name(hello)} has not proven that it knows {SECRET}, which the coordinator, {_name(own)}, has."
    same = _same_attempt(own, hello)
    if same is False:
        return (
            f"{_name(hello)} belongs to attempt {hello['attempt']!r} of a run, and the coordinator, {_name(own)}, to "
            f"attempt {own['attempt']!r}: one of them is left over from another attempt."
        )
    if hello["count"] == own["count"] and hello["index"] != own["index"]:
        return None
    if hello["count"] != own["count"]:
        why = (
            f"the processes disagree on how many they are: {_name(own)} says {own['count']}, {_name(hello)} says "
            f"{hello['count']}. Give all of them the same --process_count (JAX_NUM_PROCESSES)"
        )
    else:
        why = _double(own, hello)
    if same:
        raise ConfigError(f"{why}.")
    return f"{why}, unless one of them is left over from another attempt."


def _check_replaced(own: dict[str, Any], former: dict[str, Any], hello: dict[str, Any]) -> None:
    """Two callers with one index: a mistake within an attempt; else the later one counts."""
    if _same_attempt(former, hello):
        raise ConfigError(f"{_double(former, hello)}.")
    logging.warning("%s; the later one counts", _double(former, hello))


def _double(former: dict[str, Any], hello: dict[str, Any]) -> str:
    return (
        f"two processes have --process_index={hello['index']}: {_name(former)} and {_name(hello)}. Give every process its "
        f"own index (JAX_PROCESS_ID), from 0 to {hello['count'] - 1}"
    )


def _missing(info: ProcessInfo, known: dict[int, dict[str, Any]], refused: dict[str, str], timeout: float) -> str:
    missing = [i for i in range(info.count) if i not in known]
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return (
        f"only {len(known)} of {info.count} processes came within {timeout:g} s (--initialization_timeout); missing: "
        f"process {shown}. Here: {', '.join(_name(known[i]) for i in sorted(known)[:8])}. Were all of them started, with "
        f"--process_count={info.count}, and can they reach {info.address}?"
        + "".join(f" Sent away: {why}" for why in list(refused.values())[:4])
    )


def _answer(callers: Iterable[_Caller], verdict: dict[str, Any]) -> None:
    line = _line({"greeting": _GREETING, **verdict})
    for caller in callers:
        if caller.hello is not None:
            with contextlib.suppress(OSError):  # it has gone; JAX's own connecting will miss it
                caller.connection.settimeout(5.0)
                caller.connection.sendall(line)
                caller.connection.setblocking(False)


# --- the others -------------------------------------------------------------------------------------------------------


class _RefusedError(OSError):
    """What answers is not this run's process 0, or not yet."""


def _call(info: ProcessInfo, timeout: float) -> list[str]:
    deadline = time.monotonic() + timeout
    reason, said = "no attempt was made", ""
    met = False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((info.host, info.port), timeout=min(left, 10.0)) as connection:
                connection.sendall(_line(_hello(info)))
                met = True
                verdict = _verdict(connection, deadline)
        except OSError as e:
            reason = e.strerror or str(e) or type(e).__name__
            if isinstance(e, _RefusedError) and reason != said:
                logging.warning("process %d waits for the coordinator at %s: %s", info.index, info.address, reason)
                said = reason
            time.sleep(min(_RETRY_SECONDS, max(left, 0)))
            continue
        if "error" in verdict:
            kind = UnreachableError if verdict.get("reason") == Reason.UNREACHABLE else ConfigError
            raise kind(verdict["error"])  # what process 0 has raised
        _wait_for_service(info, deadline, timeout)
        return verdict["hosts"]
    lost = "lost the connection" if met else "cannot connect"
    reason = reason if said in ("", reason) else f"{reason} Before that: {said}"
    raise UnreachableError(
        f"process {info.index} {lost} to the coordinator (process 0) at {info.address} within {timeout:g} s "
        f"(--initialization_timeout): {reason}. Is process 0 running, is this its address, is the port open in the "
        "firewall?"
    )


def _verdict(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """What process 0 says in the end. Raises `OSError` if it is not there, or not that of this attempt."""
    lines = connection.makefile("rb")
    connection.settimeout(min(_ACKNOWLEDGE_SECONDS, max(deadline - time.monotonic(), 0.1)))
    other = (
        "something else answers there: another program, or a coordinator of an earlier attempt that has begun without "
        "this process"
    )
    while True:
        try:
            line = lines.readline(_LONGEST)
        except TimeoutError:
            raise _RefusedError(other) from None
        if not line:
            raise ConnectionError("it closed the connection; did process 0 end?")
        verdict = _decoded(line)
        if verdict is None or verdict.get("greeting") != _GREETING:
            raise _RefusedError(other)
        if "refused" in verdict:
            raise _RefusedError(str(verdict["refused"]))
        if not _is_proven(verdict):
            raise _RefusedError(f"the coordinator there has not proven that it knows {SECRET}, which this process has.")
        if not verdict.get("waiting"):
            return verdict
        # Process 0 keeps the time; a little longer, so that its answer is the one that counts.
        connection.settimeout(max(deadline - time.monotonic(), 0) + 10.0)


def _wait_for_service(info: ProcessInfo, deadline: float, timeout: float) -> None:
    """Until JAX's service has taken the port: its client, refused at first, would pause for a second."""
    while True:
        try:
            socket.create_connection((info.host, info.port), timeout=1.0).close()
            return
        except OSError as e:
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"all {info.count} processes met, but the coordinator (process 0) at {info.address} was gone before "
                    f"JAX could connect them, within {timeout:g} s (--initialization_timeout): {e.strerror or e}."
                ) from e
            time.sleep(0.02)


def _hello(info: ProcessInfo) -> dict[str, Any]:
    who = {"index": info.index, "count": info.count, "host": socket.gethostname(), "pid": os.getpid()}
    return {"greeting": _GREETING, **who, "attempt": info.attempt}


def _is_hello(value: dict[str, Any]) -> bool:
    """Whether a message is one of another process's, and nothing that would make this one fail: anyone may connect."""
    numbers = [value.get(name) for name in ("index", "count", "pid")]
    return (
        value.get("greeting") == _GREETING
        and all(type(number) is int and number >= 0 for number in numbers)
        and value["index"] < value["count"]
        and isinstance(value.get("host"), str)
        and isinstance(value.get("attempt", ""), str)
    )


def _proof(message: dict[str, Any], secret: str) -> str:
    text = json.dumps({name: value for name, value in message.items() if name != "proof"}, sort_keys=True)
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def _is_proven(message: dict[str, Any]) -> bool:
    """Whether its sender knows this process's secret; True where this one has none."""
    secret = os.environ.get(SECRET)
    return not secret or hmac.compare_digest(str(message.get("proof")), _proof(message, secret))


def _line(message: dict[str, Any]) -> bytes:
    secret = os.environ.get(SECRET)
    proof = {"proof": _proof(message, secret)} if secret else {}
    return json.dumps({**message, **proof}).encode() + b"\n"


def _name(hello: dict[str, Any]) -> str:
    return f"process {hello['index']} ({hello['host']}, pid {hello['pid']})"


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.split(b"\n")[0])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
