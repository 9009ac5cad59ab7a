"""Self-check: before serving, compares embeddings or scores of a pooling model with a reference by
transformers, which `python -m servd.worker.runner.reference_check` computes.

The reference runs in its own process while the model loads, because transformers takes seconds and
hundreds of megabytes. It is cached. The comparison runs at every start.
"""

import hashlib
import json
import logging
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

import servd
from servd.base.errors import UnsupportedModel
from servd.base.python_command import python_command
from servd.checkpoint import pooling, remote_code_configs
from servd.checkpoint.config_json import read_json
from servd.checkpoint.model_spec import ModelSpec, read_spec
from servd.checkpoint.pooling import PoolingSpec
from servd.checkpoint.quantization_config import quantization_of
from servd.checkpoint.weight_files import find_weight_files
from servd.messages.engine import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput
from servd.messages.params import PoolingParams
from servd.worker.device.device import cache_folder
from servd.worker.runner.model_runner import ModelRunner

log = logging.getLogger("servd.worker")

Weights = list[tuple[nn.Parameter, Tensor]]

LENGTHS = (5, 17, 40)  # tokens of the prompts
TIMEOUT = 600.0  # seconds
# Allowed distance from the reference, relative to its norm, for the order of sums and rounding.
MARGINS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
QUANTIZED_MARGIN = 0.3
LEAST_LOGIT = 5.0  # a typical large logit


