"""What XManager's executors cannot do: a way out, with the user's flags."""

import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("xmanager")

from perex_t5x.errors import ConfigError
from perex_t5x.launching.xm import command

IMAGE = "europe-docker.pkg.dev/my-project/perex/perex:1ced5d4"


@pytest.mark.parametrize("image", [IMAGE, None])
def test_vertex_is_refused_with_the_commands_that_run_anywhere(monkeypatch, image):
    given = ["--topology=v5e:16x16", "--gin.A='b c'", *([f"--image={image}"] if image else [])]
    monkeypatch.setattr(sys, "argv", ["xm_launch.py", "--executor=vertex", *given])
    with pytest.raises(ConfigError, match="--executor=vertex is gone") as e:
        command.launch(SimpleNamespace(executor="vertex", image=image))
    first, second = [shlex.split(line) for line in str(e.value).splitlines()[1:]]
    assert first == ["./launch/gcloud_tpu.py", "--topology=v5e:16x16", "--gin.A='b c'"]
    placeholder = "HOST/PROJECT/REPOSITORY/NAME:TAG"
    assert second == ["./launch/gke.py", *given[:2], f"--image={image or placeholder}"]


def test_gke_is_handed_over(tmp_path, monkeypatch):
    script = tmp_path / "launch" / "gke.py"
    script.parent.mkdir()
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    (tmp_path / "perex_t5x").mkdir()
    code = (
        "import sys; from perex_t5x.launching.xm import command; import perex_t5x;"
        f"perex_t5x.__file__ = {str(tmp_path / 'perex_t5x' / '__init__.py')!r};"
        "sys.argv = ['xmanager', 'launch', 'xm_launch.py', '--', '--executor=gke', '--gin.A=$(x)', '--queue=q'];"
        "command.hand_over_to_gke()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout.strip() == "['--gin.A=$(x)', '--queue=q']"


def test_flags_that_are_not_handed_over():
    argv = ["xm_launch.py", "--executor", "gke", "--nofollow", "--yes", "--parallel=2", "--sweep.seeds=[0]"]
    assert command.given(argv) == ["--yes", "--sweep.seeds=[0]"]
