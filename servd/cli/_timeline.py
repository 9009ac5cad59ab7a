"""A timeline of a server as calls: what lies between two of its marks has the name of the function
that does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from servd.cli._calls import Call, shorten

# Stage of a mark -> what was done until then; before the engine has the request, and after.
BEFORE = {
    "parsed": "context.read_body",
    "adapted": "Adapters.find",
    "templated": "ChatTemplate.render",
    "tokenised": "Tokenizer.encode",
    "checked": "Processor.check_structured_output",
    "sent": "EngineCoreClient.send",
}
ENGINE = {"compiled": "GrammarManager.take", "queued": "EngineCoreProc.receive"}
AFTER = {
    "returned": "EngineCoreClient.drain",
    "detokenised": "OutputProcessor.process",
    "written": "RequestContext.__call__",
}
STEP = {  # time of a step -> what took it; the second is a part of the third
    "schedule_ms": "Scheduler.schedule",
    "prepare_ms": "InputBatch.gather",
    "forward_ms": "ModelRunner.forward",
    "sample_ms": "ModelRunner.sample_tokens",
}


def calls_of(timeline: dict[str, Any], prompt: list[int], sampled: list[int]) -> list[Call]:
    """The way of a request with one choice, and where its time went.

    Args:
        timeline: with the header X-Servd-Watch, so that it has messages and blocks.
        prompt: token ids.
        sampled: token ids.
    """
    told = {
        "tokenised": f"{len(prompt)} prompt tokens {shorten(prompt)}",
        "sent": f"EngineCoreRequest{_bytes(timeline)}",
        "detokenised": f"{len(sampled)} tokens {shorten(sampled)}",
    }
    marks = timeline["marks"]

    def marked(name: str, stages: dict[str, str]) -> Call:
        calls = [
            _call(stages[m["stage"]], m["at_ms"] - m["took_ms"], m["took_ms"], told.get(m["stage"]))
            for m in marks
            if m["stage"] in stages
        ]
        return Call(name, calls=calls)

    engine = marked("engine", ENGINE)
    engine.calls += _steps(timeline, [m["step"] for m in marks if "step" in m])
    request = Call(timeline["id"], text=timeline["explanation"])
    request.seconds = timeline["wall_ms"] / 1000
    meanings = {cause["cause"]: cause["meaning"] for cause in timeline["causes"]}
    for span in timeline["spans"]:
        ms = span["end_ms"] - span["begin_ms"]
        request.calls.append(_call(span["cause"], span["begin_ms"], ms, meanings[span["cause"]]))
    return [
        marked("API server, before", BEFORE),
        engine,
        marked("API server, after", AFTER),
        request,
    ]


def _steps(timeline: dict[str, Any], numbers: list[int]) -> Iterator[Call]:
    """Those from its first to its last, as far as the timeline has them."""
    [blocks] = timeline.get("block_ids") or [[]]
    for step in timeline["steps"]:
        if not numbers or not numbers[0] <= step["step"] <= numbers[-1]:
            continue
        text = (
            f"step {step['step']}: {step['num_tokens']} tokens of {step['num_requests']} requests"
        )
        if step["step"] == numbers[0] and blocks:
            text += f"; its blocks in the end: {shorten(blocks)}"
        call = _call("EngineCore.step", step["begin_ms"], step["end_ms"] - step["begin_ms"], text)
        schedule, gather, forward, sample = (
            _call(name, step["begin_ms"], step[time]) for time, name in STEP.items()
        )
        execute = _call("ModelRunner.execute_model", step["begin_ms"], 0)
        execute.seconds, execute.calls = gather.seconds + forward.seconds, [gather, forward]
        call.calls = [schedule, execute, sample]
        if message := _bytes(step):
            call.calls.append(Call("Outbox.send", text=f"EngineCoreOutputs{message}"))
        yield call


def _call(name: str, begin_ms: float, ms: float, text: str | None = None) -> Call:
    return Call(name, begin=begin_ms / 1000, seconds=ms / 1000, text=text or "")


def _bytes(told: dict[str, Any]) -> str:
    return f", {told['message_bytes']} bytes" if "message_bytes" in told else ""
