"""Coding agents: how each is started with a server, in a TOML file by the name of its command."""

import os
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Self

import msgspec

from servd.base.errors import ServdError
from servd.terminal.server_process import ends
from servd.terminal.waiting import exit_on_signals

FOLDER = Path(__file__).parent
NAMES = sorted(file.stem for file in FOLDER.glob("*.toml"))
STOP_TIMEOUT = 10.0  # seconds


class Agent(msgspec.Struct, forbid_unknown_fields=True):
    """An agent's file. The texts of `command`, `env` and `files` contain `$` and the name of a
    value: url, key, model, context, output and compact (tokens), and folder, which has `files`.
    """

    title: str
    install: str  # command
    command: list[str]
    min_context: int  # tokens that its first requests need
    env: dict[str, str] = {}
    unset: list[str] = []  # variables that would take precedence over `env`
    files: dict[str, str] = {}  # text by name

    @classmethod
    def load(cls, name: str) -> Self:
        """Return an agent by its name. Raises ServdError if it is not installed."""
        text = (FOLDER / f"{name}.toml").read_text(encoding="utf8")
        agent = msgspec.convert(tomllib.loads(text), cls)
        if shutil.which(agent.command[0]) is None:
            raise ServdError(f"{agent.title} is not installed: run `{agent.install}`")
        return agent

    def run(self, values: Mapping[str, str], arguments: Sequence[str]) -> int:
        """Run the agent in the terminal, with its files in the folder of `values`. Return its exit
        code. The agent ends with this process, too.
        """
        for name, text in self.files.items():
            file = Path(values["folder"], name)
            file.write_text(Template(text).substitute(values), encoding="utf8")
        command = [Template(word).substitute(values) for word in self.command]
        env = {name: value for name, value in os.environ.items() if name not in self.unset}
        env |= {name: Template(text).substitute(values) for name, text in self.env.items()}
        exit_on_signals()
        signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the agent's
        process = subprocess.Popen([*command, *arguments], env=env)
        try:
            code = process.wait()
        finally:
            process.terminate()
            if not ends(process, STOP_TIMEOUT):
                process.kill()
        return code if code >= 0 else 128 - code
