"""docs/sharp_edges.md: its commands, run on eight devices with --dry_run, say what the page says."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from perex_t5x import buckets, extras
from perex_t5x.cli import dispatch
from tests.cli import in_process
from tests.cli.in_process import Command

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "sharp_edges.md").read_text(encoding="utf-8")
EDGES = re.findall(r"^### ([^\n]*)\n\n```sh\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
STANDS_FOR = re.search(r"```sh\nperex train (.*?)```", PAGE, re.DOTALL)[1]
TRAINING = [edge for edge in EDGES if edge[1].startswith("perex train ")]


def test_every_message_on_the_page_is_made_by_a_test():
    assert len(EDGES) == PAGE.count("```text") and len(TRAINING) > 10
    assert [title for title, command, _ in EDGES if not command.startswith("perex train ")] == [
        "A command of the checkout in an installed package",
        "An extra that is not installed",
    ]


def same(message: str, said: str) -> bool:
    """`...` in the page's message stands for anything."""
    return re.search(re.escape(message.strip()).replace(r"\.\.\.", ".*?"), said, re.DOTALL) is not None


@pytest.mark.parametrize(("title", "command", "message"), TRAINING, ids=lambda text: text[:40].split("\n")[0])
def test_what_training_refuses(title, command, message, tmp_path, monkeypatch):
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    buckets.client.cache_clear()  # another test's, with its credentials
    words = shlex.split(command.replace(" ... ", f" {STANDS_FOR.strip()} ").replace("\\\n", " "))[2:]
    code, said = in_process.run(Command("perex_t5x.train"), [*words, "--dry_run"], tmp_path)
    assert code == 2 and same(message, said), said
    assert "Traceback" not in said


def message_of(title: str) -> str:
    (message,) = (message for found, _, message in EDGES if found == title)
    return message.strip()


def test_launchers_of_an_installed_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "__file__", str(tmp_path / "site-packages" / "perex_t5x" / "cli" / "dispatch.py"))
    monkeypatch.setattr(sys, "argv", ["perex", "gke", "--dry_run"])
    with pytest.raises(SystemExit) as end:
        dispatch.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.strip() == message_of("A command of the checkout in an installed package")


def test_missing_extras(monkeypatch):
    monkeypatch.setattr(extras, "missing", lambda extra: ["vl_convert"])
    with pytest.raises(extras.MissingExtraError) as error:
        extras.require("reports", "perex_t5x.experiments.report")
    assert f"ERROR: {error.value}" == message_of("An extra that is not installed")
