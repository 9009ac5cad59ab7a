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
            'Change keys of the model\'s config.json, as JSON: `{"rope_scaling": {"rope_type": '
            '"yarn", "factor": 4}}` makes contexts four times as long.'
        ),
    ] = None
    model_impl: Annotated[
        Literal["auto", "servd", "transformers"],
        about(
            "Code that computes the layers. auto: servd's model file if there is one, else the "
            "class of transformers."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about(
            "Type of weights and activations. auto: the checkpoint's type on CUDA, float32 on a "
            "CPU. CPUs compute in float32; with bfloat16, AMX and AVX512_BF16 round activations."
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        about(
            "Quantize weights while loading: int8 to 8 bits, int4 to 5 with scales, fp8 to e4m3 "
            "(from Hopper). Leave it out for quantized checkpoints: servd detects the format.",
            extra={"plugins": "servd.worker.quantization"},
        ),
    ] = None
    quantization_imatrix: Annotated[
        str | None,
        about(
            "Importance matrix for --quantization int4: a GGUF file of llama.cpp's `llama-imatrix`."
        ),
    ] = None
    cpu_activation_dtype: Annotated[
        Literal["auto", "float32", "int8"],
        about(
            "Type of activations for weights of 4 or 8 bits, on CPUs with AMX or AVX-512 VNNI. "
            "int8 is faster, float32 exact. auto: int8 with --quantization int8 or int4, else "
            "float32."
        ),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None,
        about("Maximum tokens of a request: prompt plus output. Default: the model's maximum."),
    ] = None
    shorten_max_model_len: Annotated[
        bool | None,
        about(
            "Shorten the context, instead of refusing to start, if the KV cache cannot hold one "
            "request of full length. Default: on unless --max-model-len is given."
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "pt", "dummy"],
        about(
            "Format of the weight files. auto: safetensors or GGUF. pt: pytorch_model*.bin, "
            "tensors only. dummy: random weights, for tests."
        ),
    ] = "auto"
    logprobs_mode: Annotated[
        LogprobsMode,
        about(
            "Values that `logprobs` returns. raw: before penalties and sampling parameters. "
            "processed: after them. logits: logits instead of log-probabilities."
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
    seed: Annotated[
        NotNegative, about("Seed for random (dummy) weights, and for requests without `seed`.")
    ] = 0
    generation_config: Annotated[
        str,
        about(
            "Source of the default sampling parameters: a folder with a generation_config.json. "
            "auto: the model's folder. vllm: neutral values."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        GenerationDefaults | None,
        about(
            'Change the default sampling parameters, as JSON: `{"temperature": 0.6}`. '
            "`max_new_tokens` limits requests without `max_tokens`."
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        about(
            "Draft tokens to answer faster, with the same output: a method such as `ngram`, or "
            "JSON with vLLM's keys. For the demo model, use `demo`. Default: no drafts."
        ),
    ] = None
    spec_method: Annotated[
        str | None,
        about(
            "Same as `method` in --speculative-config. Default: from the name of the draft model.",
            extra={"plugins": "servd.worker.spec_decode"},
        ),
    ] = None
    spec_model: Annotated[
        str | None,
        about(
            "Same as `model` in --speculative-config: folder or Hugging Face id of the draft model."
        ),
    ] = None
    spec_tokens: Annotated[
        Positive | None,
        about(
            "Same as `num_speculative_tokens` in --speculative-config: maximum drafts of a "
            "request per step. Default: 5, or the method's own number."
        ),
    ] = None
    enforce_eager: Annotated[
        bool, about("Turn off CUDA graphs, and servd's graphs on a CPU. Slower.")
    ] = False
    compile: Annotated[
        bool,
        about("Fuse the layers with torch.compile instead of servd's kernels. Needs CUDA."),
    ] = False
    batch_invariant: Annotated[
        bool,
        about("On CUDA, make results independent of other requests in the batch. Slower."),
    ] = False
    check_vectors: Annotated[
        bool,
        about(
            "Compare an embedding or classification model with transformers at the start. If they "
            "differ, servd does not serve it."
        ),
    ] = True
