"""A child process and its parent."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from servd.base import log
from servd.config import Config
from servd.ipc.child import STANDBY_NICE, Child, import_ahead
from servd.ipc.start_messages import StartModel
from tests.limits import WAIT_SECONDS


def test_a_child_that_is_stopped_holds_up_nobody_who_posts_to_it():
    child = Child("stopped", "servd.ipc.child", Config())  # never reads more than it is given
    os.kill(child.process.pid, signal.SIGSTOP)
    large = Config.load({"served_model_name": ["x" * 100_000]})  # more than a pipe holds

    def post() -> None:
        for _ in range(5):
            child.post(large)

    posting = threading.Thread(target=post, daemon=True)
    posting.start()
    posting.join(WAIT_SECONDS)
    assert not posting.is_alive()
    child.process.kill()
    child.stop(60)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows how long threads wait")
def test_the_waits_of_threads_for_a_cpu_are_read():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nwhile True: pass"
    rivals = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    child = Child("busy", "servd.ipc.child", None)
    child.stop(WAIT_SECONDS)
    assert child.cpu_waits() == {}
    child.process = rivals[0]
    deadline = time.monotonic() + WAIT_SECONDS
    while max(child.cpu_waits().values()) < 0.1:
        assert time.monotonic() < deadline
    for rival in rivals:
        rival.kill()
        rival.wait()


def test_a_child_without_options_ends_with_its_parent():
    code = """
from servd.ipc.child import read_start
from servd.config import Config
import time
def refuse(config):
    raise OSError("no such certificate")
read_start(Config, refuse)
time.sleep(600)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    data = msgspec.msgpack.encode(Config())
    _, errors = child.communicate((len(data).to_bytes(4, "big") + data) * 3, timeout=WAIT_SECONDS)
    assert errors.count(b"no such certificate") == 2
    assert child.returncode == 1


def test_a_child_that_was_never_told_to_start_ends_with_its_parent():
    child = Child("standby", "servd.core.engine_core_proc", None, args=["fake", "1"])
    assert child.process.stdin
    child.process.stdin.close()
    assert child.process.wait(WAIT_SECONDS) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_cpu_time_of_a_child_is_that_of_its_process():
    this = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
    min_seconds = time.process_time() - 0.1  # the kernel counts in hundredths
    assert min_seconds <= Child.cpu_seconds(this) <= time.process_time() + 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody wakes it")
def test_a_child_that_is_stopped_ends_with_its_parent_all_the_same():
    code = """
from servd.ipc.child import Child
from servd.config import Config
import time
print(Child("stopped", "servd.core.engine_core_proc", None).process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    child.suspend()
    while child.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    parent.kill()
    parent.communicate(timeout=WAIT_SECONDS)
    _, alive = psutil.wait_procs([child], 60)
    for process in alive:
        process.kill()
    assert not alive


def test_only_the_thread_that_imports_for_later_has_a_low_priority():
    priorities: list[int] = []

    def work() -> None:
        import_ahead("wave", STANDBY_NICE)
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_SECONDS)
    gc.unfreeze()
    assert priorities == [min(before + STANDBY_NICE, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_an_import_that_fails_leaves_the_search_for_garbage_on():
    with pytest.raises(ModuleNotFoundError):
        import_ahead("servd.nowhere")
    assert gc.isenabled()


def test_a_failed_model_of_several_is_logged(capfd):
    start = StartModel(Config.load({"model": "/nowhere"}))
    child = Child("one", "servd.launch.model_server", start, env={log.MODEL: "one"})
    assert child.process.wait(WAIT_SECONDS) == 2
    child.stop(1)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "/nowhere" in line]
    assert "ERROR   one/servd" in line and "does not exist" in line


# ---- what the start had, and a restart needs again ----

REPORT = """
import os, sys
from servd.ipc.child import Child
from servd.config import Config
folder = sys.argv[1]
os.chdir(folder)
os.rmdir(folder)
child = Child("late", "json.tool", None)
child.process.communicate(b"{}")
sys.exit(child.process.returncode)
"""


def test_a_child_starts_though_the_working_folder_was_removed(tmp_path: Path):
    folder = tmp_path / "release-1"
    folder.mkdir()
    command = [sys.executable, "-c", REPORT, str(folder)]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stderr.decode()


def closing(*descriptors: int) -> Callable[[], None]:
    return lambda: [os.close(descriptor) for descriptor in descriptors] and None


STANDARD = """
import os, subprocess, sys
from servd.cli import open_standard_files
open_standard_files()
found = [os.fstat(each).st_rdev == os.stat(os.devnull).st_rdev for each in range(3)]
assert all(found[each] for each in map(int, sys.argv[2:])), found
assert os.pipe()[0] > 2
look = "import os; [os.fstat(each) for each in range(3)]"  # a child has them, too
assert subprocess.run([sys.executable, "-c", look]).returncode == 0
sys.stdin.read, sys.stdout.write(""), sys.stderr.write("")
open(sys.argv[1], "w").write("fine")
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_closed_standard_files_are_opened_at_start(closed, tmp_path):
    result = tmp_path / "result"
    command = [sys.executable, "-c", STANDARD, str(result), *map(str, closed)]
    subprocess.run(command, preexec_fn=closing(*closed), timeout=WAIT_SECONDS, check=True)
    assert result.read_text() == "fine"
