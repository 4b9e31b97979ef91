"""What the property tests have in common: how many examples, made-up values, damaged files and folders, and what may happen.

A property test has two versions: a few examples that are always the same ones, by default; and many, as `slow`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import gin
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from perex_t5x.errors import ConfigError, TrainingError

OURS = (ConfigError, TrainingError)
SECONDS = 60.0  # that an example may take before it counts as hanging: thirty times what the slowest takes


def few(examples: int) -> Any:
    """The same examples in every run."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


def many(examples: int) -> Any:
    """For slow tests; PEREX_T5X_FUZZ_SEED=random: other examples in every run, PEREX_T5X_FUZZ_EXAMPLES: so many."""
    return settings(
        max_examples=int(os.environ.get("PEREX_T5X_FUZZ_EXAMPLES", examples)),
        deadline=None,
        derandomize=os.environ.get("PEREX_T5X_FUZZ_SEED") != "random",
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class HangsError(BaseException):
    """An example that does not end. No `Exception`: nobody shall take it for an error of their own."""


@contextlib.contextmanager
def ends(seconds: float = SECONDS) -> Iterator[None]:
    """Raises `HangsError` in whatever takes longer. Of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise HangsError(f"still running after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def refused(action: Callable[[], Any], errors: tuple[type[Exception], ...] = OURS) -> str:
    """Runs something that may only end well or with one of our errors: its message, "" if it ended well."""
    try:
        with ends():
            action()
    except errors as e:
        message = str(e).strip()
        assert message and "Traceback" not in message
        return message
    return ""


def forget_gin() -> None:
    """Nothing is bound, and Gin can be configured again."""
    gin.config._CONFIG_IS_LOCKED = False
    gin.clear_config(clear_constants=False)


# --- values -----------------------------------------------------------------------------------------------------------

WORDS = ["x", "", "false", "16", "float32", "a/b", "(", "../x", "train[:5]", "%", "\x00", "é", "auto", "nan", "\ud800"]
INTEGERS = [-1, 0, 1, 2, 3, 5, 7, 8, 16, 17, 64]
HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 10**30]
FLOATS = [0.0, -0.0, 0.5, 1.0, 1e-9, 5e-324, 1e-45, 1e38, 1e39, 1e400, -1.0, 2.0**40, 1.0 - 1e-12]
LITERALS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from(HUGE),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(FLOATS),
    st.sampled_from(WORDS),
    st.text(max_size=5),
)
CONTAINERS = st.one_of(
    st.lists(LITERALS, max_size=3),
    st.lists(LITERALS, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from([*WORDS, "targets"]), LITERALS, max_size=2),
)
REFERENCES = st.sampled_from(
    ["@optax.adamw", "@utils.DatasetConfig()", "@utils.DatasetConfig", "@seqio.ByteVocabulary()", "@seqio.Evaluator",
     "@models.T5Config()", "@models.DecoderOnlyModel()", "@optimizers.micro_adam", "%BATCH_SIZE", "%MODEL", "true",
     "NONE", "some/path"]
)  # fmt: skip
ANYTHING = st.one_of(LITERALS.map(repr), CONTAINERS.map(repr), REFERENCES)

SMALL = st.one_of(
    st.one_of(st.none(), st.booleans(), st.sampled_from(INTEGERS), st.sampled_from(FLOATS), st.sampled_from(WORDS)).map(
        repr
    ),
    st.lists(st.one_of(st.sampled_from(INTEGERS), st.sampled_from(WORDS)), max_size=3).map(repr),
    REFERENCES,
)  # of which runs can be made


def suiting(annotation: Any) -> st.SearchStrategy[str]:
    """Values, as Gin writes them, that an annotation allows or nearly does; all are small, so that runs can be made."""
    return _suiting(annotation).map(repr)


def _suiting(annotation: Any) -> st.SearchStrategy[Any]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _suiting(parts[0])
    if origin is Union or type(annotation).__name__ == "UnionType":
        return st.one_of([_suiting(part) for part in parts])
    if origin is Literal:
        return st.sampled_from(parts)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.sampled_from(INTEGERS)
    if annotation is float:
        return st.one_of(st.sampled_from(FLOATS), st.sampled_from(INTEGERS))
    if annotation is str:
        return st.sampled_from(WORDS)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        keys = st.one_of(_suiting(parts[0]), st.sampled_from(["targets", "inputs"]))
        return st.dictionaries(keys.filter(_hashable), _suiting(parts[1]), max_size=2)
    if origin is tuple and parts and parts[-1] is not ...:
        return st.tuples(*map(_suiting, parts))
    if isinstance(origin, type) and issubclass(origin, Collection):
        return st.lists(_suiting(parts[0]), max_size=3)
    return st.none()


def _hashable(value: Any) -> bool:
    return not isinstance(value, list | dict | set)


# --- bytes, files, folders --------------------------------------------------------------------------------------------

ODD_BYTES = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"{",
    b"[" * 3000,
    b"\r",
    b"\x1b[2J",
    b"'",
    b"\xe2\x80",
]
ODD_TEXT = st.one_of(
    st.sampled_from(ODD_BYTES),
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
)


Mangling = tuple[str, float, bytes]  # what is done to a content, where in it (0 to 1), with what
MANGLINGS = st.tuples(
    st.sampled_from(["cut", "insert", "remove", "flip", "overwrite", "repeat", "line"]),
    st.floats(0.0, 1.0),
    ODD_TEXT,
)


def mangled(content: bytes, mangling: Mangling) -> bytes:
    """A content with something cut off, put in, taken out, written over or repeated.

    >>> mangled(b"abcd", ("cut", 0.5, b"")), mangled(b"abcd", ("insert", 0.5, b"?"))
    (b'ab', b'ab?cd')
    """
    kind, where, odd = mangling
    start = int(where * len(content))
    stop = min(len(content), start + max(len(odd), 1))
    if kind == "line":  # taken out, as an editor does
        lines = content.splitlines(keepends=True)
        return b"".join(line for i, line in enumerate(lines) if i != int(where * len(lines)))
    if kind == "flip":
        start = min(start, len(content) - 1)
        return (
            content[:start] + bytes([content[start] ^ (1 << len(odd) % 8)]) + content[start + 1 :] if content else b""
        )
    return {
        "cut": content[:start],
        "insert": content[:start] + odd + content[start:],
        "remove": content[:start] + content[stop:],
        "overwrite": content[:start] + odd + content[stop:],
        "repeat": content[:stop] + content[start:],
    }[kind]


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """A content after one to three manglings."""
    return st.lists(MANGLINGS, min_size=1, max_size=3).map(lambda all_of: functools.reduce(mangled, all_of, content))


Damage = tuple[
    str, float, Mangling
]  # what is done to a folder, to which of its files (0 to 1), and to the file's content
DAMAGES = st.tuples(
    st.sampled_from(
        ["content", "content", "empty", "delete", "folder", "dangling", "loop", "fifo", "unreadable", "extra", "loops"]
    ),
    st.floats(0.0, 1.0),
    MANGLINGS,
)


def damage_folder(root: Path, damage: Damage) -> str:
    """Does to a folder what editors, file systems and people do; returns the name of the file or folder."""
    kind, which, mangling = damage
    names = names_in(root)
    name = names[min(int(which * len(names)), len(names) - 1)]
    path = root / name
    if kind in ("extra", "loops"):
        folder = path if path.is_dir() else path.parent
        if kind == "extra":
            (folder / "extra \udcff.txt").write_bytes(b"?")
        else:  # each of the two leads back to all there is: whoever follows them comes to no end
            for link in (folder / "loop_1", folder / "loop_2"):
                if not link.is_symlink():
                    link.symlink_to(root, target_is_directory=True)
    elif kind in ("content", "empty") and path.is_file() and not path.is_symlink():
        path.write_bytes(b"" if kind == "empty" else mangled(path.read_bytes(), mangling))
    else:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "dangling":
            path.symlink_to(root / "nowhere")
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "unreadable":  # also by root, whom permissions do not stop
            path.symlink_to("/proc/self/mem")
    return name


def names_in(root: Path) -> list[str]:
    """All files and folders below a folder, by relative name."""
    return sorted(os.fspath(path.relative_to(root)) for path in root.rglob("*"))