def prompts(spec: ModelSpec, limit: int) -> list[list[int]]:
    draw = random.Random(0)
    pad = spec.config.get("pad_token_id")
    lengths = [min(length, limit // len(LENGTHS)) for length in LENGTHS]
    drawn = [draw.randrange(spec.vocab_size) for _ in range(2 * sum(lengths))]
    ids = [token_id for token_id in drawn if token_id != pad]
    return [[ids.pop() for _ in range(length)] for length in lengths]


class ReferenceCheck:
    """Starts computing the reference. `run` waits for it and compares. `runner`: the runner of the
    model to check, whose weights need not be loaded yet.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        spec = runner.spec
        config = runner.config
        self.process: subprocess.Popen[bytes] | None = None
        self.cached: Path | None = None  # the reference's file; None: nothing is compared
        self.files = pooling.read(spec)
        longest = min(max(LENGTHS), runner.max_model_len)
        limit = min(config.scheduler.max_num_batched_tokens or 0, len(LENGTHS) * longest)
        self.prompts = prompts(spec, limit)
        if (
            not config.model.check_vectors
            or config.model.load_format == "dummy"
            or self.files.task == "generate"
            or runner.max_num_seqs < len(LENGTHS)
            or quantization_of(spec.folder) is not None
            or config.model.hf_overrides  # the reference would not have the overrides
        ):
            return
        self.cached = _cached(spec, config.model.load_format, len(self.prompts[-1]))
        if runner.parallel.rank == 0 and not self.cached.exists():
            module = "servd.worker.runner.reference_check"
            command = python_command(module, spec.folder, str(limit), str(self.cached))
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )

    def run(self, run_step: Callable[[SchedulerOutput], ModelRunnerOutput]) -> None:
        """Compare vectors; call this when steps can run. Raises UnsupportedModel if the model's
        vectors differ from the reference.
        """
        if self.cached is None:
            return
        vectors = self._compute(run_step)
        if self.runner.parallel.rank != 0:
            return
        if self.process is not None:
            try:
                _, stderr = self.process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                stderr = b"it took too long"
            if self.process.returncode != 0:
                reason = (stderr.decode(errors="replace").strip() or "no reason given").splitlines()
                log.warning(
                    "vectors are not checked: transformers has no reference (%s)", reason[-1]
                )
                return
        self._compare(vectors, json.loads(self.cached.read_text()))

    def _compare(self, vectors: list[np.ndarray], reference: list[list[float]]) -> None:
        runner = self.runner
        margin = QUANTIZED_MARGIN if runner.config.model.quantization else MARGINS[runner.dtype]
        # A difference of two logits may be near zero, but its rounding error is that of the logits.
        min_norm = LEAST_LOGIT if self.files.score_tokens else 1e-6
        distances = [
            float(np.linalg.norm(vector - np.array(other)) / max(np.linalg.norm(other), min_norm))
            if len(vector) == len(other)
            else math.inf
            for vector, other in zip(vectors, reference, strict=True)
        ]
        numbers = ", ".join(f"{distance:.2g}" for distance in distances)
        if not max(distances) <= margin:  # NaN fails, too
            raise UnsupportedModel(
                f"{runner.spec.folder}: vectors of {len(vectors)} prompts differ from those of "
                f"transformers in float32 by {numbers} of their length; the limit for "
                f"{runner.dtype} is {margin:g}, so the model is not served. Report it, or switch "
                "the check off with --no-check-vectors"
            )
        log.info(
            "vectors equal the reference of transformers within %s (limit %g)", numbers, margin
        )

    def _compute(
        self, run_step: Callable[[SchedulerOutput], ModelRunnerOutput]
    ) -> list[np.ndarray]:
        runner = self.runner
        new = []
        scheduled = []
        block = 0
        size = runner.config.cache.block_size
        for slot, ids in enumerate(self.prompts):
            end = block - (-len(ids) // size) * len(runner.kv_windows)
            blocks = list(range(block, end))
            block = end
            new.append(NewRequest(slot, ids, len(ids), 0, [], _params(self.files, ids), []))
            scheduled.append(ScheduledRequest(slot, len(ids), blocks, True, 0))
        pooled = run_step(SchedulerOutput(0, scheduled, new, [])).pooled
        run_step(SchedulerOutput(0, [], [], [*range(len(new))]))
        return [np.frombuffer(pooled[row], np.float32) for row in range(len(new))]


def _params(files: PoolingSpec, ids: list[int]) -> PoolingParams:
    if files.task != "classify":
        return files.complete(PoolingParams())
    second_text = len(ids) // 2 if files.has_token_types else 0
    return files.complete(PoolingParams(task="classify", normalize=False, second_text=second_text))


def _cached(spec: ModelSpec, load_format: str, length: int) -> Path:
    folder = Path(spec.folder)
    files = [
        *find_weight_files(folder, load_format),
        *sorted(folder.glob("*.json")),
        *sorted(folder.glob("*/*.json")),
        *sorted(folder.glob("*/*.safetensors")),  # of Dense
    ]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = repr((str(folder.resolve()), stats, servd.__version__, length))
    return cache_folder("references") / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


# ---- in the other process ----


@torch.inference_mode()
def reference(folder: str, limit: int) -> list[list[float]]:
    """Return the prompts' vectors, computed with transformers and plain torch in float32."""
    import transformers

    from servd.worker.output_heads.pooler import score_of

    spec = read_spec(folder)
    files = pooling.read(spec)
    is_head = files.task == "classify"
    kind: Any = transformers.AutoModel
    if files.score_tokens:
        kind = transformers.AutoModelForCausalLM
    elif is_head:
        kind = transformers.AutoModelForSequenceClassification
    options: dict[str, Any] = {"dtype": "auto", "attn_implementation": "eager"}
    if read_json(Path(folder) / "config.json").get("model_type") == remote_code_configs.GTE:
        options["config"] = transformers.CONFIG_MAPPING["gte"].from_dict(spec.config)
    model = kind.from_pretrained(folder, **options).eval()
    _compute_in_float32(model)
    vectors = []
    for ids in prompts(spec, limit):
        options = {}
        if is_head and files.has_token_types:
            options["token_type_ids"] = (torch.arange(len(ids)) >= len(ids) // 2).long()[None]
        output = model(torch.tensor([ids]), **options)
        if files.score_tokens:
            vector = score_of(output.logits[0, -1:].float(), files.score_tokens)[0]
        elif is_head:
            vector = output.logits[0].float()
        else:
            hidden = output.last_hidden_state[0].float()  # [num_tokens, hidden]
            vector = _run_modules(Path(folder), hidden)
        vectors.append(vector.tolist())
    return vectors


def _run_modules(folder: Path, hidden: Tensor) -> Tensor:
    """Return the vector from hidden states [num_tokens, hidden], by the modules after the
    Transformer as sentence-transformers runs them: each reads and writes features by name. Shares
    no code with servd's reader of these files, to find its mistakes.
    """
    file = folder / "modules.json"
    modules = json.loads(file.read_text("utf8")) if file.exists() else [{}, {"type": "Pooling"}]
    features = {"token_embeddings": hidden}
    for module in modules[1:]:
        place = folder / module.get("path", "missing")
        config = json.loads(f.read_text()) if (f := place / "config.json").exists() else {}
        source = config.get("module_input_name", "sentence_embedding")
        target = config.get("module_output_name") or source
        match module["type"].split(".")[-1]:
            case "Pooling":
                flags = [key for key in config if key.startswith("pooling_mode_") and config[key]]
                modes = config.get("pooling_mode") or flags or "mean"
                vectors = {"cls": hidden[0], "mean": hidden.mean(0), "lasttoken": hidden[-1]}
                (mode,) = [modes] if isinstance(modes, str) else modes
                mode = mode.removeprefix("pooling_mode_").removesuffix("_token")
                features["sentence_embedding"] = vectors[mode.removesuffix("_tokens")]
            case "Dense":
                path = config.get("activation_function", "torch.nn.Tanh")
                sizes = config["in_features"], config["out_features"]
                linear = nn.Linear(*sizes, bias=config.get("bias", True))
                tensors = safetensors.torch.load_file(place / "model.safetensors")
                linear.load_state_dict({k.removeprefix("linear."): t for k, t in tensors.items()})
                features[target] = getattr(nn, path.split(".")[-1])()(linear(features[source]))
            case "Normalize":
                features[target] = nn.functional.normalize(features[source], dim=-1)
    return features["sentence_embedding"]


def _compute_in_float32(model: nn.Module) -> None:
    """Convert each module's weights to float32 while it runs, and the output of embeddings."""
    for module in model.modules():
        weights = [(weight, weight.data) for weight in module.parameters(recurse=False)]
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _, __, output: output.float())
        elif any(weight.dtype != torch.float32 for weight, _ in weights):

            def widen(_: nn.Module, __: Any, weights: Weights = weights) -> None:
                for weight, _narrow in weights:
                    weight.data = weight.data.float()

            def restore(_: nn.Module, __: Any, ___: Any, weights: Weights = weights) -> None:
                for weight, narrow in weights:
                    weight.data = narrow

            module.register_forward_pre_hook(widen)
            module.register_forward_hook(restore)


def main() -> None:
    """Write the reference of the model in a folder to a file. Arguments: FOLDER LIMIT FILE."""
    folder, limit, file = sys.argv[1:]
    text = json.dumps(reference(folder, int(limit)))
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(f".{os.getpid()}")
    scratch.write_text(text)
    scratch.rename(target)


if __name__ == "__main__":
    main()
