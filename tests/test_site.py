"""The documentation as a site, and its notebooks: built with strict links, without anything from elsewhere, and executed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={folder}"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def test_every_page_and_notebook_is_in_the_site(site):
    """`validation: omitted_files: warn` has --strict refuse pages that the navigation leaves out."""
    sources = [*(ROOT / "docs").rglob("*.md"), *NOTEBOOKS]
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in sources}
    assert len(pages) > 40 and all((site / page).is_file() for page in pages)
    assert (site / "contributing.html").is_file() and (site / "changelog.html").is_file()


def test_nothing_is_loaded_from_elsewhere(site):
    """It can be read without a network: no fonts, scripts, styles or pictures of other hosts."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\"\s>]+)", text)
        loaded += re.findall(r"<link(?![^>]*rel=\"?(?:canonical|next|prev))[^>]*\shref=\"?([^\"\s>]+)", text)
        assert [url for url in loaded if re.match(r"(?:https?:)?//", url)] == [], page


def test_formulas_examples_and_commands_are_rendered(site):
    concepts = (site / "concepts.html").read_text(encoding="utf-8")
    assert concepts.count("<math") > 40 and "arithmatex" not in concepts and "\\frac" not in concepts
    reference = (site / "reference" / "per_example.html").read_text(encoding="utf-8")
    assert "grad_statistics" in reference and '<span class="gp">&gt;&gt;&gt; </span>' in reference
    assert "&gt;&gt;&gt;" not in re.sub(r"<pre.*?</pre>", "", reference, flags=re.DOTALL)  # all within blocks of code
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "--profile_steps" in commands and "--quick" in commands and "the flags of all commands" not in commands


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_its_outputs_and_no_error(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(outputs) >= 3 and not [o for o in outputs if o["output_type"] == "error"]
    assert "exit code" not in "".join(s for o in outputs for s in o.get("text", [])).replace("exit code 0", "")
    assert path.stat().st_size < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """As a reader would run it, in a folder of its own; what is printed has the form of what is committed."""
    import nbformat
    from nbclient import NotebookClient

    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "perex"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m perex_t5x "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "")
    committed = nbformat.read(path, 4)
    ran = nbformat.read(path, 4)
    NotebookClient(
        ran, timeout=1200, kernel_name="python3", coalesce_streams=True, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()

    def form(cell) -> list[str]:
        """The output without its numbers."""
        texts = ["".join(o.get("text", "") or o.get("data", {}).get("text/plain", "")) for o in cell.get("outputs", [])]
        return [re.sub(r"[\s\d.e+-]+", "#", text) for text in texts]

    for old, new in zip(committed.cells, ran.cells, strict=True):
        assert form(old) == form(new), new.source
