"""Run the tests in eight processes beside each other and show how far each of them is.

`make test` runs it. Tests of whole servers mostly wait, so that two processes of them and six that
compute keep two CPUs busy to the end.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["tests/core", "tests/demo_model", "tests/parity"]
OTHERWISE = ["tests/integration", "tests/api", "tests/worker", *PACKAGES]
SERVERS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/integration/test_*.py"))
API = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/api/test_*.py"))
FIRST_API = [path for path in API if Path(path).name < "test_h"]
FIRST_SERVERS = [path for path in SERVERS if Path(path).name < "test_q"]
ATTENTION = "tests/worker/attention"  # a fifth of the time of the worker's tests
GATES = "tests/worker/gates"  # of the CUDA path: interpreted and compiled kernels
GROUPS = {
    "api a-g, attention": [*FIRST_API, ATTENTION],
    "api h-z": ["tests/api", *(f"--ignore={path}" for path in FIRST_API)],
    "core, parity": PACKAGES,
    "worker": ["tests/worker", f"--ignore={ATTENTION}", f"--ignore={GATES}"],
    "gates": [GATES],
    "servers a-p": FIRST_SERVERS,
    "servers q-z": [path for path in SERVERS if path not in FIRST_SERVERS],
    "others": [f"--ignore={path}" for path in OTHERWISE],
}
LOG_SECONDS = 20.0  # between two lines where the output is no terminal


def progress_of(log: Path) -> str:
    """Return how many tests a process of pytest has run, how many of them failed, and their share
    once it printed one.
    """
    lines = re.findall(rb"^([.FEsxX]+)(?: +\[ *(\d+)%\])?$", log.read_bytes(), re.MULTILINE)
    results = b"".join(result for result, _ in lines)
    shares = [share for _, share in lines if share]
    parts = [str(len(results))]
    if num_failed := results.count(b"F") + results.count(b"E"):
        parts.append(f"{num_failed} failed")
    if shares:
        parts.append(f"{int(shares[-1])} %")
    return ", ".join(parts)


class Progress:
    """One line: rewritten on a terminal, repeated elsewhere."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.printed_at = 0.0
        self.is_terminal = sys.stdout.isatty()

    def show(self, logs: dict[str, Path]) -> None:
        """Print the line if it is time to."""
        now = time.monotonic()
        if not self.is_terminal and now - self.printed_at < LOG_SECONDS:
            return
        self.printed_at = now
        parts = [f"{name}: {progress_of(log)}" for name, log in logs.items()]
        line = f"{now - self.began:4.0f} s | {' | '.join(parts)}"
        print(f"\r{line}\x1b[K" if self.is_terminal else line, end="", flush=True)
        if not self.is_terminal:
            print(flush=True)


def main() -> int:
    """Return 0 if all tests passed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder, name) for name in GROUPS}
        processes = {}
        for name, arguments in GROUPS.items():
            with logs[name].open("wb") as log:
                command = [sys.executable, "-m", "pytest", *arguments]
                processes[name] = subprocess.Popen(
                    command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
                )
        progress = Progress()
        try:
            while any(process.poll() is None for process in processes.values()):
                progress.show(logs)
                time.sleep(0.5)
        except SystemExit:
            for process in processes.values():
                process.terminate()
            raise
        finally:
            codes = [process.wait() for process in processes.values()]
            for name, log in logs.items():
                print(f"\n== {name}\n{log.read_text(errors='replace')}", end="", flush=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
