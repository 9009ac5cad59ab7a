"""Tiny seeded checkpoints of models that see, with the files that a published one has: weights,
tokenizer, chat template and processors.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import VOCAB_SIZE, write_tokenizer

HIDDEN_SIZE = 64  # of the language models
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
}
HEADS = TEXT | {"head_dim": 16}
HYBRID = TEXT | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
PARTIAL = MROPE | {"partial_rotary_factor": 0.5, "mrope_interleaved": True}

SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}
CLIP = SIGLIP | {"model_type": "clip_vision_model"}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 16}
QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
QWEN2_5 = QWEN | {
    "patch_size": 14,
    "out_hidden_size": HIDDEN_SIZE,
    "fullatt_block_indexes": [1],
    "window_size": 56,
}
QWEN3 = QWEN | {
    "depth": 3,
    "patch_size": 16,
    "out_hidden_size": HIDDEN_SIZE,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 64,
}
QWEN3_5 = {key: value for key, value in QWEN3.items() if not key.startswith("deepstack")}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

# Text and pictures of a message in order; its content is always a list, or may be a text.
PARTS = """{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}PICTURE{% endif %}{% endfor %}"""
TEXT_OR_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    + PARTS
    + "{% endif %}"
)
FIRST_PICTURES = """{% for part in message['content'] if part['type'] == 'image' %}PICTURE
{% endfor %}{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}\
{% endfor %}"""


def template(before: str, content: str, after: str, answer: str, start: str = "") -> str:
    """Return a chat template: what stands before and after a message, and before the answer."""
    return (
        start
        + "{% for message in messages %}"
        + f"{before}{content}{after}"
        + "{% endfor %}{% if add_generation_prompt %}"
        + answer
        + "{% endif %}"
    )


IDEFICS = template(
    "{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}",
    PARTS,
    "<end_of_utterance>\n",
    "Assistant:",
    "<|im_start|>",
).replace("PICTURE", "<image>")
LLAVA = template(
    "{{ message['role'] | upper }}: ",
    FIRST_PICTURES,
    "{% if message['role'] == 'assistant' %}</s>{% else %} {% endif %}",
    "ASSISTANT:",
).replace("PICTURE", "<image>")
CHATML = template(
    "<|im_start|>{{ message['role'] }}\n", TEXT_OR_PARTS, "<|im_end|>\n", "<|im_start|>assistant\n"
).replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
GEMMA = template(
    "<start_of_turn>{% if message['role'] == 'assistant' %}model"
    "{% else %}{{ message['role'] }}{% endif %}{{ '\\n' }}",
    TEXT_OR_PARTS,
    "<end_of_turn>\n",
    "<start_of_turn>model\n",
    "{{ bos_token }}",
).replace("PICTURE", "<start_of_image>")
MISTRAL = template(
    "{% if message['role'] == 'user' %}[INST]{% endif %}",
    TEXT_OR_PARTS,
    "{% if message['role'] == 'user' %}[/INST]{% else %}{{ eos_token }}{% endif %}",
    "",
    "{{ bos_token }}",
).replace("PICTURE", "[IMG]")

ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
OF_IDEFICS = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "image_token": "<image>",
}
OF_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
OF_GEMMA = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


@dataclass
class VisionModel:
    """The files of a checkpoint. `whole`: config.json beside its parts; a text that is a token of
    the tokenizer stands for the token's id.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    whole: dict[str, Any]
    template: str
    special: list[str]  # of the tokenizer; the second ends an answer
    preprocessor: dict[str, Any]
    processor: dict[str, Any] = field(default_factory=dict)
    bos: str | None = None
    token_names: dict[str, str] = field(default_factory=dict)  # in tokenizer_config.json
    model_type: str = ""  # default: the family


def _idefics(kind: str) -> VisionModel:
    return VisionModel(
        TEXT | {"model_type": "llama"},
        SIGLIP,
        {"scale_factor": 2, "image_token_id": "<image>"},
        IDEFICS,
        ["<pad>", "<end_of_utterance>", "<|im_start|>", *OF_IDEFICS.values(), *ROWS],
        HALF
        | {
            "image_processor_type": f"{kind}ImageProcessor",
            "size": {"longest_edge": 192},
            "max_image_size": {"longest_edge": 64},
            "do_image_splitting": True,
        },
        {"processor_class": f"{kind}Processor", "image_seq_len": 16},
        token_names=OF_IDEFICS if kind == "SmolVLM" else {},
    )


