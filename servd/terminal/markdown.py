"""Shows answers in a terminal as they arrive: Markdown with highlighted code."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from servd.base import log
from servd.terminal.conversation import Show

MAX_REDRAWN = 4000  # characters of a block; rendering more takes longer than a refresh
FENCE = re.compile(r" *(`{3,}|~{3,})")


class Block:
    """A block of an answer without blank lines around it, or its last `height` lines."""

    def __init__(self, text: str, is_reasoning: bool, height: int = 0) -> None:
        self.text = text
        self.is_reasoning = is_reasoning
        self.height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        content = Markdown(self.text, code_theme="ansi_dark")
        if self.is_reasoning:
            content = Text(self.text, style="dim")
        lines = console.render_lines(content, options, pad=False)
        texts = ["".join(segment.text for segment in line).strip() for line in lines]
        filled = [number for number, text in enumerate(texts) if text]
        lines = lines[filled[0] : filled[-1] + 1] if filled else []
        for line in lines[-self.height :]:
            yield from line
            yield Segment.line()


@contextmanager
def show_markdown() -> Iterator[Show]:
    """Yield a function that shows pieces of an answer."""
    with Live(refresh_per_second=8, transient=True) as live:
        answer = AnswerView(live)
        try:
            live.console.file.write("\x1b[?2004h")  # lines pasted meanwhile are one message, too
            yield answer.add
        finally:
            answer.finish(len(answer.text))
            live.console.file.write("\x1b[?2004l")


class AnswerView:
    """An answer on the screen. A finished block is printed once; only the open one is redrawn."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.text = ""  # of the open block
        self.is_reasoning = False

    def add(self, text: str, is_reasoning: bool | None) -> None:
        if is_reasoning is None:
            self.live.update(Text(text, style="dim"))
            return
        if is_reasoning != self.is_reasoning:
            self.finish(len(self.text))
        self.is_reasoning = is_reasoning
        self.text += log.escape(text.replace("\r", ""), "\n\t")
        self.finish(find_open_block(self.text) if "\n" in text else 0)

    def finish(self, end: int) -> None:
        """Print the text before `end`, and show the rest as the open block."""
        finished = self.text[:end].strip("\n")
        self.text = self.text[end:]
        begin, _, _ = self.text.partition("\n")  # of code: its language
        text = f"{begin[:80]}\n{self.text[-MAX_REDRAWN:]}"
        if len(self.text) < MAX_REDRAWN:
            text = self.text
        # What is above the screen could not be redrawn.
        tail = Block(text, self.is_reasoning, self.live.console.height - 2)
        with self.live.console as console:  # one write, so that nothing flickers
            self.live.update(tail, refresh=bool(finished))
            if finished:
                console.print(Block(finished, self.is_reasoning), "")


def find_open_block(text: str) -> int:
    """Return where the last block of Markdown begins. Blank lines divide blocks, except in code and
    before what is indented, which belongs to a list.
    """
    fence = ""
    begin = 0
    place = 0
    was_blank = False
    for line in text.split("\n"):
        if not fence and was_blank and line[:1].strip():
            begin = place
        if match := FENCE.match(line):
            if not fence:
                fence = match[1]
            elif line.strip().startswith(fence) and not line.strip(f" {fence[0]}"):
                fence = ""
        was_blank = not line.strip()
        place += len(line) + 1
    return begin
