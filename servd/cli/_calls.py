"""Calls of servd's functions as they happen, under the names that the code has, and as a tree."""

from __future__ import annotations

import html
import inspect
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import msgspec

import servd
from servd import ipc
from servd.api.processor import Prepared
from servd.messages import ModelRunnerOutput, SchedulerOutput
from servd.outputs import CompletionOutput

PACKAGE = Path(servd.__file__).parent
RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
SHORTEST = 0.002  # share of the whole; shorter calls without a note are left out
MOST_IDS = 12
STYLE = """<style>
:root { color-scheme: light dark } body { font: 14px ui-monospace, monospace; margin: 2em }
details, .leaf { margin-left: 1.5em } summary { cursor: pointer } pre { overflow: auto }
i { font-style: normal; opacity: .6 } em { font-style: normal; color: light-dark(#06603a, #7fd8a8) }
</style>"""


class Call(msgspec.Struct):
    """A call of a function, or all calls of a thread."""

    name: str
    place: str = ""  # file and line
    begin: float = 0.0  # time.perf_counter(); 0 if it ran before the recorder did
    seconds: float = 0.0  # while it ran, or 0 if it still does
    text: str = ""  # what it tells
    calls: list[Call] = []

    @property
    def told_at(self) -> float:
        """When the first call in it began that tells something; infinite if none does."""
        own = self.begin if self.text else float("inf")
        return min([own, *(call.told_at for call in self.calls)])

    @property
    def tells(self) -> bool:
        """Whether it or a call in it has a text."""
        return self.told_at < float("inf")

    @property
    def took(self) -> str:
        """Nothing if it still runs."""
        return f"{1000 * self.seconds:.3f} ms" if self.seconds else ""

    def prune(self, shortest: float) -> None:
        """Leave out short calls that tell nothing."""
        self.calls = [call for call in self.calls if call.seconds >= shortest or call.tells]
        self.calls.sort(key=lambda call: call.begin)
        for call in self.calls:
            call.prune(shortest)

    def folded(self) -> Iterator[Call]:
        """The calls in it; of those of one name in a row the first ones, and the rest as one."""
        for name, group in groupby(self.calls, lambda call: call.name):
            same = [*group]
            shown = 2 if same[0].tells else 1
            yield from same[:shown]
            if more := same[shown:]:
                seconds = sum(call.seconds for call in more)
                mean = f"{len(more)} more, {1000 * seconds / len(more):.3f} ms each"
                yield Call(name, seconds=seconds, text=mean)


