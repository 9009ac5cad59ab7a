"""Prompt: reads messages in a terminal, with editing, history and completion of commands."""

import os
from collections.abc import Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

QUOTES = '"""'


class TerminalPrompt:
    """Pasted lines are one message, and so are lines between triple quotes."""

    def __init__(self, words: Sequence[str]) -> None:
        self.session: PromptSession[str] = PromptSession(
            "> ",
            completer=WordCompleter(words, sentence=True),
            history=open_history(),
            multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
            prompt_continuation="  ",
        )

    def read(self) -> str | None:
        """Return a message; "" after Ctrl-C, None after Ctrl-D."""
        try:
            text = self.session.prompt().strip()
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None
        if text.startswith(QUOTES):
            text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip()
        return text


def is_open(text: str) -> bool:
    """Return whether a text begins with triple quotes and does not end with others."""
    text = text.strip()
    is_whole = len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES)
    return text.startswith(QUOTES) and not is_whole


def open_history() -> History:
    """Return the history in the user's state folder, which nobody else may read."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    file = Path(state) / "servd" / "chat_history"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(0o600)
        file.chmod(0o600)
    except OSError:  # such as a read-only home
        return InMemoryHistory()
    return FileHistory(file)
