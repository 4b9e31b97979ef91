"""Nothing that a run reads is unpickled: not in the package's code, and not from files that somebody has prepared."""

import ast
import contextlib
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from perex_t5x import checkpoint_files, checksums, metric_files
from perex_t5x.cli import status
from perex_t5x.data import stores
from perex_t5x.data.streaming import read_arrays
from perex_t5x.data.text_source import TextFilesSource
from perex_t5x.distributed import rendezvous
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.report import load
from tests.distributed import support
from tests.test_checkpoint_files import KINDS, largest, restore, run, saved  # noqa: F401 (fixtures)

PACKAGE = Path(__file__).resolve().parent.parent / "perex_t5x"
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch", "jsonpickle"}
LOADERS = {"yaml": {"load", "load_all", "unsafe_load", "full_load"}, "pandas": {"read_pickle"}, "pd": {"read_pickle"}}
# The type annotations of functions that Gin configures, which are code already.
MAY_EVALUATE = {"arguments.py"}
# It times PyTorch, and reads nothing with it.
MAY_USE_TORCH = {"bench/torch_child.py"}


def unsafe(source: str) -> list[str]:
    """What in a module's source unpickles, or runs text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(node.func.id)
            module = getattr(getattr(node.func, "value", None), "id", "")
            if getattr(node.func, "attr", "") in LOADERS.get(module, ()):
                found.append(f"{module}.{node.func.attr}")
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    found.append("allow_pickle")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "np.load(f, allow_pickle=True)",
        "yaml.load(f)",
        "eval(x)",
        "import torch.nn",
    ],
)
def test_the_search_finds(source):
    assert unsafe(source)


def test_the_package_unpickles_nothing():
    paths = [
        path for path in PACKAGE.rglob("*.py") if str(path.relative_to(PACKAGE)) not in MAY_EVALUATE | MAY_USE_TORCH
    ]
    found = {str(path.relative_to(PACKAGE)): unsafe(path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def bomb(tmp_path):
    """Bytes that make a folder if they are unpickled; in the end it must not be there."""
    exploded = tmp_path / "exploded"
    yield pickle.dumps(Bomb(exploded))
    assert not exploded.exists()


def test_the_bomb_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "checksums"])
def test_a_hostile_checkpoint(kind, run, bomb):  # noqa: F811
    """With checksums that are right, as whoever changes the files can make them."""
    folder = run / "checkpoint_30"
    largest(folder, *KINDS[kind]).write_bytes(bomb)
    checksums.write(folder)
    for read in (lambda: checkpoint_files.read_run(str(folder)), lambda: restore(folder)):
        with contextlib.suppress(ConfigError):
            read()


def test_a_hostile_stream_state(tmp_path, bomb):
    np.savez(tmp_path / "a.npz", x=np.array([Bomb(tmp_path / "exploded")], dtype=object))
    np.save(tmp_path / "a.npy", np.array([Bomb(tmp_path / "exploded")], dtype=object), allow_pickle=True)
    for content in (bomb, (tmp_path / "a.npz").read_bytes(), (tmp_path / "a.npy").read_bytes(), b"", b"PK"):
        with pytest.raises(ConfigError, match="a.npz is not a file of arrays"):
            read_arrays(content, ["x"], "a.npz")


@pytest.mark.parametrize("name", ["rows.array_record", "copy.json"])
def test_a_hostile_cache(name, tmp_path, bomb):
    dtype = np.dtype([("targets", np.int32, (4,))])
    stores.write_copy(str(tmp_path / "copy"), [np.zeros(3, dtype)])
    assert len(stores.ArrayRecordStore(str(tmp_path / "copy"), dtype)) == 3
    assert (tmp_path / "copy" / name).exists()
    (tmp_path / "copy" / name).write_bytes(bomb)
    with pytest.raises(ConfigError, match="delete that folder and start again"):
        stores.ArrayRecordStore(str(tmp_path / "copy"), dtype)


def test_hostile_files_of_a_run(tmp_path, bomb):
    (tmp_path / "metrics.jsonl").write_bytes(bomb + b"\n" + json.dumps({"step": 1, "name": "train"}).encode() + b"\n")
    (tmp_path / "status.json").write_bytes(bomb)
    assert [row["step"] for row in metric_files.read_rows(str(tmp_path))] == [1]
    assert status.read(str(tmp_path)) is None


def test_a_hostile_corpus(tmp_path, bomb):
    """It is text, whatever it is."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(bomb)
    files = {"train": [("a.txt", str(tmp_path / "a.txt"))], "validation": [("b.txt", str(tmp_path / "b.txt"))]}
    source = TextFilesSource(lambda: files, description="a corpus", how_to_fix="")
    assert source.digest("train")
    (document,) = source.get_dataset("train", shuffle=False).as_numpy_iterator()
    assert document["text"].decode()  # with U+FFFD for what is no text


def test_a_hostile_report_folder(tmp_path, bomb, monkeypatch):
    """A report reads texts and JSON; what a configuration imports is not imported, since it may be a stranger's."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "hostile.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'exploded')!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name, config in (("plain", b"import hostile\nhostile.run.x = @hostile.run()\n"), ("binary", bomb)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.gin").write_bytes(config)
        (folder / "metrics.jsonl").write_bytes(bomb + b'\n{"step": 1, "name": "train", "loss": 2.0}\n')
        (folder / "result.json").write_bytes(bomb)
    (runs,) = load.load_folders([str(tmp_path / "runs")])
    assert len(runs.runs) == 2 and "hostile" not in sys.modules
    (tmp_path / "runs" / "sweep.json").write_bytes(bomb)
    with pytest.raises(ConfigError):
        load.load_folders([str(tmp_path / "runs")])


def test_no_secret_is_written_down(tmp_path):
    """Neither the secret of the coordination port nor a token in the environment is in what a run leaves or prints."""
    secrets = {rendezvous.SECRET: "correct horse battery staple", "GOOGLE_AUTH_TOKEN_FOR_TESTING": "ya29.a-token"}
    arguments = support.train_arguments(tmp_path / "run", "TRAIN_STEPS = 1", "models.T5Config.num_decoder_layers = 1")
    code, output = support.run(*arguments, processes=1, devices=1, **secrets)
    assert code == 0, output
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 10
    for secret in secrets.values():
        assert secret not in output and not any(secret.encode() in content for content in written)