class Recorder:
    """A profile function, see `sys.setprofile`: notes servd's public functions and methods."""

    def __init__(self) -> None:
        self.is_on, self.began = False, 0.0
        self.threads: dict[str, Call] = {}
        # What runs in each thread, with the time since when.
        self._stacks: dict[str, list[tuple[FrameType, Call, float]]] = {}
        self._is_public: dict[CodeType, bool] = {}
        self._suspended: dict[FrameType, Call] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Called at every call and return."""
        if not self.is_on:
            return
        code = frame.f_code
        if (noted := self._is_public.get(code)) is None:
            noted = self._is_public[code] = is_public(code)
        if not noted or event not in ("call", "return"):
            return
        thread, now = threading.current_thread().name, time.perf_counter()
        stack = self._stacks.setdefault(thread, [])
        if event == "call":
            call = self._suspended.pop(frame, None) or Call(name_of(frame), place_of(code), now)
            stack.append((frame, call, now))
        elif stack and stack[-1][0] is frame:
            _, call, since = stack.pop()
            outer = stack[-1][1] if stack else self.threads.setdefault(thread, Call(thread))
            self._end(frame, call, outer, arg)
            call.seconds += now - since

    def _end(self, frame: FrameType, call: Call, outer: Call, result: Any) -> None:
        if call.seconds == 0:  # it has not been suspended before
            outer.calls.append(call)
            call.begin = call.begin or time.perf_counter()  # it waited
        call.text = call.text or describe(frame, result)
        if frame.f_code.co_flags & RESUMED:
            self._suspended[frame] = call

    def start(self) -> float:
        """Record from now on; returns time.perf_counter()."""
        now = time.perf_counter()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, innermost in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
            frames = [frame for frame, _ in walk_stack(innermost) if is_public(frame.f_code)]
            self._stacks[names[ident]] = [
                (frame, Call(name_of(frame), place_of(frame.f_code)), now)
                for frame in reversed(frames)
            ]
        self.began, self.is_on = now, True
        return now

    def finish(self) -> list[Call]:
        """The calls of each thread since `start`."""
        self.is_on = False
        whole = time.perf_counter() - self.began
        for thread, stack in self._stacks.items():  # what still runs, as the engine's loops do
            top = self.threads.setdefault(thread, Call(thread))
            for outer, inner in pairwise([top, *(call for _, call, _ in stack)]):
                outer.calls.append(inner)
        for call in self.threads.values():
            call.prune(SHORTEST * whole)
        telling = [call for call in self.threads.values() if call.tells]
        return sorted(telling, key=lambda call: call.told_at)


def is_public(code: CodeType) -> bool:
    """Whether it is a function of servd that others call."""
    parts = code.co_qualname.removesuffix(".__call__").split(".")
    is_here = code.co_filename.startswith(f"{PACKAGE}/") and "/cli/" not in code.co_filename
    return is_here and not any(part.startswith(("_", "<")) for part in parts)


def name_of(frame: FrameType) -> str:
    """A method with the class of its object, which may have inherited it; a function with its
    module.
    """
    code, owner = frame.f_code, frame.f_locals.get("self")
    if owner is not None:
        return f"{type(owner).__name__}.{code.co_name}"
    is_method = "." in code.co_qualname
    return code.co_qualname if is_method else f"{Path(code.co_filename).stem}.{code.co_name}"


def place_of(code: CodeType) -> str:
    """E.g. core/scheduler.py:120."""
    return f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno}"


def describe(frame: FrameType, result: Any) -> str:
    """What a call made, or the message that it had to do with."""
    message = frame.f_locals.get("message")
    match result:
        case Prepared(prompt_token_ids=ids):
            return f"{len(ids)} prompt tokens {shorten(ids)}"
        case SchedulerOutput(step=step):
            return f"step {step}: " + "; ".join(describe_step(result))
        case ModelRunnerOutput(sampled_token_ids=ids):
            return f"sampled {shorten(ids)}"
        case (str(), CompletionOutput(text=text), list()):  # a generator's
            return f"text {text!r}"
    if frame.f_code.co_filename == ipc.__file__:
        messages = [message, *(result if isinstance(result, list) else [result])]
        return "; ".join(
            f"{type(each).__name__}, {len(msgspec.msgpack.encode(each))} bytes"
            for each in messages
            if isinstance(each, msgspec.Struct)
        )
    return type(message).__name__ if isinstance(message, msgspec.Struct) else ""


def describe_step(scheduled: SchedulerOutput) -> Iterator[str]:
    """What enters, what each row computes, and the blocks of its KV cache."""
    for new in scheduled.new_requests:
        found = f"{new.num_computed_tokens} tokens cached in blocks {new.block_ids}"
        yield f"a request enters slot {new.slot}, {found}"
    for row in scheduled.scheduled:
        blocks = f", new blocks {row.new_block_ids}" if row.new_block_ids else ""
        yield f"slot {row.slot} computes {row.num_tokens} tokens{blocks}"


def shorten(ids: list[Any]) -> str:
    """The first of them."""
    return str(ids[:MOST_IDS])[:-1] + (", ...]" if len(ids) > MOST_IDS else "]")


def draw(calls: Iterable[Call], prefix: str = "") -> Iterator[str]:
    """Lines for a terminal."""
    calls = [*calls]
    for call in calls:
        branch, beside = ("└─ ", "   ") if call is calls[-1] else ("├─ ", "│  ")
        yield f"{prefix + branch + call.name:<60}{call.took:>13}  {call.text}".rstrip()
        yield from draw(call.folded(), prefix + beside)


def to_html(call: Call) -> str:
    """The same, to open and close."""
    name, text, place = map(html.escape, (call.name, call.text, call.place))
    line = f"<b>{name}</b> {call.took} <em>{text}</em> <i>{place}</i>"
    if not (inner := "".join(map(to_html, call.folded()))):
        return f'<div class="leaf">{line}</div>'
    return f"<details open><summary>{line}</summary>{inner}</details>"
