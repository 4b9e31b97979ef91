"""The one question: on a terminal, and where nobody can be asked."""

import io
import sys

import pytest

from perex_t5x.cli import console
from perex_t5x.errors import ConfigError


@pytest.fixture
def terminal(monkeypatch):
    def typed(text, is_terminal=True):
        stdin = io.StringIO(text)
        stdin.isatty = lambda: is_terminal
        monkeypatch.setattr(sys, "stdin", stdin)

    return typed


@pytest.mark.parametrize(
    ("text", "answer"), [("y\n", True), ("YES\n", True), ("\n", False), ("no\n", False), ("", False)]
)
def test_answers(terminal, capsys, text, answer):
    terminal(text)
    assert console.confirm("Delete?") is answer
    assert capsys.readouterr().err == "Delete? [y/N] "
    terminal(text)
    if answer:
        assert console.confirm("Delete?", refused="Nothing was deleted.")
    else:
        with pytest.raises(ConfigError, match="^Nothing was deleted.$"):
            console.confirm("Delete?", refused="Nothing was deleted.")


def test_nobody_can_be_asked(terminal, capsys, monkeypatch):
    terminal("y\n", is_terminal=False)
    assert not console.confirm("Delete?") and not console.is_interactive()
    with pytest.raises(ConfigError, match="Nothing was deleted. 'Delete\\?' cannot be asked: .*Give --yes"):
        console.confirm("Delete?", refused="Nothing was deleted.")
    monkeypatch.setattr(sys, "stdin", None)  # as of a process without one
    assert not console.is_interactive()
    assert capsys.readouterr().err == ""
