"""A timeline of a server as calls: what lies between two of its marks has the name of the function
that does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from servd.cli._calls import Call

FILES = {  # function -> its file
    "Adapters.find": "api/adapters.py",
    "AsyncLLM.generate": "api/async_llm.py",
    "AsyncLLM.prepare": "api/async_llm.py",
    "ChatTemplate.render": "api/chat_template.py",
    "EngineCore.step": "core/engine_core.py",
    "EngineCoreClient.drain": "core/client.py",
    "EngineCoreClient.send": "core/client.py",
    "EngineCoreProc.busy_loop": "core/engine_core_proc.py",
    "EngineCoreProc.receive": "core/engine_core_proc.py",
    "GrammarManager.take": "core/structured_output/manager.py",
    "InputBatch.gather": "worker/input_batch.py",
    "ModelRunner.execute_model": "worker/model_runner.py",
    "ModelRunner.forward": "worker/model_runner.py",
    "ModelRunner.sample_tokens": "worker/model_runner.py",
    "Outbox.send": "ipc.py",
    "OutputProcessor.process": "api/output_processor.py",
    "Processor.check_structured_output": "api/processor.py",
    "Processor.process": "api/processor.py",
    "RequestContext.__call__": "api/middleware.py",
    "Scheduler.schedule": "core/scheduler.py",
    "Tokenizer.encode": "api/tokenizer.py",
    "context.read_body": "api/context.py",
}
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
TIMES = ("schedule_ms", "prepare_ms", "forward_ms", "sample_ms")  # of a step
KIND = re.compile("^[CG]PU(?=ModelRunner)")
MOST_IDS = 12


def calls_of(
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
    processes = []
    for process, ways in WAYS.items():
        top = Call(process)
        for mark in timeline["marks"]:
            if way := ways.get(mark["stage"]):
                _add(top, way, mark["took_ms"] / 1000, told.get(mark["stage"], ""))
        processes.append(top)
    steps = [_step(*each, runner, model) for each in _own_steps(timeline, sampled)]
    processes[1].calls.append(_call("EngineCoreProc.busy_loop", calls=steps))
    causes = [Call(c["cause"], c["ms"] / 1000, c["meaning"]) for c in timeline["causes"] if c["ms"]]
    whole = Call(timeline["id"], timeline["wall_ms"] / 1000, timeline["explanation"], causes)
    return [*processes, whole]


def _add(top: Call, way: list[str], seconds: float, text: str) -> None:
    """Put a call where its way leads, and its time into all calls on it."""
    for name in way:
        if not top.calls or top.calls[-1].name != name:
            top.calls.append(_call(name))
        top = top.calls[-1]
        top.seconds += seconds
    top.text = text


def _own_steps(
    timeline: dict[str, Any], sampled: list[int]
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """The steps from its first to its last, as far as the timeline has them, with what is known of
    its part in each, and of its tokens from each: nothing where others' may be among them.
    """
    stages = {mark["stage"]: mark["step"] for mark in timeline["marks"] if "step" in mark}
    first, last = min(stages.values(), default=0), max(stages.values(), default=-1)
    own = [step for step in timeline["steps"] if first <= step["step"] <= last]
    is_alone = {step["num_requests"] for step in own} == {1} and len(own) == last - first + 1
    [blocks] = timeline.get("block_ids") or [[]]
    for step in own:
        number, count = step["step"], step["num_requests"]
        part = f"step {number}: {step['num_tokens']} tokens of {count} requests"
        if number == first and blocks:
            part += f"; its blocks in the end: {shorten(blocks)}"
        tokens: list[int] = []
        if is_alone and number >= stages.get("first_token", number + 1):
            tokens, sampled = (
                sampled[: 1 + step["num_accepted"]],
                sampled[1 + step["num_accepted"] :],
            )
        yield step, part, f"sampled {shorten(tokens)}" if tokens else ""


def _step(step: dict[str, Any], part: str, tokens: str, runner: str, model: str) -> Call:
    schedule, gather, forward, sample = (step[time] / 1000 for time in TIMES)
    execute = [_call("InputBatch.gather", gather), _call(f"{runner}.forward", forward, model)]
    calls = [
        _call("Scheduler.schedule", schedule),
        _call(f"{runner}.execute_model", gather + forward, calls=execute),
        _call(f"{runner}.sample_tokens", sample, tokens),
    ]
    if message := _bytes(step):
        calls.append(_call("Outbox.send", text=f"EngineCoreOutputs{message}"))
    return _call("EngineCore.step", (step["end_ms"] - step["begin_ms"]) / 1000, part, calls)


def _call(name: str, seconds: float = 0.0, text: str = "", calls: Sequence[Call] = ()) -> Call:
    return Call(name, seconds, text, [*calls], FILES[KIND.sub("", name)])


def _bytes(told: dict[str, Any]) -> str:
    return f", {told['message_bytes']} bytes" if "message_bytes" in told else ""


def shorten(ids: list[int]) -> str:
    """The first of them."""
    return str(ids[:MOST_IDS])[:-1] + (", ...]" if len(ids) > MOST_IDS else "]")