def _llava(vision: dict[str, Any], whole: dict[str, Any], image_processor: str) -> VisionModel:
    size = {"shortest_edge": 64} if "CLIP" in image_processor else {"height": 64, "width": 64}
    return VisionModel(
        TEXT | {"model_type": "llama"},
        vision,
        {"image_token_index": "<image>"} | whole,
        LLAVA,
        ["<pad>", "</s>", "<s>", "<image>"],
        {
            "image_processor_type": f"{image_processor}ImageProcessor",
            "size": size,
            "crop_size": {"height": 64, "width": 64},
        },
        {
            "processor_class": "LlavaProcessor",
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        bos="<s>",
    )


def _qwen(
    text: dict[str, Any], vision: dict[str, Any], patch_size: int, image_processor: str
) -> VisionModel:
    names = {f"{kind}_token_id": f"<|{kind}_pad|>" for kind in ("image", "video")}
    names |= {f"vision_{kind}_token_id": f"<|vision_{kind}|>" for kind in ("start", "end")}
    factor = 2 * patch_size
    return VisionModel(
        text,
        vision,
        names,
        CHATML,
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>", *OF_QWEN.values()],
        {
            "image_processor_type": image_processor,
            "size": {"shortest_edge": 2 * factor**2, "longest_edge": 24 * factor**2},
            "patch_size": patch_size,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        {"processor_class": "Qwen3VLProcessor"},
    )


def _pixtral(text: dict[str, Any], whole: dict[str, Any], merge_size: int) -> VisionModel:
    return VisionModel(
        text,
        PIXTRAL,
        {"image_token_index": "[IMG]"} | whole,
        MISTRAL,
        ["<pad>", "</s>", "<s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": {"height": 14, "width": 14},
        },
        {
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": merge_size,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        bos="<s>",
    )


def _llava_next() -> VisionModel:
    model = _llava(CLIP, {}, "LlavaNext")
    pinpoints = [[64, 128], [128, 64], [128, 128]]
    model.text = TEXT | {"model_type": "mistral"}
    model.whole["image_grid_pinpoints"] = pinpoints
    model.preprocessor |= {"size": {"shortest_edge": 64}, "image_grid_pinpoints": pinpoints}
    model.processor["processor_class"] = "LlavaNextProcessor"
    return model


def _llava_pixtral() -> VisionModel:
    whole = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    model = _pixtral(HEADS | {"model_type": "mistral"}, whole, 1)
    model.model_type = "llava"
    return model


def _llava_siglip() -> VisionModel:
    whole = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    model = _llava(SIGLIP | {"model_type": "siglip_vision_model"}, whole, "Siglip")
    model.model_type = "llava"
    model.processor |= {"num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"}
    return model


def _gemma3() -> VisionModel:
    return VisionModel(
        HEADS
        | {
            "sliding_window": 32,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        SIGLIP,
        {
            "mm_tokens_per_image": 16,
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        GEMMA,
        ["<pad>", "<end_of_turn>", "<bos>", "<start_of_turn>", *OF_GEMMA.values()],
        HALF
        | {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64}},
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        bos="<bos>",
        token_names=OF_GEMMA,
    )


def _nested(model: VisionModel) -> VisionModel:
    """Return the model with one file for both processors, as newer checkpoints have it."""
    model.processor["image_processor"] = model.preprocessor
    model.preprocessor = {}
    return model


def models() -> dict[str, VisionModel]:
    """Return the models by family."""
    mrope3 = MROPE | {"mrope_interleaved": True}
    return {
        "smolvlm": _idefics("SmolVLM"),
        "idefics3": _idefics("Idefics3"),
        "llava": _llava(CLIP, {}, "CLIP"),
        "llava_siglip": _llava_siglip(),
        "llava_pixtral": _llava_pixtral(),
        "llava_next": _llava_next(),
        "qwen2_5_vl": _qwen(
            TEXT | {"rope_parameters": MROPE}, QWEN2_5, 14, "Qwen2VLImageProcessor"
        ),
        "qwen3_vl": _qwen(
            HEADS | {"rope_parameters": mrope3}, QWEN3, 16, "Qwen2VLImageProcessorFast"
        ),
        "qwen3_vl_moe": _qwen(
            HEADS | EXPERTS | {"rope_parameters": mrope3}, QWEN3, 16, "Qwen2VLImageProcessorFast"
        ),
        "qwen3_5": _qwen(
            HYBRID | {"rope_parameters": PARTIAL}, QWEN3_5, 16, "Qwen2VLImageProcessorFast"
        ),
        "qwen3_5_moe": _qwen(
            HYBRID | EXPERTS | {"rope_parameters": PARTIAL, "shared_expert_intermediate_size": 40},
            QWEN3_5,
            16,
            "Qwen2VLImageProcessorFast",
        ),
        "gemma3": _nested(_gemma3()),
        "mistral3": _nested(
            _pixtral(HEADS | {"model_type": "mistral"}, {"spatial_merge_size": 2}, 2)
        ),
    }


FAMILIES = tuple(models())


def make(family: str, folder: Path) -> None:
    """Write a seeded random checkpoint of a family, float32, into an existing folder."""
    import torch
    import transformers

    model = models()[family]
    write_tokenizer(folder, model.special, model.bos, model.special[1], None)
    config_path = folder / "tokenizer_config.json"
    settings = json.loads(config_path.read_text(encoding="utf8"))
    settings |= model.token_names | {"extra_special_tokens": model.token_names}
    settings["pad_token"] = model.special[0]
    _write(config_path, settings)
    (folder / "chat_template.jinja").write_text(model.template, encoding="utf8")
    if model.preprocessor:
        _write(folder / "preprocessor_config.json", model.preprocessor)
    _write(folder / "processor_config.json", model.processor)
    token_ids = {token: token_id for token_id, token in enumerate(model.special)}
    whole = {
        key: token_ids[value] if isinstance(value, str) and value in token_ids else value
        for key, value in model.whole.items()
    }
    config = transformers.AutoConfig.for_model(
        model.model_type or family,
        text_config=model.text | {"eos_token_id": 1},
        vision_config=model.vision,
        tie_word_embeddings=False,
        **whole,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vision_model = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32
        )
        for parameter in vision_model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.data.normal_(std=0.15)
    vision_model.save_pretrained(folder)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf8")
