"""Every code block in README and docs is executed here, or names the test that does, or says why it cannot be.

What stands directly above a block decides (an HTML comment; several lines are one comment):

    <!-- not run: REASON -->       nobody can run it here: it needs a cloud project, hours, ...
    <!-- run in tests/FILE.py -->  another test executes it; that has to name the page
    <!-- all run in tests/FILE.py -->  near the top of a page: so for all of its blocks
    nothing                        it is run here

Python blocks of a page run one after another in one namespace. Commands of a page run one after another in one folder:
cheaply by default (--dry_run, in this process), and for real with tiny settings in the slow tests. Blocks without a language
are what is printed, trees of files and formulas, no code.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from perex_t5x import gin_utils
from tests.cli import in_process
from tests.cli.in_process import Command

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = {"python", "sh", "bash", "gin"}
NOT_CODE = {"", "text", "json", "pycon"}


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    comment: str

    @property
    def is_run_here(self) -> bool:
        return not re.match(r"not run: |run in ", self.comment)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(
        r"(?:^ *<!-- ((?:(?!-->).)*?) -->\n)?^( *)```(\w*)[^\n]*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL
    )
    blocks = []
    everywhere = re.search(r"^<!-- all (run in tests/\S+) -->$", text, re.MULTILINE)
    for match in found:
        comment, indent, language, code = match[1] or "", match[2], match[3], match[4]
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        line = text[: match.start(3)].count("\n") + 1
        comment = everywhere[1] if everywhere and not comment else " ".join(comment.split())
        blocks.append(Block(page, line, language, code, comment))
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def test_all_blocks_are_found():
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert 2 * len(BLOCKS) == fences and len(BLOCKS) > 100
    assert {block.language for block in BLOCKS} <= CODE | NOT_CODE


@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.is_run_here and b.language in CODE], ids=str)
def test_a_block_that_is_not_run_here_says_where_or_why(block):
    kind, _, said = (
        block.comment.partition(": ") if block.comment.startswith("not run") else block.comment.rpartition(" ")
    )
    if kind == "not run":
        assert len(said) > 15, f"{block}: a reason, please"
    else:
        test = ROOT / said
        assert test.is_file(), f"{block}: {said}"
        assert block.page.name in test.read_text(encoding="utf-8"), f"{block}: {said} does not name the page"


def test_comments_stand_above_blocks():
    """One that has lost its block would excuse nothing, and nobody would see."""
    for page in PAGES:
        text = re.sub(r"```.*?```", "```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = re.sub(r"`[^`\n]*`", "", text) if page.name == "CONTRIBUTING.md" else text
        comments = len(re.findall(r"<!-- (?:not run: |run in )", text))
        if "<!-- all run in " not in text:
            assert comments == len([b for b in BLOCKS if b.page == page and not b.is_run_here]), page


# --- Python -----------------------------------------------------------------------------------------------------------

PYTHON = {page: [b for b in BLOCKS if b.page == page and b.language == "python" and b.is_run_here] for page in PAGES}


@pytest.mark.parametrize("page", [page for page, blocks in PYTHON.items() if blocks], ids=lambda page: page.name)
def test_python(page, tmp_path, monkeypatch, capsys):
    """In one namespace, where every file that a block's first line names (`# NAME.py`) is written, not run."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    for block in PYTHON[page]:
        if re.match(r"# \w+\.py\n", block.code):
            compile(block.code, str(block), "exec")  # the page's commands use it
        else:
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)


# --- Gin --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "gin"], ids=str)
def test_gin_is_gin(block):
    """Whether what it binds exists: files that a page's commands use are read by these (`write_files`)."""
    from gin import config_parser

    assert list(config_parser.ConfigParser(block.code, gin_utils.BindingNames()))


# --- commands ---------------------------------------------------------------------------------------------------------

NANO = ["--gin_file=models/nano.gin", "--gin.BATCH_SIZE=8", "--gin.TRAIN_STEPS=2", "--gin.WARMUP_STEPS=1"]
NANO += ["--gin.EVAL_PERIOD=2", "--gin.EVAL_STEPS=1", "--gin.TASK_FEATURE_LENGTHS={'targets': 32}"]
TASK = "--gin.MIXTURE_OR_TASK_NAME=python_stdlib_lm"
# Of a command: what makes it cheap (in this process), and what makes a real run small (a process of its own); None: only
# the other of the two. What an elided command (`...`) lacks stands before its own words.
SMALL_SWEEP = [*NANO, "--sweep.seeds=[0]", "--sweep.rate_factors=[1.0]"]


@dataclasses.dataclass(frozen=True)
class How:
    cheap: list[str] | None
    small: list[str] | None
    elided: tuple[str, ...] = ()


