"""A timeline of a server as a tree of calls: what lies between two of its marks has the name of the
function that does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec

# Stage of a mark -> the way to what was done until then: before the engine has the request, in it,
# and after it.
WAYS = {
    "API server": {
        "parsed": ["context.read_body"],
        "adapted": ["context.read_body", "Adapters.find"],
        "templated": ["AsyncLLM.prepare", "Processor.process", "ChatTemplate.render"],
        "tokenised": ["AsyncLLM.prepare", "Processor.process", "Tokenizer.encode"],
        "checked": ["AsyncLLM.prepare", "Processor.check_structured_output"],
        "sent": ["AsyncLLM.generate", "EngineCoreClient.send"],
    },
    "engine": {"compiled": ["GrammarManager.take"], "queued": ["EngineCoreProc.receive"]},
    "API server, after": {
        "returned": ["EngineCoreClient.drain"],
        "detokenised": ["OutputProcessor.process"],
        "written": ["RequestContext.__call__"],
    },
}
# The times of a step -> the way to what took them.
TIMES = {
    "schedule_ms": ["Scheduler.schedule"],
    "prepare_ms": ["ModelRunner.execute_model", "InputBatch.gather"],
    "forward_ms": ["ModelRunner.execute_model", "ModelRunner.forward"],
    "sample_ms": ["ModelRunner.sample_tokens"],
}
MOST_IDS = 12


class Call(msgspec.Struct):
    """A call of a function, or all calls of a process."""

    name: str
    seconds: float = 0.0  # 0 if unknown
    text: str = ""  # what it tells
    calls: list[Call] = []

    @property
    def took(self) -> str:
        """Nothing if unknown."""
        return f"{1000 * self.seconds:.3f} ms" if self.seconds else ""

    def add(self, way: list[str], seconds: float, text: str) -> None:
        """Put a call where its way leads, and its time into all calls on it."""
        call = self
        for name in way:
            if not call.calls or call.calls[-1].name != name:
                call.calls.append(Call(name))
            call = call.calls[-1]
            call.seconds += seconds
        call.text = text

    def folded(self) -> Iterator[Call]:
        """The calls in it; of those of one name in a row the first two, and the rest as one."""
        for name, group in groupby(self.calls, lambda call: call.name):
            same = [*group]
            yield from same[:2]
            if more := same[2:]:
                seconds = sum(call.seconds for call in more)
                mean = f"{len(more)} more, {1000 * seconds / len(more):.3f} ms each"
                yield Call(name, seconds, mean)


def of_timeline(
    timeline: dict[str, Any],
    prompt: list[int],
    sampled: list[int],
    runner: str = "ModelRunner",
    model: str = "",
) -> list[Call]:
    """The way of a request with one choice, and where its time went.

    Args:
        timeline: with the header X-Servd-Watch, so that it has messages and blocks.
        prompt: token ids.
        sampled: token ids.
        runner: which kind of it the engine has, if that is known.
        model: its class, if that is known.
    """
    told = {
        "tokenised": f"{len(prompt)} prompt tokens {shorten(prompt)}",
        "sent": f"EngineCoreRequest{_bytes(timeline)}",
        "detokenised": f"{len(sampled)} tokens {shorten(sampled)}",
    }
    processes = [Call(name) for name in WAYS]
    for process in processes:
        for mark in timeline["marks"]:
            if way := WAYS[process.name].get(mark["stage"]):
                process.add(way, mark["took_ms"] / 1000, told.get(mark["stage"], ""))
    steps = [*_steps(timeline, sampled, runner, model)]
    processes[1].calls.append(Call("EngineCoreProc.busy_loop", calls=steps))
    causes = [Call(c["cause"], c["ms"] / 1000, c["meaning"]) for c in timeline["causes"] if c["ms"]]
    whole = Call(timeline["id"], timeline["wall_ms"] / 1000, timeline["explanation"], causes)
    return [*processes, whole]


def _steps(timeline: dict[str, Any], sampled: list[int], runner: str, model: str) -> Iterator[Call]:
    """From a request's first step to its last, as far as the timeline has them. Tokens are told
    where none of others can be among them.
    """
    stages = {mark["stage"]: mark["step"] for mark in timeline["marks"] if "step" in mark}
    first, last = min(stages.values(), default=0), max(stages.values(), default=-1)
    steps = [step for step in timeline["steps"] if first <= step["step"] <= last]
    is_alone = {step["num_requests"] for step in steps} == {1} and len(steps) == last - first + 1
    [blocks] = timeline.get("block_ids") or [[]]
    for step in steps:
        about = "step {step}: {num_tokens} tokens of {num_requests} requests".format_map(step)
        if step["step"] == first and blocks:
            about += f"; its blocks in the end: {shorten(blocks)}"
        tokens: list[int] = []
        if is_alone and step["step"] >= stages.get("first_token", last + 1):
            end = 1 + step["num_accepted"]
            tokens, sampled = sampled[:end], sampled[end:]
        told = {"forward_ms": model, "sample_ms": f"sampled {shorten(tokens)}" * bool(tokens)}
        call = Call("EngineCore.step", (step["end_ms"] - step["begin_ms"]) / 1000, about)
        for time, way in TIMES.items():
            way = [name.replace("ModelRunner", runner) for name in way]
            call.add(way, step[time] / 1000, told.get(time, ""))
        if message := _bytes(step):
            call.add(["Outbox.send"], 0.0, f"EngineCoreOutputs{message}")
        yield call


def _bytes(told: dict[str, Any]) -> str:
    return f", {told['message_bytes']} bytes" if "message_bytes" in told else ""


def shorten(ids: list[int]) -> str:
    """The first of them."""
    return str(ids[:MOST_IDS])[:-1] + (", ...]" if len(ids) > MOST_IDS else "]")


def draw(calls: Iterable[Call], prefix: str = "") -> Iterator[str]:
    """Lines for a terminal."""
    calls = [*calls]
    for call in calls:
        branch, beside = ("└─ ", "   ") if call is calls[-1] else ("├─ ", "│  ")
        yield f"{prefix + branch + call.name:<60}{call.took:>13}  {call.text}".rstrip()
        yield from draw(call.folded(), prefix + beside)
