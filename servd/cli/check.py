"""Check this machine and a model's files before a server starts."""

import argparse
import itertools
import logging
import os
import resource
import shutil
import socket
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from servd import launch
from servd.api.text.chat_template import ChatTemplate
from servd.api.text.tokenizer import Tokenizer
from servd.base import log, plugins
from servd.base.errors import ConfigError, ModelNotFound
from servd.base.sizes import format_bytes
from servd.checkpoint import pooling, weight_files
from servd.checkpoint.account import Account
from servd.checkpoint.hub import DEMO_MODEL, local_folder
from servd.checkpoint.lora import AdapterFiles, parse_module
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.config.machine import look_at_machine
from servd.launch.accounts import accounts_of
from servd.terminal import engine_flags

WORKER = "servd.worker"
HUB_TIMEOUT = 3.0  # seconds
SMALLEST = 1 << 30  # bytes of memory, shared memory or disk that a server gets along with

Status = Literal["ok", "warning", "failed"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    status: Status
    text: str
    hint: str = msgspec.field(default="", name="remedy")  # in --json


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `servd serve`, for which the machine is checked."""
    parser.usage = "%(prog)s [MODEL] [OPTION ...]"
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    engine_flags.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if a server would not start."""
    config = Config.load(engine_flags.load_options(arguments))
    logging.getLogger("servd").setLevel(logging.CRITICAL)  # the check reports the same problems
    findings: list[Finding] = []
    for finding in itertools.chain.from_iterable(check(config) for check in CHECKS):
        findings.append(finding)
        if not arguments.json:
            words = ": ".join(filter(None, (finding.text, finding.hint)))
            print(f"{finding.status:<9}{finding.name:<14} {log.escape(words)}", flush=True)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    return int(any(finding.status == "failed" for finding in findings))


def judge(is_fine: bool, name: str, text: str, hint: str, otherwise: Status = "warning") -> Finding:
    """Return a finding, without the hint if all is fine."""
    return Finding(name, "ok", text) if is_fine else Finding(name, otherwise, text, hint)


# ---- the machine ----


def check_folders(config: Config) -> Iterator[Finding]:
    """Check the folders of models, converted tokenizers and sockets."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    hub = os.environ.get("HF_HOME") or f"{home}/huggingface"
    models = config.model.download_dir or os.environ.get("HF_HUB_CACHE") or f"{hub}/hub"
    for name, folder, variable in (
        ("models", models, "HF_HOME"),
        ("tokenizers", f"{home}/servd", "XDG_CACHE_HOME"),
        ("sockets", tempfile.gettempdir(), "TMPDIR"),
    ):
        place = next(p for p in (Path(folder), *Path(folder).absolute().parents) if p.exists())
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            hint = f"set {variable} to a folder of yours"
            yield Finding(name, "failed", f"{folder} cannot be written", hint)
        else:
            free = shutil.disk_usage(place).free
            text = f"{folder}, {format_bytes(free)} free"
            yield judge(free >= SMALLEST, name, text, "make room: models may not fit")


def check_limits(config: Config) -> Iterator[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.server.max_connections + 64  # -1 is no limit
    hint = f"docker run --ulimit nofile={needed}, or --max-connections {max(files - 64, 1)}"
    yield judge(not 0 <= files < needed, "open files", f"at most {files}", hint)
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_fine = locked < 0 or not look_at_machine().num_gpus
    text = "no limit" if locked < 0 else format_bytes(locked)
    yield judge(is_fine, "locked memory", text, "docker run --ulimit memlock=-1, for several GPUs")


def check_memory(config: Config) -> Iterator[Finding]:
    """Check main memory, shared memory and CPUs, within the limits of the control group."""
    free = plugins.load(f"{WORKER}.device", "device", "available_memory")()
    hint = "end other programs, or raise the container's limit"
    yield judge(free >= SMALLEST, "memory", f"{format_bytes(free)} can be used", hint)
    quota = plugins.load(f"{WORKER}.device", "device", "cpu_quota")()
    text = f"{len(os.sched_getaffinity(0))}, control group's quota {quota or 'none'}"
    yield judge(quota is None or quota >= 1, "CPUs", text, "raise the container's quota")
    if os.path.isdir("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total
        is_fine = size >= SMALLEST or config.parallel.num_workers == 1
        hint = "docker run --shm-size 1g: the ranks of --tensor-parallel-size meet there"
        yield judge(is_fine, "shared memory", format_bytes(size), hint)


def check_device(config: Config) -> Iterator[Finding]:
    """Check driver, torch and kernels."""
    machine = look_at_machine()
    if not machine.num_gpus:
        hint = "install NVIDIA's driver, or docker run --gpus all"
        is_fine = config.parallel.device != "cuda"
        yield judge(is_fine, "GPU", "the CUDA driver shows none", hint, "failed")
    else:
        hint = "install a CUDA build of torch"
        yield judge(machine.torch_has_cuda, "GPU", f"{machine.num_gpus} by the driver", hint)
    if machine.num_gpus and machine.torch_has_cuda:
        names = plugins.load(f"{WORKER}.ops", "target", "abilities_of_cuda")()
        yield Finding("GPU kernels", "ok", ", ".join(names))
    library = plugins.load(f"{WORKER}.ops", "native", "library")()
    hint = plugins.load(f"{WORKER}.ops", "native", "explain_absence")()
    text = "none" if library is None else library.name
    yield judge(library is not None, "CPU kernels", text, hint or "unset SERVD_CPU_KERNELS")


def check_hub(config: Config) -> Iterator[Finding]:
    """Check the server that models are downloaded from, or the proxy to that server."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        yield Finding("hub", "ok", "not asked: HF_HUB_OFFLINE")
        return
    try:
        is_here = local_folder(config.model.model or DEMO_MODEL) is not None
    except ConfigError:  # a damaged file, which `check_model` reports
        is_here = True
    if is_here:
        yield Finding("hub", "ok", "not asked: the model is on this machine")
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = urllib.parse.urlsplit(urllib.request.getproxies().get("https") or endpoint)
    try:
        socket.create_connection((url.hostname, url.port or 443), HUB_TIMEOUT).close()
        yield Finding("hub", "ok", f"{url.hostname} answers")
    except OSError as error:
        hint = "pass a local folder, or set HF_HUB_OFFLINE=1 for models in the cache"
        yield Finding("hub", "warning", f"{url.hostname} cannot be reached ({error})", hint)


# ---- the model ----


def check_model(config: Config) -> Iterator[Finding]:
    """Check all parts of a model that a server reads."""
    name = "model"
    try:
        is_allowed = config.model.allow_unknown_keys
        config, spec, _ = launch.find_and_resolve(config.replace(allow_unknown_keys=True))
        layers = f"{spec.num_layers} layers of {spec.hidden_size}"
        yield Finding(name, "ok", f"{config.model.model}: {spec.model_type}, {layers}")
        for account in accounts_of(config, spec):
            yield show_account(account, "warning" if is_allowed else "failed")
        for entry in config.lora.lora_modules:
            name, folder = parse_module(entry)
            files = AdapterFiles(folder, allow_unknown_keys=True)
            files.check(config.lora.max_lora_rank, {})
            yield show_account(files.account, "warning" if is_allowed else "failed")
        name = "tokenizer"
        tokenizer = Tokenizer.of_model(config, spec)
        sizes = f"{tokenizer.vocab_size} tokens, and {spec.vocab_size} of the model"
        is_within = tokenizer.vocab_size <= spec.vocab_size
        yield judge(is_within, name, sizes, "texts with the others are refused: use the model's")
        if pooling.read(spec).is_causal:  # an encoder has no chats
            name = "chat template"
            has_one = not ChatTemplate.load(tokenizer, config.server.chat_template).is_default
            text = "is there" if has_one else "none: chats get a plain one"
            yield judge(has_one, name, text, "give one with --chat-template")
        name = "weights"
        if spec.folder and config.model.load_format != "dummy":
            yield check_weights(config, spec)
    except ConfigError as error:
        yield Finding(name, "failed", str(error))


def show_account(account: Account, otherwise: Status) -> Finding:
    """Return what servd makes of the keys of a file."""
    if account.unknown:
        text = f"not understood: {account.in_words}"
        return Finding(account.file, otherwise, text, account.advice)
    text = f"used: {', '.join(account.used) or 'no keys'}"
    if account.without_effect:
        ignored = [f"{key} ({reason})" for key, reason in account.without_effect.items()]
        text += f"; without effect: {', '.join(ignored)}"
    return Finding(account.file, "ok", text)


def check_weights(config: Config, spec: ModelSpec) -> Finding:
    """Check that all weights exist and fit. Raises ConfigError if a file or tensor is missing."""
    if local_folder(config.model.model or "") is None:
        try:
            weight_files.find_weight_files(spec.folder, config.model.load_format)
        except ModelNotFound:
            return Finding("weights", "ok", "on the hub: the first start downloads them")
    plan = plugins.load(f"{WORKER}.runner", "dry_run", "plan")(config, spec)
    text = f"{format_bytes(plan.sizes.weights)} in memory, all tensors are there"
    return judge(not plan.shortage, "weights", text, plan.shortage, "failed")


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    check_folders,
    check_limits,
    check_memory,
    check_device,
    check_hub,
    check_model,
)
