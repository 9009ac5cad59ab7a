"""servd beside transformers on a folder that may be odd: the same answer, or a refusal."""

import logging
import random
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from servd.base.errors import ConfigError
from servd.checkpoint import pooling
from servd.launch import find_and_resolve
from servd.messages.params import PoolingParams
from tests.parity.families import ENCODERS
from tests.worker.driver import Driver, config_for

PROMPT = random.Random(1).choices(range(5, 150), k=37)  # equal ones show no positions
TOLERANCE = 1e-3  # of logits, which other values of keys change by more
Outcome = Literal["equal", "refused", "no reference", "different"]


def compare(folder: Path) -> tuple[Outcome, str]:
    """Return how servd's logits of a prompt compare with those of transformers, and the details.
    Other errors than ConfigError are raised.
    """
    try:
        got = answer_of_servd(folder)
    except ConfigError as error:
        return "refused", str(error)
    try:
        expected = answer_of_transformers(folder)
    except Exception as error:  # of strict configurations, of shapes, of code that reads a null
        return "no reference", repr(error)
    if expected is None:
        return "no reference", "weights are missing"
    distance = (got - expected).abs().max().item()
    return ("equal" if distance <= TOLERANCE else "different"), f"{distance:.2g}"


def answer_of_servd(folder: Path) -> torch.Tensor:
    """Return the logits [vocab] after the prompt; of an encoder its hidden states, flat."""
    _, spec, _ = find_and_resolve(config_for(folder, max_model_len=64))
    if not pooling.is_encoder(spec):
        driver = Driver(config_for(folder))
        slot = driver.add(PROMPT)
        driver.generate([slot], 1)
        return driver.logits[slot][0]
    options = {"block_size": 16, "enable_prefix_caching": False, "max_model_len": 64}
    driver = Driver(config_for(folder, **options))
    slot = driver.add(PROMPT, PoolingParams(pooling="all", normalize=False))
    output = driver.step({slot: driver.num_left(slot)})
    return torch.frombuffer(bytearray(output.pooled[0]), dtype=torch.float32)


@torch.inference_mode()
def answer_of_transformers(folder: Path) -> torch.Tensor | None:
    """Return what `answer_of_servd` should; None if weights were missing or did not fit."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # before 5.24 the default leaves the cap out
    is_encoder = config.model_type in ENCODERS
    kind: Any = transformers.AutoModel if is_encoder else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, **options)
    # An expert under another name is missing without a word: experts are one tensor there.
    are_experts_lost = any("experts" in name for name in info["unexpected_keys"])
    if info["missing_keys"] or info["mismatched_keys"] or are_experts_lost:
        return None
    output = model.eval()(torch.tensor([PROMPT]))
    return output.last_hidden_state[0].flatten() if is_encoder else output.logits[0, -1]
