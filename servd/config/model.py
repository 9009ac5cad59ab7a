"""The options of the model and of its loading."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from servd.checkpoint.generation_config import GenerationDefaults
from servd.config._section import NotNegative, Positive, Section
from servd.config.speculative import SpeculativeConfig
from servd.messages.params import MAX_CANDIDATES, MAX_LOGPROBS, LogprobsMode


class ModelConfig(Section, frozen=True):
    """Which model, and how it is loaded."""

    model: str | None = None
    """Model to serve: Hugging Face id (`Qwen/Qwen3-0.6B`), local folder or GGUF file. Default: the
    demo model.
    """
    served_model_name: list[str] = []
    """Names that clients may use for the model. Answers show the requested name, or the first.
    Default: MODEL and the name of its folder.
    """
    tokenizer: str | None = None
    """Folder or Hugging Face id of the tokenizer. Default: the model's own."""
    revision: str | None = None
    """Branch, tag or commit on the Hugging Face hub. Default: main."""
    download_dir: str | None = None
    """Folder for downloaded models. Default: the Hugging Face cache."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository to convert its tokenizer. Code of the model
    itself never runs.
    """
    hf_overrides: dict[str, Any] | None = None
    """Change keys of the model's config.json, as JSON: `{"rope_scaling": {"rope_type": "yarn",
    "factor": 4}}` makes contexts four times as long.
    """
    allow_unknown_keys: bool = False
    """Start although the model's files have keys that servd does not understand, and log them: they
    could change answers. `servd check MODEL` lists all keys.
    """
    model_impl: Literal["auto", "servd", "transformers"] = "auto"
    """Code that computes the layers. auto: servd's model file if there is one, else the class of
    transformers.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. auto: the checkpoint's type on CUDA, float32 on a CPU. CPUs
    compute in float32; with bfloat16, AMX, AVX512_BF16 and Arm's BF16 round activations.
    """
    quantization: Annotated[str | None, Meta(extra={"plugins": "servd.worker.quantization"})] = None
    """Quantize weights while loading: int8 to 8 bits, int4 to 5 with scales, fp8 to e4m3 (from
    Hopper). Leave it out for quantized checkpoints: servd detects the format.
    """
    widen_weights: Literal["auto", "always", "never"] = "auto"
    """On CUDA, dequantize quantized weights once, while loading. auto: formats without a fast
    kernel, if the 16-bit weights take at most 70 % of the device's memory. never: only
    experts of such formats.
    """
    quantization_imatrix: str | None = None
    """Importance matrix for --quantization int4: a GGUF file of llama.cpp's `llama-imatrix`."""
    cpu_activation_dtype: Literal["auto", "float32", "int8"] = "auto"
    """Type of activations for weights of 4 or 8 bits, on CPUs with AVX2, VNNI, AMX or Arm's dot
    products. int8 is faster, float32 exact. auto: int8 with --quantization int8 or int4, and for
    GGUF files with blocks.
    """
    max_model_len: Positive | None = None
    """Maximum tokens of a request: prompt plus output. Default: the model's maximum."""
    shorten_max_model_len: bool | None = None
    """Shorten the context, instead of refusing to start, if the KV cache cannot hold one request of
    full length. Default: on unless --max-model-len is given.
    """
    load_format: Literal["auto", "pt", "dummy"] = "auto"
    """Format of the weight files. auto: safetensors or GGUF. pt: pytorch_model*.bin, tensors only.
    dummy: random weights, for tests.
    """
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Values that `logprobs` returns. raw: before penalties and sampling parameters. processed:
    after them. logits: logits instead of log-probabilities.
    """
    max_logprobs: Annotated[int, Meta(ge=-1, le=MAX_CANDIDATES)] = MAX_LOGPROBS
    """Maximum candidates per token in `logprobs`. -1: 512."""
    seed: NotNegative = 0
    """Seed for random (dummy) weights, and for requests without `seed`."""
    generation_config: str = "auto"
    """Source of the default sampling parameters: a folder with a generation_config.json. auto: the
    model's folder. vllm: neutral values.
    """
    override_generation_config: GenerationDefaults | None = None
    """Change the default sampling parameters, as JSON: `{"temperature": 0.6}`. `max_new_tokens`
    limits requests without `max_tokens`.
    """
    speculative_config: SpeculativeConfig | None = None
    """Draft tokens to answer faster, with the same output: a method such as `ngram`, or JSON with
    vLLM's keys. Default: no drafts.
    """
    spec_method: Annotated[str | None, Meta(extra={"plugins": "servd.worker.spec_decode"})] = None
    """Same as `method` in --speculative-config. Default: from the name of the draft model."""
    spec_model: str | None = None
    """Same as `model` in --speculative-config: folder or Hugging Face id of the draft model."""
    spec_tokens: Positive | None = None
    """Same as `num_speculative_tokens` in --speculative-config: maximum drafts of a request per
    step. Default: 5, or the method's own number.
    """
    enforce_eager: bool = False
    """Turn off CUDA graphs, and servd's graphs on a CPU. Slower."""
    compile: bool = False
    """Fuse the layers with torch.compile instead of servd's kernels. Needs CUDA."""
    batch_invariant: bool = False
    """On CUDA, make results independent of other requests in the batch. Slower."""
    check_vectors: bool = True
    """Compare an embedding or classification model with transformers at the start. If they differ,
    servd does not serve it.
    """
