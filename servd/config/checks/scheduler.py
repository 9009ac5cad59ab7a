"""Checks the lengths of contexts, steps and batches, and chooses them."""

from servd.base.errors import ConfigError
from servd.checkpoint import pooling
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.multimodal_config import MultiModalSpec
from servd.config import Config
from servd.config.checks.model import resolve_states, resolve_whole_prompts
from servd.config.data_parallel import Decision

WHOLE_PICTURE = 256  # tokens that a step computes together: Gemma 3's, without crops


def resolve_lengths(config: Config, spec: ModelSpec) -> dict[str, Decision]:
    files = pooling.read(spec)
    on_cuda = config.parallel.device == "cuda"
    decided = {} if files.is_causal else resolve_whole_prompts(config, spec)
    if spec.keeps_state:
        decided |= resolve_states(config, spec)
    max_model_len = config.model.max_model_len
    if max_model_len is None:
        max_model_len = files.max_tokens or spec.max_position_embeddings
        decided["max_model_len"] = Decision(max_model_len, "the positions that the model has")
    elif max_model_len > (positions := pooling.num_positions(spec)):
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model has positions for {positions} tokens"
        )
    if config.model.shorten_max_model_len is None:
        is_free = config.model.max_model_len is None
        why = f"--max-model-len was {'not ' if is_free else ''}given"
        decided["shorten_max_model_len"] = Decision(is_free, why)
    where = "on CUDA" if on_cuda else "on a CPU"
    max_num_seqs = config.scheduler.max_num_seqs
    if max_num_seqs is None:
        max_num_seqs = 256 if on_cuda else 64
        decided["max_num_seqs"] = Decision(max_num_seqs, "the default " + where)
    budget = config.scheduler.max_num_batched_tokens
    is_whole = not (files.is_causal and config.scheduler.enable_chunked_prefill)
    longest = max_model_len if is_whole else 1
    if budget is None:
        budget = max(8192 if on_cuda else 512, max_num_seqs, longest)
        multimodal = None if config.multimodal.language_model_only else spec.multimodal
        if isinstance(multimodal, MultiModalSpec) and multimodal.is_bidirectional:
            budget = max(budget, max_num_seqs + 2 * WHOLE_PICTURE)  # see Processor
        why = f"the default {where}, and at least --max-num-seqs"
        decided["max_num_batched_tokens"] = Decision(budget, why)
    elif budget < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is below --max-num-seqs {max_num_seqs}: "
            "a step could not hold one token of each request"
        )
    elif budget < longest:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is below the {longest} tokens of "
            "--max-model-len: without chunked prefill, such a prompt would never run"
        )
    return decided