ELIDED = ("--gin.MODEL_DIR=elided", "--gin.TRAIN_STEPS=100", TASK, "--gin.TASK_FEATURE_LENGTHS={'targets': 64}")
HOW = {
    "train": How(["--dry_run"], NANO, ELIDED),
    "quickstart": How(None, [word for word in NANO if not word.startswith("--gin_file")]),
    "eval": How(None, [*NANO[:2], "--gin.EVAL_STEPS=1"]),
    "infer": How(None, [*NANO[:2], "--gin.NUM_EXAMPLES=2"]),
    "bench": How(["--dry_run"], None),
    "experiments.sweep": How(["--dry_run"], SMALL_SWEEP),
    "experiments.study": How(None, ["--dry_run"]),  # their batches are too small for eight devices
    "experiments.report": How(None, []),
    "checkpoints": How(None, []),
    "gin_port": How([], []),
    "chaos": How(None, ["--quick=false", "--faults=kill", "--settings=cached", "--trials=1"]),
    "preflight": How(None, ["--gin_file=models/nano.gin", "--gin.BATCH_SIZE=16", "--no_search", "--topology=v5e:2x2"]),
    "preflight.collectives": How(None, ["--gin_file=models/nano.gin"]),
}
PROGRAM = re.compile(r"(?:\.venv/bin/)?python -m perex_t5x\.([\w.]+)|perex ([\w.]+)")


@dataclasses.dataclass(frozen=True)
class Line:
    """One command of a block."""

    module: str
    words: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]

    @property
    def how(self) -> How:
        return HOW[self.module]

    def with_words(self, more: list[str]) -> list[str]:
        if any(word.startswith("--gin_file=ported/") for word in self.words):  # the page's own run, small as it is
            more = [word for word in more if word == "--dry_run"]
        words = [*self.how.elided, *self.words[:-1]] if self.words[-1:] == ("...",) else list(self.words)
        if any(word.startswith("--topology=") for word in more):  # instead of a pod's
            words = [word for word in words if not word.startswith("--gin_file=meshes/")]
        return [*words, *more]


def lines_of(block: Block) -> list[Line]:
    """The block's commands; one that is none of ours is an error, since nobody would run it."""
    from perex_t5x.cli import dispatch

    found = []
    for text in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(text, comments=True)
        settings = []
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            settings.append(tuple(words.pop(0).split("=", 1)))
        if not words or (words[:2] == ["pip", "install"] and words[2].startswith("perex_t5x")):
            continue  # tests/test_packaging.py
        match = PROGRAM.match(" ".join(words))
        assert match, (
            f"{block}: `{text}` is not run by any test: say why above the block, or run it in a test of its own"
        )
        module = match[1] or dispatch.find(match[2]).place
        assert module in HOW, f"{block}: say in HOW how {module} is run, or above the block why not"
        start = 3 if match[1] else 2
        found.append(Line(module, tuple(words[start:]), tuple(settings)))
    return found


COMMANDS = {
    page: [b for b in BLOCKS if b.page == page and b.language in ("sh", "bash") and b.is_run_here] for page in PAGES
}
COMMAND_PAGES = [page for page, blocks in COMMANDS.items() if blocks]


def write_files(page: Path, folder: Path) -> None:
    """The files that the page shows: blocks whose first line is `# NAME.gin` or `# NAME.py`."""
    for block in BLOCKS:
        if block.page == page and (match := re.match(r"# ([\w./]+\.(?:py|gin))\n", block.code)):
            (folder / match[1]).write_text(block.code)


def cheap_lines(page: Path) -> list[Line]:
    """Without those that need the checkpoint of a run before them: there the runs are dry."""
    lines = [line for block in COMMANDS[page] for line in lines_of(block) if line.how.cheap is not None]
    return [line for line in lines if not any("/checkpoint_" in word for word in line.words)]


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.name)
def test_commands_are_fine(page, tmp_path, monkeypatch):
    """Every command that knows --dry_run, on eight devices."""
    write_files(page, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for line in cheap_lines(page):
        code, said = in_process.run(Command(f"perex_t5x.{line.module}"), line.with_words(line.how.cheap), tmp_path)
        assert code == 0, (line, said)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder with a finished quickstart, which several pages begin with."""
    folder = tmp_path_factory.mktemp("quickstart")
    shell(Line("quickstart", ("--gin.MODEL_DIR=runs/quickstart",), ()), HOW["quickstart"].small or [], folder)
    return folder


def shell(line: Line, more: list[str], folder: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **dict(line.settings)}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", f"perex_t5x.{line.module}", *line.with_words(more)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.name)
def test_commands_run(page, tmp_path, request):
    """For real, in processes of their own, one after another in one folder."""
    write_files(page, tmp_path)
    for block in COMMANDS[page]:
        for line in lines_of(block):
            if line.how.small is None:
                continue
            if any("runs/quickstart" in word for word in line.words) and line.module in (
                "eval",
                "infer",
                "checkpoints",
            ):
                (tmp_path / "runs").mkdir(exist_ok=True)
                if not (tmp_path / "runs" / "quickstart").exists():
                    made = request.getfixturevalue("quickstart") / "runs" / "quickstart"
                    subprocess.run(["cp", "-r", made, tmp_path / "runs"], check=True)
                small = [word for word in line.how.small if "nano" not in word]
                shell(line, small, tmp_path)
            else:
                shell(line, line.how.small, tmp_path)
