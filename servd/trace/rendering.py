"""Draws phases as text or as a page."""

import html
from collections.abc import Iterator, Sequence
from itertools import groupby

from servd.trace.phases import Phase
from servd.trace.recorder import FunctionCall

MIN_SHARE = (
    0.01  # of a phase's function: shorter calls are counted in the text, and closed in the page
)
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>servd trace</title>
<meta name="color-scheme" content="light dark"><style>
body { font: 14px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }
details, .call { margin-left: 1.2em } summary { cursor: pointer }
code { font-size: 13px } meter { width: 6em; height: .8em } small { opacity: .7 }
</style>"""


def draw_text(phases: Sequence[Phase]) -> Iterator[str]:
    """Yield the lines of a text."""
    for number, phase in enumerate(phases, 1):
        yield f"{number}. {phase.name}: {phase.text}"
        for process, group in groupby(phase.calls, lambda pair: pair[0]):
            yield f"   {process}"
            for _, call in group:
                yield from _draw_calls([call], call.own_ns, "   ")
        yield ""


def _draw_calls(calls: Sequence[FunctionCall], whole_ns: int, prefix: str) -> Iterator[str]:
    long_calls = [call for call in calls if call.took_ns >= MIN_SHARE * whole_ns]
    num_short = len(calls) - len(long_calls)
    for index, call in enumerate(long_calls):
        is_last = index == len(long_calls) - 1 and not num_short
        branch, beside = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        phase = f" (see {call.phase})" if call.phase else ""
        name = f"{prefix}{branch}{call.name}{phase}"
        times = f" x{call.count}" if call.count > 1 else ""
        yield f"{name:<72} {call.took_ns / 1e6:>10.3f} ms{times:<6} {call.file}:{call.line}"
        yield from _draw_calls(call.calls, whole_ns, prefix + beside)
    if num_short:
        yield f"{prefix}└─ {num_short} shorter"


def draw_page(title: str, phases: Sequence[Phase]) -> str:
    """Return an HTML document."""
    parts = [HEAD, f"<h1>{html.escape(title)}</h1>"]
    for number, phase in enumerate(phases, 1):
        text = html.escape(phase.text)
        parts.append(f"<h2>{number}. {html.escape(phase.name)}</h2><p>{text}</p>")
        for process, group in groupby(phase.calls, lambda pair: pair[0]):
            parts.append(f"<h3>{html.escape(process)}</h3>")
            parts += [_page_call(call, call.own_ns) for _, call in group]
    return "\n".join([*parts, "</html>\n"])


def _page_call(call: FunctionCall, whole_ns: int) -> str:
    share = call.took_ns / (whole_ns or 1)
    times = f" x{call.count}" if call.count > 1 else ""
    phase = f" (see {html.escape(call.phase)})" if call.phase else ""
    line = (
        f'<meter value="{min(share, 1):.4f}"></meter> <code>{html.escape(call.name)}</code>{phase} '
        f"{call.took_ns / 1e6:.3f} ms{times} <small>{html.escape(call.file)}:{call.line}</small>"
    )
    if not call.calls:
        return f'<div class="call">{line}</div>'
    is_open = " open" if share >= MIN_SHARE else ""
    calls = "".join(_page_call(inner, whole_ns) for inner in call.calls)
    return f"<details{is_open}><summary>{line}</summary>{calls}</details>"
