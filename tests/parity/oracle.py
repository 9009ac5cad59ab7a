"""servd beside transformers on a folder that may be odd: the same answer, or a refusal."""

import logging
import random
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from servd.base.errors import ConfigError
from servd.launch import find_and_resolve
from tests.worker.driver import Driver, config_for

PROMPT = [random.Random(1).randrange(5, 150) for _ in range(37)]
TOLERANCE = 1e-3  # of logits, which other values of keys change by more
Outcome = Literal["equal", "refused", "no reference", "different"]


def compare(folder: Path) -> tuple[Outcome, str]:
    """Return how servd's logits of a prompt compare with those of transformers, and the details.
    Other errors than ConfigError are raised.
    """
    try:
        got = logits_of_servd(folder)
    except ConfigError as error:
        return "refused", str(error)
    try:
        expected = logits_of_transformers(folder)
    except Exception as error:  # of strict configurations, of shapes, of code that reads a null
        return "no reference", repr(error)
    if expected is None:
        return "no reference", "weights are missing"
    distance = (got - expected).abs().max().item()
    return ("equal" if distance <= TOLERANCE else "different"), f"{distance:.2g}"


def logits_of_servd(folder: Path) -> torch.Tensor:
    """Return the logits [vocab] after the prompt."""
    find_and_resolve(config_for(folder))
    driver = Driver(config_for(folder))
    slot = driver.add(PROMPT)
    driver.generate([slot], 1)
    return driver.logits[slot][0]


@torch.inference_mode()
def logits_of_transformers(folder: Path) -> torch.Tensor | None:
    """Return the logits [vocab] after the prompt; None if weights were missing or did not fit."""
    options: dict[str, Any] = {}
    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # before 5.24 the default leaves the cap out
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        return None
    return model.eval()(torch.tensor([PROMPT])).logits[0, -1]
