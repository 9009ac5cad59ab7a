"""The options of the model and of its loading."""

from typing import Annotated, Any, Literal

from servd.checkpoint.hf import GenerationDefaults
from servd.config._section import NotNegative, Positive, Section, about
from servd.config.speculative import SpeculativeConfig
from servd.messages.params import MAX_CANDIDATES, MAX_LOGPROBS, LogprobsMode


class ModelConfig(Section, frozen=True):
    """Which model, and how it is loaded."""

    model: Annotated[
        str | None,
        about(
            "Model to serve: Hugging Face id (`Qwen/Qwen3-0.6B`), local folder or GGUF file. "
            "Default: the demo model."
        ),
    ] = None
    served_model_name: Annotated[
        list[str],
        about(
            "Names that clients may use for the model. Answers show the requested name, or the "
            "first. Default: MODEL and the name of its folder."
        ),
    ] = []
    tokenizer: Annotated[
        str | None, about("Folder or Hugging Face id of the tokenizer. Default: the model's own.")
    ] = None
    revision: Annotated[
        str | None, about("Branch, tag or commit on the Hugging Face hub. Default: main.")
    ] = None
    download_dir: Annotated[
        str | None, about("Folder for downloaded models. Default: the Hugging Face cache.")
    ] = None
    trust_remote_code: Annotated[
        bool,
        about(
            "Run Python code from the model's repository to convert its tokenizer. Code of the "
            "model itself never runs."
        ),
    ] = False
    hf_overrides: Annotated[
        dict[str, Any] | None,
        about(
            "Change keys of the model's config.json, as JSON. For contexts four times as long: "
            '`{"rope_scaling": {"rope_type": "yarn", "factor": 4}}`.'
        ),
    ] = None
    model_impl: Annotated[
        Literal["auto", "servd", "transformers"],
        about(
            "Code that computes the layers: servd's model file, or the class of transformers. "
            "auto: servd's file if there is one."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about(
            "Type of weights and activations. auto: the checkpoint's type on CUDA, float32 on a "
            "CPU. On a CPU, 16 bits are for storage only: it computes in float32. But with "
            "bfloat16, matrix products by AMX or AVX512_BF16 round the activations."
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        about(
            "Quantize the weights while loading. int8: 8 bits. int4: 5 bits. fp8: 8-bit floats, "
            "for Hopper and later. Leave it out for a quantized checkpoint: servd detects the "
            "format.",
            extra={"plugins": "servd.worker.quantization"},
        ),
    ] = None
    quantization_imatrix: Annotated[
        str | None,
        about(
            "Importance matrix for --quantization int4: a GGUF file of llama.cpp's "
            "`llama-imatrix`. It states which weights need small rounding errors."
        ),
    ] = None
    cpu_activation_dtype: Annotated[
        Literal["auto", "float32", "int8"],
        about(
            "Type of activations beside weights of 4 or 8 bits, on a CPU with AMX or AVX-512 VNNI. "
            "int8 makes prompts and batches faster, float32 keeps products exact. auto: int8 with "
            "--quantization int8 or int4, float32 for quantized checkpoints."
        ),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None,
        about("Maximum tokens of a request, prompt and output. Default: the model's maximum."),
    ] = None
    shorten_max_model_len: Annotated[
        bool | None,
        about(
            "Shorten the context if the KV cache cannot hold one request of full length, instead "
            "of refusing to start. Default: on unless --max-model-len is given."
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "pt", "dummy"],
        about(
            "Format of the weight files. auto: safetensors or GGUF. pt: pytorch_model*.bin; servd "
            "unpickles tensors only. dummy: random weights, for tests."
        ),
    ] = "auto"
    logprobs_mode: Annotated[
        LogprobsMode,
        about(
            "Values that `logprobs` returns. raw: of the model's logits. processed: after "
            "penalties, biases, grammars, temperature, top-k, top-p and min-p. `_logits`: logits "
            "instead of log-probabilities."
        ),
    ] = "raw_logprobs"
    max_logprobs: Annotated[
        int,
        about(
            f"Maximum candidates per token in `logprobs`. -1: {MAX_CANDIDATES}.",
            ge=-1,
            le=MAX_CANDIDATES,
        ),
    ] = MAX_LOGPROBS
    seed: Annotated[NotNegative, about("Seed of dummy weights and of requests without a seed.")] = 0
    generation_config: Annotated[
        str,
        about(
            "Source of the default sampling parameters. auto: the model's generation_config.json. "
            "vllm: neutral values. Otherwise a folder with a generation_config.json."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        GenerationDefaults | None,
        about(
            'Change the default sampling parameters, as JSON: `{"temperature": 0.6}`. '
            "`max_new_tokens` holds for requests without `max_tokens`."
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        about(
            "Draft tokens ahead of the model to answer faster, with the same output. A method such "
            'as `ngram`, `demo`, or JSON with vLLM\'s keys: `{"method": "ngram", '
            '"num_speculative_tokens": 4}`. Default: no drafts.'
        ),
    ] = None
    spec_method: Annotated[
        str | None,
        about(
            "Drafting method: `method` of --speculative-config. Default: by the draft's name.",
            extra={"plugins": "servd.worker.spec_decode"},
        ),
    ] = None
    spec_model: Annotated[
        str | None,
        about("Folder or Hugging Face id of the draft model: `model` of --speculative-config."),
    ] = None
    spec_tokens: Annotated[
        Positive | None,
        about(
            "Maximum drafts of a request in one step: `num_speculative_tokens` of "
            "--speculative-config. Default: 5, or what the method has."
        ),
    ] = None
    enforce_eager: Annotated[
        bool, about("Run without CUDA graphs, and on a CPU without recorded graphs.")
    ] = False
    compile: Annotated[
        bool,
        about("Fuse the layers with torch.compile instead of servd's kernels. Needs CUDA."),
    ] = False
    batch_invariant: Annotated[
        bool,
        about("On CUDA, make results independent of other requests in a batch. Slower."),
    ] = False
    check_vectors: Annotated[
        bool,
        about(
            "Compare an embedding or classification model with transformers at the start, and "
            "refuse to serve it if they differ."
        ),
    ] = True
