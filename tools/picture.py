"""Draw docs/images/processes.svg: the processes of `servd serve` and what passes between them."""

from __future__ import annotations

from html import escape

WIDTH = 960
HEIGHT = 470
COLOURS = {
    "api": "#dbeafe",
    "core": "#dcfce7",
    "worker": "#fef3c7",
    "parent": "#f3f4f6",
    "plain": "#ffffff",
}
LINE = "#374151"
TEXT = "#111827"
SOFT = "#4b5563"
STROKE = f'stroke="{LINE}" stroke-width="1.5" marker-end="url(#head)"'


def box(x: int, y: int, w: int, h: int, colour: str, title: str, *lines: str) -> str:
    """A rounded box with a bold title and smaller lines below it."""
    middle = x + w // 2
    parts = [
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{COLOURS[colour]}" '
        f'stroke="{LINE}"/>'
    ]
    parts.append(label(middle, y + 21, title, bold=True))
    parts += [
        label(middle, y + 40 + 17 * i, line, size=12, colour=SOFT) for i, line in enumerate(lines)
    ]
    return "".join(parts)


def label(x: int, y: int, text: str, size: int = 14, bold: bool = False, colour: str = TEXT) -> str:
    """Text centred at x."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="middle"{weight}>'
        f"{escape(text)}</text>"
    )


def arrow(x1: int, y1: int, x2: int, y2: int, dashed: bool = False) -> str:
    """A line with a head at its end."""
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {STROKE}{dash}/>'


def draw() -> str:
    """The whole picture as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        "<title>The processes of servd serve</title>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
        'markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        box(
            390,
            16,
            330,
            62,
            "parent",
            "servd serve",
            "opens the port; starts, watches, stops the others",
        ),
        arrow(450, 78, 330, 126, dashed=True),
        arrow(640, 78, 700, 126, dashed=True),
        # API server
        box(
            188,
            128,
            268,
            326,
            "api",
            "API server (one or more)",
            "speaks text; never imports torch",
        ),
        box(206, 190, 232, 48, "plain", "routes", "FastAPI on uvicorn and uvloop"),
        arrow(322, 238, 322, 256),
        box(206, 258, 232, 48, "plain", "Processor", "chat template, tokenizer, validation"),
        arrow(322, 306, 322, 324),
        box(206, 326, 232, 48, "plain", "AsyncLLM", "one queue for each request"),
        arrow(322, 392, 322, 376),
        box(206, 392, 232, 48, "plain", "OutputProcessor", "detokenizer, stop strings, logprobs"),
        # engine process
        box(574, 128, 372, 326, "core", "EngineCoreProc", "speaks integers; blocks when idle"),
        box(592, 190, 104, 66, "plain", "input", "thread,", "queue"),
        box(592, 374, 104, 66, "plain", "output", "queue,", "thread"),
        arrow(696, 222, 716, 222),
        f'<path d="M716 300H644V372" fill="none" {STROKE}/>',
        box(718, 190, 212, 130, "plain", "EngineCore"),
        label(824, 236, "Scheduler.schedule", 12, colour=SOFT),
        label(824, 256, "Executor.execute_model", 12, colour=SOFT),
        label(824, 276, "Executor.sample_tokens", 12, colour=SOFT),
        label(824, 296, "Scheduler.update_from_output", 12, colour=SOFT),
        arrow(808, 320, 808, 344),
        arrow(858, 344, 858, 322),
        label(756, 338, "SchedulerOutput", 11, colour=SOFT),
        label(890, 338, "tokens", 11, colour=SOFT),
        box(
            718,
            346,
            212,
            94,
            "worker",
            "Worker",
            "speaks tensors; owns a device:",
            "ModelRunner, KV cache, sampler",
            "(in this process when it is one)",
        ),
        # client
        box(14, 183, 116, 62, "plain", "client", "curl, openai SDK"),
        arrow(130, 203, 204, 203),
        arrow(206, 227, 132, 227),
        label(158, 195, "JSON", 11, colour=SOFT),
        label(158, 243, "SSE", 11, colour=SOFT),
        # channel
        f'<path d="M438 350H466V222H590" fill="none" {STROKE}/>',
        arrow(592, 416, 440, 416),
        label(520, 214, "EngineCoreRequest", 11, colour=SOFT),
        label(520, 314, "ZeroMQ", 11, colour=SOFT),
        label(520, 330, "msgpack", 11, colour=SOFT),
        label(516, 408, "EngineCoreOutputs", 11, colour=SOFT),
        "</svg>\n",
    ]
    return "\n".join(parts)
