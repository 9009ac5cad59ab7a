"""While a user waits in a terminal: a spinner, and the keys that are typed."""

import re
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from servd.base.log import escape


def spinner(text: str) -> Status:
    """Show a spinner beside a text until the block ends, if stderr is a terminal."""
    return Console(stderr=True, force_terminal=sys.stderr.isatty()).status(text)


def describe_start(log: str) -> Text:
    """Return the last phase of an engine's start in a server's log, which has other lines, too."""
    text = Path(log).read_text(encoding="utf8", errors="replace")
    phases = re.findall(r" INFO +engine\S* +([a-zA-Z ]+)$", text, re.MULTILINE)
    return Text(escape(["starting a server", *phases][-1]))


def exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the process by SystemExit, which leaves nothing open."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))


@contextmanager
def keep_keys() -> Iterator[None]:
    """In a terminal, keep what is typed for the next prompt, also at Ctrl-C, without an echo."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    exit_on_signals()
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[tty.LFLAG] = quiet[tty.LFLAG] & ~(termios.ICANON | termios.ECHO) | termios.NOFLSH
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
