"""The description of a model as Ollama's /api/show has it, for that route and `servd show`."""

from pathlib import Path
from typing import Any

from servd.api.engine.processor import Processor
from servd.checkpoint import facts


def describe_model(processor: Processor, name: str) -> dict[str, Any]:
    """Return a model's description. Reads the headers of the weight files at its first call."""
    spec = processor.spec
    family = spec.model_type
    level = processor.config.model.quantization
    info: dict[str, Any] = {"general.architecture": family, "general.basename": name}
    described: dict[str, Any] = {"model_info": info, "template": processor.chat_template.source}
    size = ""
    if spec.folder:
        found = facts.read_facts(Path(spec.folder))
        level = level or found.precision
        info["general.parameter_count"] = found.num_parameters
        size = format_count(found.num_parameters)
        described["size"] = facts.count_bytes(Path(spec.folder))
        described["license"] = found.license
    for key, value in (
        ("context_length", processor.max_model_len),
        ("embedding_length", spec.hidden_size),
        ("block_count", spec.num_layers),
    ):
        info[f"{family}.{key}"] = value
    capabilities = ["completion"] if processor.pooling.is_causal else ["embedding"]
    capabilities += ["tools"] if processor.model_format.tool_parser else []
    capabilities += ["thinking"] if processor.model_format.reasoning_parser else []
    details = {"family": family, "parameter_size": size, "quantization_level": level or spec.dtype}
    return described | {"capabilities": capabilities, "details": details}


def format_count(number: int) -> str:
    """Return a number of parameters as text, "" if it is 0: "7.6B", "596M"."""
    if number >= 1e9:
        return f"{number / 1e9:.3g}B"
    return f"{number / 1e6:.3g}M" if number else ""
