"""The description of a model as Ollama's /api/show has it, for that route and `servd show`."""

from pathlib import Path
from typing import Any

from servd.api.engine.processor import Processor
from servd.api.text.tokenizer import Tokenizer
from servd.checkpoint import model_spec
from servd.checkpoint.facts import read_facts
from servd.config import Config


def describe_folder(folder: Path, name: str) -> dict[str, Any]:
    """Return the description of a model that no server has loaded."""
    spec = model_spec.read_spec(folder)
    config = Config.load({"model": str(folder)})
    tokenizer = Tokenizer.load(str(folder))
    return describe_model(Processor(config, spec, tokenizer, spec.max_position_embeddings), name)


def describe_model(processor: Processor, name: str) -> dict[str, Any]:
    """Return a model's description. Reads the headers of the weight files at its first call."""
    spec = processor.spec
    family = spec.model_type
    facts = read_facts(spec.folder)
    level = processor.config.model.quantization or facts.precision or spec.dtype
    capabilities = ["completion"] if processor.pooling.is_causal else ["embedding"]
    capabilities += ["tools"] if processor.model_format.tool_parser else []
    capabilities += ["vision"] if processor.sees else []
    capabilities += ["thinking"] if processor.model_format.reasoning_parser else []
    return {
        "capabilities": capabilities,
        "details": {
            "family": family,
            "parameter_size": facts.parameter_size,
            "quantization_level": level,
        },
        "license": facts.license,
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": facts.num_parameters,
            f"{family}.context_length": processor.max_model_len,
            f"{family}.embedding_length": spec.hidden_size,
            f"{family}.block_count": spec.num_layers,
        },
        "size": facts.num_bytes,
        "template": processor.chat_template.source,
    }
