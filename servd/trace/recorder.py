"""CallRecorder: records the calls of servd's functions in a process, as a tree with times.

`servd trace` puts the folder `site` on PYTHONPATH, so that Python starts a CallRecorder in every
process of the server. Recording makes Python slower: times are for comparison with each other.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import msgspec

import servd

FOLDER = "SERVD_TRACE_FOLDER"  # environment variable: where the processes write their trees
PACKAGE = os.path.dirname(servd.__file__) + os.sep
SITE = os.path.join(PACKAGE, "trace", "site")
RESUMED = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_GENERATOR
POLL_INTERVAL = 0.02  # seconds
# Files of `servd trace`. Each process answers a file NAME with a file NAME.PID.
REQUEST = "request"  # the start is over
END = "end"  # write the tree


class FunctionCall(msgspec.Struct):
    """All calls of a function by the same caller, or all calls of a thread."""

    name: str  # qualified
    file: str = ""  # relative to the package
    line: int = 0
    is_request: bool = False  # after the start
    began_ns: int = 0  # of the first call, on the monotonic clock
    took_ns: int = 0  # of all calls, while they did not wait for the event loop
    count: int = 0  # 0: unknown, because the function is resumed
    calls: list[FunctionCall] = []
    phase: str = ""  # another phase, which has the calls

    @property
    def own_ns(self) -> int:
        """The time without the calls that other phases have."""
        return 0 if self.phase else self.took_ns - self._num_cut_ns()

    def _num_cut_ns(self) -> int:
        return sum(c.took_ns if c.phase else c._num_cut_ns() for c in self.calls)


class Process(msgspec.Struct):
    name: str
    threads: list[FunctionCall]


class Node:
    """A FunctionCall while it is recorded."""

    __slots__ = ("began_ns", "code", "count", "is_request", "nodes", "took_ns")

    def __init__(self, code: CodeType | None, is_request: bool, began_ns: int) -> None:
        self.code = code
        self.is_request = is_request
        self.began_ns = began_ns
        self.took_ns = 0
        self.count = 0
        self.nodes: dict[tuple[CodeType, bool], Node] = {}

    def call(self) -> FunctionCall:
        """Return the FunctionCall, with the calls in it."""
        calls = [node.call() for node in [*self.nodes.values()]]
        if self.code is None:
            return FunctionCall("thread", calls=calls)
        code = self.code
        file = code.co_filename.removeprefix(PACKAGE)
        name = code.co_qualname.replace(".<locals>", "")
        line = code.co_firstlineno
        count = 0 if code.co_flags & RESUMED else self.count
        return FunctionCall(
            name, file, line, self.is_request, self.began_ns, self.took_ns, count, calls
        )


class Entry(NamedTuple):
    """A function that runs."""

    node: Node
    frame: FrameType
    began_ns: int  # 0: of a recursive call, whose time the outer call has


class CallRecorder:
    """Records the calls of all threads of this process."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER])
        self.is_request = False
        self.stacks: list[list[Entry]] = []  # by thread; the first entry is its root
        self._local = threading.local()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="trace", daemon=True).start()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        (self.folder / f"start.{os.getpid()}").touch()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Record the beginning of a call, or that a coroutine goes on; see `sys.settrace`."""
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if not is_function or not code.co_filename.startswith(PACKAGE):
            return None
        try:
            stack: list[Entry] = self._local.stack
        except AttributeError:  # the thread's first call
            stack = self._local.stack = [Entry(Node(None, False, 0), frame, 0)]
            self.stacks.append(stack)
        caller = stack[-1].node
        began_ns = time.monotonic_ns()
        if caller.code is code:
            stack.append(Entry(caller, frame, 0))
        else:
            key = (code, self.is_request)
            node = caller.nodes.get(key)
            if node is None:
                node = Node(code, self.is_request, began_ns)
                caller.nodes[key] = node
            node.count += 1
            stack.append(Entry(node, frame, began_ns))
        frame.f_trace_lines = False
        return self._leave

    def _leave(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Record the end of a call, or that a coroutine waits."""
        stack: list[Entry] = self._local.stack
        if event == "return" and stack[-1].frame is frame:
            entry = stack.pop()
            if entry.began_ns:
                entry.node.took_ns += time.monotonic_ns() - entry.began_ns
        return self._leave

    def _watch(self) -> None:
        """Answer the files of `servd trace`."""
        while not (self.folder / REQUEST).exists():
            time.sleep(POLL_INTERVAL)
        self.is_request = True
        (self.folder / f"{REQUEST}.{os.getpid()}").touch()
        while not (self.folder / END).exists():
            time.sleep(POLL_INTERVAL)
        now = time.monotonic_ns()
        for stack in self.stacks:
            for entry in [*stack]:  # a server's main function does not return
                if entry.began_ns:
                    entry.node.took_ns += now - entry.began_ns
        arguments = sys.orig_argv
        module = arguments[arguments.index("-m") + 1] if "-m" in arguments else arguments[-1]
        threads = [stack[0].node.call() for stack in self.stacks]
        process = Process(f"{module}, process {os.getpid()}", threads)
        path = self.folder / f"writing.{os.getpid()}"
        path.write_bytes(msgspec.json.encode(process))
        path.rename(self.folder / f"{END}.{os.getpid()}")


def read_processes(folder: Path) -> Iterator[Process]:
    """Yield what the processes wrote, in the order of their starts."""
    for path in sorted(folder.glob(f"{END}.*"), key=lambda path: int(path.suffix[1:])):
        yield msgspec.json.decode(path.read_bytes(), type=Process)
