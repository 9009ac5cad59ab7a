"""Folders of sockets: private, short, and removed after those who were killed."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servd.base.errors import ConfigError
from servd.base.private_dir import LOCK, LOCK_GRACE, PARENT_DIR, find_base, private_dir
from tests.limits import WAIT_SECONDS

OWNER = "from servd.base.private_dir import private_dir; print(private_dir(), flush=True); input()"


def test_the_folder_is_private_and_its_path_is_short(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    folder = private_dir()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder)) < 80  # leaves room for names below the limit of 107 bytes
        other = private_dir()
        assert folder != other
        shutil.rmtree(other)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = private_dir()
    monkeypatch.setenv(PARENT_DIR, str(folder))
    yield folder
    shutil.rmtree(folder)


def grow_old(folder: Path) -> None:
    old = folder.stat().st_mtime - LOCK_GRACE - 1
    os.utime(folder / LOCK, (old, old))


def test_leftovers_of_a_killed_process_are_removed(base: Path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    leftover = Path(owner.stdout.readline().strip())
    (leftover / "engine").touch()
    foreign = base / "servd-of-somebody"  # has the name, and no lock
    foreign.mkdir()
    own_folder = private_dir()
    for folder in (leftover, own_folder):
        grow_old(folder)
    second = private_dir()
    assert leftover.parent == base and leftover.exists()  # its owner runs
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=WAIT_SECONDS)
    grow_old(leftover)
    third = private_dir()
    assert {*base.glob("servd-*")} == {foreign, own_folder, second, third}


def test_a_new_folder_is_left_to_who_is_about_to_hold_it(base: Path):
    fresh = base / "servd-new"
    fresh.mkdir()
    (fresh / LOCK).touch()
    private_dir()
    assert fresh.exists()
    grow_old(fresh)
    private_dir()
    assert not fresh.exists()


def test_removed_folders_hold_no_descriptor(base: Path):
    shutil.rmtree(private_dir())
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        shutil.rmtree(private_dir())
    assert len(os.listdir("/proc/self/fd")) == count


NONE = "no folder"


@pytest.mark.parametrize(
    ("writable", "expected"),
    [
        ({"/dev/shm"}, "/dev/shm"),
        ({"/run", "/dev/shm"}, "/dev/shm"),
        ({"/run"}, "/run"),
        ({"/tmp", "/run"}, "/tmp"),
        ({"/mine", "/tmp"}, "/mine"),
        (set(), NONE),
        ({"/" + "x" * 80}, NONE),
    ],
)
def test_sockets_find_a_folder_on_a_read_only_system(monkeypatch, writable, expected):
    monkeypatch.setenv(PARENT_DIR, "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", next((w for w in writable if len(w) > 60), "/mine"))
    monkeypatch.setattr("os.access", lambda path, mode: path in writable)

    def find_none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", find_none)
    if expected is NONE:
        with pytest.raises(ConfigError, match="/dev/shm, /run can be written.* TMPDIR"):
            find_base()
    else:
        assert find_base() == expected
