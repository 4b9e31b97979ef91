"""Whole Gin files, as people, editors and disks leave them: parsed, or refused in our words with the file's name."""

import contextlib
import io
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perex_t5x import gin_utils, train
from perex_t5x.errors import ConfigError
from tests import fuzzing, tiny

SHIPPED = Path(gin_utils.shipped_gin_dir())
ORIGINALS = {name: (SHIPPED / name).read_bytes() for name in fuzzing.names_in(SHIPPED) if name.endswith(".gin")}
GIVEN = [*tiny.BINDINGS, "MODEL_DIR = 'x'", "TRAIN_STEPS = 2"]
HEAD = b"from __gin__ import dynamic_registration\n"

STATEMENTS = st.sampled_from(
    [
        "from __gin__ import dynamic_registration",
        "from perex_t5x import utils",
        "from perex_t5x import trainer as utils",
        "import optax",
        "import no_such_module",
        "from perex_t5x import no_such_name",
        "import perex_t5x.no_such_module",
        "import tests.broken_import",
        "include 'mine.gin'",
        "include 'runs/pretrain.gin'",
        "include '.'",
        "include ''",
        "include 'no_such_file.gin'",
        "include '\\x00'",
        "include mine.gin",
        "MODEL = %MODEL",
        "A = %B",
        "B = %A",
        "A = [%A]",
        "A = (" * 200,
        "A = " + "[" * 90 + "]" * 90,
        "A = " + "[" * 5000 + "]" * 5000,
        "A = " + "-" * 5000 + "1",
        "A = " + "9" * 5000,
        "A = {[]: 1}",
        "A = {%A: 1}",
        "A = f'{1}'",
        "A = b'\\xff' 'x'",
        "A = 1 +",
        "A == 1",
        "A.b.c.d = 1",
        "/A = 1",
        "a//b/C.d = 1",
        "= 1",
        "A =",
        "A = @",
        "A = %",
        "A = @no.such()",
        "A = @optax.adamw()()",
        "optax.adamw.b1 = 0.9",
        "optax.adamw.no_such_argument = 1",
        "optax.adamw:",
        "optax.adamw:\n  b1 = 0.9\n b2 = 0.9",
        "optax.adamw:\n\tb1 = 0.9\n        b2 = 0.9",
        "optax.no_such_name.b = 1",
        "optax.__version__.b = 1",
        "optax = 1",
        "utils.DatasetConfig.__post_init__ = 1",
        "utils.DatasetConfig = 1",
        "macro.value = 1",
        "gin.macro.value = 1",
        "singleton.constructor = @optax.adamw",
        "TRAIN_STEPS = 1\\",
        "'''",
        '"""x',
        "\x00",
        "\x0c",
        "￼",
        "A = 1  # \u2028 B = 2",
    ]
)


def parse(content: bytes, folder: str, bindings=GIVEN, **others: bytes) -> str:
    path = Path(folder, "mine.gin")
    path.write_bytes(content)
    for name, text in others.items():
        Path(folder, f"{name}.gin").write_bytes(text)
    fuzzing.forget_gin()

    def configure():
        gin_utils.parse_gin_flags([], ["runs/quickstart.gin", str(path)], bindings)
        gin_utils.call(train.train, dry_run=True)

    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        return fuzzing.refused(configure)


def check_shipped(name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parse(content, folder)


def check_statements(statements: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parse("\n".join(statements).encode("utf-8", "surrogatepass"), folder)


damaged_files = st.sampled_from(sorted(ORIGINALS)).flatmap(
    lambda name: st.tuples(st.just(name), fuzzing.damaged(ORIGINALS[name]))
)


@example(("models/t5_1_1_small.gin", ORIGINALS["models/t5_1_1_small.gin"]))  # an error read a vocabulary out of reach
@fuzzing.few(25)
@given(file=damaged_files)
def test_a_damaged_copy_of_a_shipped_file(file):
    check_shipped(*file)


@pytest.mark.slow
@fuzzing.many(4000)
@given(file=damaged_files)
def test_many_damaged_copies_of_shipped_files(file):
    check_shipped(*file)


@example(["include 'mine.gin'"])  # RecursionError
@example(["import tests.broken_import"])  # its RuntimeError
@example(["A = " + "[" * 5000 + "]" * 5000])
@example(["A = {[]: 1}"])
@example(["MODEL = %MODEL"])  # RecursionError when it was used
@fuzzing.few(50)
@given(statements=st.lists(STATEMENTS, max_size=6))
def test_odd_statements(statements):
    check_statements(statements)


@pytest.mark.slow
@fuzzing.many(4000)
@given(statements=st.lists(st.one_of(STATEMENTS, st.text(max_size=30)), max_size=8))
def test_many_odd_statements(statements):
    check_statements(statements)


@example(b"\xff\xfe")  # UnicodeDecodeError
@fuzzing.few(30)
@given(content=st.one_of(fuzzing.ODD_TEXT, st.binary(max_size=300)))
def test_what_is_no_gin_file(content):
    check_shipped("", content)
    check_shipped("", HEAD + content)


@pytest.mark.slow
@fuzzing.many(3000)
@given(content=st.one_of(fuzzing.ODD_TEXT, st.binary(max_size=300), st.text().map(str.encode)))
def test_much_that_is_no_gin_file(content):
    check_shipped("", content)
    check_shipped("", HEAD + content)


def test_the_place_is_named(tmp_path):
    """File and line, for what the libraries would say without them, or not at all."""
    assert re.search(r"mine.gin, line 2: is not text in UTF-8 \(byte 0xff\)", parse(b"A = 1\n\xff", tmp_path))
    assert re.search(r"mine.gin, line 2: holds a zero byte", parse(b"A = 1\n\x00", tmp_path))
    assert re.search(
        r"b.gin, line 1: .*mine.gin includes itself", parse(b"include 'b.gin'", tmp_path, b=b"include 'mine.gin'")
    )
    assert re.search(
        r"circle: %B -> %A -> %B \(.*mine.gin, line 2, .*mine.gin, line 1\)", parse(b"A = %B\nB = [%A]", tmp_path)
    )
    assert re.search(
        r"RuntimeError: this module is broken\n.*mine.gin\", line 1", parse(b"import tests.broken_import", tmp_path)
    )
    with pytest.raises(ConfigError, match="--gin_file: gin file '.*' not found"):
        gin_utils.parse_gin_flags([], [str(tmp_path)], [])  # a folder
