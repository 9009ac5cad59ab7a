"""The options of the model: which one, and how it is loaded."""

from typing import Annotated, Any, Literal

from servd.checkpoint.hf import GenerationDefaults
from servd.config._section import NotNegative, Positive, Section, about
from servd.config.speculative import SpeculativeConfig
from servd.messages.params import MAX_CANDIDATES, MAX_LOGPROBS, LogprobsMode


class ModelConfig(Section, frozen=True):
    """Which model, and how it is loaded."""

    model: Annotated[
        str | None,
        about("Hugging Face id (`Qwen/Qwen3-0.6B`) or local folder. Default: the demo model."),
    ] = None
    served_model_name: Annotated[
        list[str],
        about(
            "Names that clients may use; the first is shown. Default: MODEL and its folder's name."
        ),
    ] = []
    tokenizer: Annotated[
        str | None, about("Folder or Hugging Face id of the tokenizer, if not the model's own.")
    ] = None
    revision: Annotated[str | None, about("Branch, tag or commit of the model on the hub.")] = None
    download_dir: Annotated[
        str | None, about("Cache folder for downloads. Default: the Hugging Face cache.")
    ] = None
    trust_remote_code: Annotated[
        bool, about("Run Python code that comes with the tokenizer when it has to be converted.")
    ] = False
    hf_overrides: Annotated[
        dict[str, Any] | None,
        about(
            "What to change in the model's config.json, as JSON. For contexts four times as long: "
            '`{"rope_scaling": {"rope_type": "yarn", "factor": 4}}`.'
        ),
    ] = None
    model_impl: Annotated[
        Literal["auto", "servd", "transformers"],
        about(
            "Who computes the layers: servd's own file for the model_type, or transformers with "
            "servd's attention, linear layers and loader. auto: servd's file, if there is one."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about(
            "Type of weights and activations. auto: the checkpoint's on CUDA, float32 on a CPU. A "
            "CPU computes in float32 whatever it is: 16 bits are how it stores weights and KV "
            "cache. But with bfloat16, matrix products by AMX or AVX512_BF16 round the activations "
            "to it."
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        about(
            "Round the weights as they are loaded. int8: 8 bits and a scale per output. int4: 4 "
            "bits, a scale and an offset per group of 32, 8 in the vocabulary's table. fp8: 8-bit "
            "floats, activations too, which Hopper multiplies twice as fast as 16 bits.",
            extra={"plugins": "servd.worker.quantization"},
        ),
    ] = None
    quantization_imatrix: Annotated[
        str | None,
        about(
            "Importance matrix for --quantization int4, a GGUF file of llama.cpp's "
            "`llama-imatrix`: it states which weights are to be rounded with less error."
        ),
    ] = None
    cpu_activation_dtype: Annotated[
        Literal["auto", "float32", "int8"],
        about(
            "What a CPU with AMX or AVX-512 VNNI may round activations to where the weights have 4 "
            "or 8 bits. int8: a scale per token, or per 1024 numbers of it, or 32 with weights in "
            "groups; prompts and batches are 2 to 3 times as fast. auto: int8 with --quantization "
            "int8 or int4, float32 with checkpoints that are quantized."
        ),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None,
        about("Longest prompt plus output, in tokens. Default: what the model allows."),
    ] = None
    shorten_max_model_len: Annotated[
        bool | None,
        about(
            "Go on with a shorter context if the KV cache cannot hold max_model_len tokens, "
            "rather than refuse to start. Default: on unless --max-model-len is given."
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "pt", "dummy"],
        about(
            "auto: safetensors. pt: pytorch_model*.bin, of which only tensors are unpickled. "
            "dummy: seeded random weights, for tests."
        ),
    ] = "auto"
    logprobs_mode: Annotated[
        LogprobsMode,
        about(
            "What `logprobs` are: of the model's logits, or of those processed by penalties, "
            "biases, grammars, temperature, top-k, top-p and min-p; or these logits themselves."
        ),
    ] = "raw_logprobs"
    max_logprobs: Annotated[
        int,
        about(
            f"Most candidates that `logprobs` may ask for; -1: {MAX_CANDIDATES}.",
            ge=-1,
            le=MAX_CANDIDATES,
        ),
    ] = MAX_LOGPROBS
    seed: Annotated[
        NotNegative, about("Seed of everything random: dummy weights, requests without a seed.")
    ] = 0
    generation_config: Annotated[
        str,
        about(
            "Default sampling parameters: `auto` (the model's generation_config.json), `vllm` "
            "(neutral ones) or a folder that holds a generation_config.json."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        GenerationDefaults | None,
        about(
            'Default sampling parameters that win over those, as JSON: `{"temperature": 0.6}`. '
            "`max_new_tokens` is for who names no number, and in vLLM the most for all."
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        about(
            "Draft tokens ahead of the model, as JSON: "
            '`{"method": "ngram", "num_speculative_tokens": 4}`, keys as in vLLM. Outputs stay as '
            "they are, and come faster where the drafts are right. `demo` is the demo model's head."
        ),
    ] = None
    spec_method: Annotated[
        str | None,
        about(
            "How to draft: `method` of --speculative-config. Default: by the name of the draft.",
            extra={"plugins": "servd.worker.spec_decode"},
        ),
    ] = None
    spec_model: Annotated[
        str | None,
        about("Folder or Hugging Face id of the draft: `model` of --speculative-config."),
    ] = None
    spec_tokens: Annotated[
        Positive | None,
        about("Most drafts in a step: `num_speculative_tokens` of --speculative-config."),
    ] = None
    enforce_eager: Annotated[
        bool, about("Never use CUDA graphs, nor recorded graphs on a CPU.")
    ] = False
    compile: Annotated[
        bool,
        about("Let torch.compile fuse the layers, in place of servd's own kernels. Needs CUDA."),
    ] = False
    batch_invariant: Annotated[
        bool,
        about("On CUDA, give a request the same bits whatever else is in its steps. Slower."),
    ] = False
    check_vectors: Annotated[
        bool,
        about(
            "Compare an embedding model, or one with a classification head, with transformers when "
            "it starts, and refuse to serve it where they differ."
        ),
    ] = True
