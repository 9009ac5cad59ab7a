"""Show the functions that run when a server starts and answers."""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from servd.base.errors import ServdError
from servd.base.private_dir import private_dir
from servd.config import Config
from servd.terminal import engine_flags
from servd.terminal.api_client import Client
from servd.terminal.output import write_file
from servd.terminal.server_process import own_server
from servd.trace import phases, recorder, rendering

ACCESS = ("api_key", "api_key_file")  # nobody else reaches the server
NO_KEYS = {"SERVD_API_KEY": "", "VLLM_API_KEY": ""}  # of the environment
WARM_UP = "What is new takes longer."
TIMEOUT = 60.0  # seconds in which a process answers


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="a message to the model")
    help = "longest answer [%(default)s]"
    count = engine_flags.positive(int)
    parser.add_argument("--max-tokens", type=count, default=8, metavar="N", help=help)
    parser.add_argument("--html", metavar="FILE", default=None, help="write a page with all calls")
    engine_flags.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    options = engine_flags.load_options(arguments)
    Config.load(options)  # a wrong option is named before anything is started
    if arguments.html and not Path(arguments.html).absolute().parent.is_dir():
        raise ServdError(f"--html {arguments.html}: there is no such folder")
    options = {name: value for name, value in options.items() if name not in ACCESS}
    folder = private_dir()
    try:
        answer = record({"log_level": "error", **options}, arguments, folder)
        divided = phases.divide([*recorder.read_processes(folder)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.html:
        page = rendering.draw_page(f"{arguments.prompt} → {answer}", divided)
        write_file("--html", arguments.html, page.encode())
        print(f"written to {arguments.html}")
        return 0
    for line in rendering.draw_text(divided):
        print(line)
    print(f"answer: {answer!r}")
    return 0


def record(options: dict[str, Any], arguments: argparse.Namespace, folder: Path) -> str:
    """Run a server whose processes record their calls into `folder`. Return its answer."""
    paths = [recorder.SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {recorder.FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths), **NO_KEYS}
    print("starting a server, which is slow while it is recorded", file=sys.stderr)
    with own_server(options, env) as connect:
        client = connect()
        model = client.first_model()
        ask(client, model, WARM_UP, 2)
        wait_for(folder, recorder.REQUEST)
        answer = ask(client, model, arguments.prompt, arguments.max_tokens)
        wait_for(folder, recorder.END)
    return answer


def ask(client: Client, model: str, prompt: str, max_tokens: int) -> str:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens}
    chunks = client.stream("/v1/chat/completions", body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def wait_for(folder: Path, name: str) -> None:
    """Wait until each recorded process has answered the file `name`."""
    (folder / name).touch()
    deadline = time.monotonic() + TIMEOUT
    while pids := [pid for pid in running_pids(folder) if not (folder / f"{name}.{pid}").exists()]:
        if time.monotonic() > deadline:
            raise ServdError(f"the processes {pids} do not write their calls")
        time.sleep(recorder.POLL_INTERVAL)


def running_pids(folder: Path) -> list[int]:
    """Return the ids of the recorded processes that have not ended."""
    pids: list[int] = []
    for path in folder.glob("start.*"):
        pid = int(path.suffix[1:])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        pids.append(pid)
    return pids
