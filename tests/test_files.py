"""Files that are there as a whole or not at all."""

import os
import tempfile

import pytest

from perex_t5x import files


def test_an_error_leaves_the_former_file(tmp_path):
    path = tmp_path / "folder" / "a.txt"
    files.write_atomically(path, "one")
    with pytest.raises(RuntimeError), files.atomic_writer(path) as f:
        f.write("two")
        assert path.read_text() == "one"
        raise RuntimeError
    assert path.read_text() == "one" and os.listdir(path.parent) == ["a.txt"]
    files.write_atomically(path, "three")
    assert path.read_text() == "three" and os.listdir(path.parent) == ["a.txt"]


def test_links_and_devices_stay_what_they_are(tmp_path):
    (tmp_path / "target").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    files.write_atomically(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "x"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_atomically(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    files.write_atomically("/dev/null", "x")
    assert not os.path.isfile("/dev/null")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="a folder in memory, /dev/shm, is needed")
def test_a_folder_in_memory_is_a_folder():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        files.write_atomically(f"{folder}/a/b", "one")
        with pytest.raises(RuntimeError), files.atomic_writer(f"{folder}/a/b") as f:
            f.write("two")
            raise RuntimeError
        with open(f"{folder}/a/b") as f:
            assert f.read() == "one"


def test_what_is_open_is_written_to(tmp_path):
    with (tmp_path / "a").open("w") as f:
        files.write_atomically(f"/dev/fd/{f.fileno()}", "x")
        assert os.fstat(f.fileno()).st_size == 1  # the open file, not another of its name
        assert os.stat(tmp_path / "a").st_ino == os.fstat(f.fileno()).st_ino


def test_the_mode_is_that_of_any_new_file(tmp_path):
    files.write_atomically(tmp_path / "a", "")
    (tmp_path / "b").write_text("")
    assert os.stat(tmp_path / "a").st_mode == os.stat(tmp_path / "b").st_mode
