"""NaN in the model: the request that meets them ends, and leaves nothing behind for others."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from servd import LLM, SamplingParams
from servd.base.errors import EngineError


@pytest.fixture
def nan_at_position_40(tiny_gpt2: Path, tmp_path: Path) -> Path:
    """A GPT-2 without an embedding for that position."""
    shutil.copytree(tiny_gpt2, tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    weights = load_file(path)
    (name,) = [name for name in weights if name.endswith("wpe.weight")]
    weights[name][40] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    return path.parent


@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype"), [("native", "auto"), ("torch_sdpa", "auto"), ("native", "int8")]
)
def test_a_request_that_meets_nan_ends_and_its_blocks_serve_others(
    nan_at_position_40, backend, kv_cache_dtype
):
    llm = LLM(
        str(nan_at_position_40),
        device="cpu",
        attention_backend=backend,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory="128KiB",  # so that the same blocks are used again
        use_tqdm=False,
    )
    try:
        short = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        prompts = [[*range(i, i + 15)] for i in range(5, 9)]
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, short)]
        with pytest.raises(EngineError, match="NaN or infinite"):
            llm.generate([[*range(5, 48)]], short)
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, short)] == expected
    finally:
        llm.close()
