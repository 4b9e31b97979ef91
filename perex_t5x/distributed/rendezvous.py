"""All processes meet over plain TCP before JAX connects them: whoever is missing, double or of another count is named.

Process 0 listens at the coordinator's address, the others say who they are, and it answers all of them at once: come in, or
what is wrong. JAX's own service then takes the same port. (JAX alone ends a process with a C++ stack trace in these cases.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import time
from typing import Any

from perex_t5x.distributed.process_info import ProcessInfo
from perex_t5x.errors import ConfigError, Reason, UnreachableError

_GREETING = "perex_t5x rendezvous 1"
_LONGEST = 1 << 20
_RETRY_SECONDS = 0.2


def meet(info: ProcessInfo, timeout: float) -> list[str]:
    """Waits for all processes; returns their hosts by index.

    Raises, with the same message in all of them:
      ConfigError: they were started with indices or counts that do not fit.
      UnreachableError: some did not come, or lost their way, in time; another attempt may succeed.
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
    own = _hello(info)
    with _listen(info) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while True:
                known = {0: own} | {c.hello["index"]: c.hello for c in callers.values() if c.hello}
                if len(known) == info.count:
                    hosts = [known[i]["host"] for i in range(info.count)]
                    _answer(callers, {"hosts": hosts})
                    return hosts
                left = deadline - time.monotonic()
                if left <= 0:
                    raise UnreachableError(_missing(info, known, timeout))
                for key, _ in selector.select(min(left, 1.0)):
                    if key.fileobj is listener:
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        callers[connection.fileno()] = _Caller(connection)
                        selector.register(connection, selectors.EVENT_READ)
                        continue
                    caller = callers[key.fd]
                    if not _read(caller):  # it left again, or is not one of ours
                        selector.unregister(caller.connection)
                        caller.connection.close()
                        del callers[key.fd]
                _check(own, [c.hello for c in callers.values() if c.hello])
        except (ConfigError, UnreachableError) as e:
            _answer(callers, {"error": str(e), "reason": e.reason})
            raise
        finally:
            for caller in callers.values():
                caller.connection.close()


def _listen(info: ProcessInfo) -> socket.socket:
    try:
        return socket.create_server(
            ("", info.port),
            family=socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET,
            dualstack_ipv6=socket.has_dualstack_ipv6(),
            backlog=1024,
        )
    except OSError as e:
        raise ConfigError(
            f"process 0 cannot listen at port {info.port} of {socket.gethostname()} (coordinator address "
            f"{info.address}): {e.strerror}. Another run uses it, or another process on this host also has "
            "--process_index=0: choose another port, or give every process its own index."
        ) from e


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
        if hello is None or hello.get("greeting") != _GREETING:
            return False
        caller.hello = hello
    return True


def _check(own: dict[str, Any], others: list[dict[str, Any]]) -> None:
    seen = {own["index"]: own}
    for hello in others:
        if hello["count"] != own["count"]:
            raise ConfigError(
                f"the processes disagree on how many they are: {_name(own)} says {own['count']}, {_name(hello)} says "
                f"{hello['count']}. Give all of them the same --process_count (JAX_NUM_PROCESSES)."
            )
        if hello["index"] in seen:
            raise ConfigError(
                f"two processes have --process_index={hello['index']}: {_name(seen[hello['index']])} and "
                f"{_name(hello)}. Give every process its own index (JAX_PROCESS_ID), from 0 to {own['count'] - 1}."
            )
        seen[hello["index"]] = hello


def _missing(info: ProcessInfo, known: dict[int, dict[str, Any]], timeout: float) -> str:
    missing = [i for i in range(info.count) if i not in known]
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return (
        f"only {len(known)} of {info.count} processes came within {timeout:g} s (--initialization_timeout); missing: "
        f"process {shown}. Here: {', '.join(_name(known[i]) for i in sorted(known)[:8])}. Were all of them started, with "
        f"--process_count={info.count}, and can they reach {info.address}?"
    )


def _answer(callers: dict[int, _Caller], verdict: dict[str, Any]) -> None:
    line = json.dumps({"greeting": _GREETING, **verdict}).encode() + b"\n"
    for caller in callers.values():
        if caller.hello is not None:
            with contextlib.suppress(OSError):  # it has gone; JAX's own connecting will miss it
                caller.connection.settimeout(5.0)
                caller.connection.sendall(line)


# --- the others -------------------------------------------------------------------------------------------------------


def _call(info: ProcessInfo, timeout: float) -> list[str]:
    deadline = time.monotonic() + timeout
    reason = "no attempt was made"
    met = False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((info.host, info.port), timeout=min(left, 10.0)) as connection:
                connection.sendall(json.dumps(_hello(info)).encode() + b"\n")
                met = True
                # Process 0 keeps the time; a little longer, so that its answer is the one that counts.
                connection.settimeout(max(deadline - time.monotonic(), 0) + 10.0)
                answer = _line(connection)
                if not answer:
                    raise ConnectionError("it closed the connection; did process 0 end?")
        except OSError as e:
            reason = e.strerror or str(e) or type(e).__name__
            time.sleep(min(_RETRY_SECONDS, left))
            continue
        verdict = _decoded(answer)
        if verdict is None or verdict.get("greeting") != _GREETING:
            raise ConfigError(
                f"something else answers at the coordinator address {info.address}: another program, or a run that has "
                "already begun without this process. Choose another port, or restart all processes."
            )
        if "error" in verdict:
            kind = UnreachableError if verdict.get("reason") == Reason.UNREACHABLE else ConfigError
            raise kind(verdict["error"])  # what process 0 has raised
        _wait_for_service(info, deadline)
        return verdict["hosts"]
    lost = "lost the connection" if met else "cannot connect"
    raise UnreachableError(
        f"process {info.index} {lost} to the coordinator (process 0) at {info.address} within {timeout:g} s "
        f"(--initialization_timeout): {reason}. Is process 0 running, is this its address, is the port open in the "
        "firewall?"
    )


def _line(connection: socket.socket) -> bytes:
    text = b""
    while b"\n" not in text and len(text) < _LONGEST:
        piece = connection.recv(65536)
        if not piece:
            break
        text += piece
    return text


def _wait_for_service(info: ProcessInfo, deadline: float) -> None:
    """Until JAX's service has taken the port: its client, refused at first, would pause for a second."""
    while time.monotonic() < deadline:
        try:
            socket.create_connection((info.host, info.port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.02)


def _hello(info: ProcessInfo) -> dict[str, Any]:
    who = {"index": info.index, "count": info.count, "host": socket.gethostname(), "pid": os.getpid()}
    return {"greeting": _GREETING, **who}


def _name(hello: dict[str, Any]) -> str:
    return f"process {hello['index']} ({hello['host']}, pid {hello['pid']})"


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.split(b"\n")[0])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
