"""The part of a model that encodes pictures: transformers' vision tower and projector."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from servd.base.errors import ModelNotFound, UnsupportedModel
from servd.checkpoint.config_json import read_json
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.multimodal_config import text_name
from servd.checkpoint.weight_files import find_weight_files
from servd.worker.layers.activation import Activation
from servd.worker.layers.packed import PackedMatrix
from servd.worker.ops import native, target
from servd.worker.quantization._files import read_tensors

# transformers makes a model with all of its parts: these leave of the language model next to
# nothing.
REDUCED = {"num_hidden_layers": 0, "vocab_size": 8, "layer_types": [], "pad_token_id": None}
# Those that transformers computes slowly on a CPU.
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu")
WITHOUT_TOWER = "--language-model-only serves the model without pictures"
MAX_NAMED = 4  # tensors in a message


class NativeLinear(nn.Module):
    """A linear layer by the CPU kernels. `x_dtype`: see PackedMatrix."""

    def __init__(self, layer: nn.Module, x_dtype: torch.dtype) -> None:
        super().__init__()
        weight = cast(Tensor, layer.weight).data
        bias = cast(Tensor | None, layer.bias)
        self.matrix = PackedMatrix(weight.flatten(1), x_dtype=x_dtype)
        self.weight = torch.empty(0)  # callers convert their inputs to its dtype
        self.bias = None if bias is None else bias.data.float()

    def forward(self, x: Tensor) -> Tensor:  # float32 [..., in] -> [..., out]
        rows = x.reshape(-1, x.shape[-1])
        return self.matrix.multiply(rows, self.bias).view(*x.shape[:-1], -1)


class NativePatches(NativeLinear):
    """A convolution whose windows do not overlap, as a linear layer of each window. A window's
    results are beside each other in memory, as the next layers read them.
    """

    def __init__(self, layer: nn.Conv2d | nn.Conv3d, x_dtype: torch.dtype) -> None:
        super().__init__(layer, x_dtype)
        self.sides = layer.kernel_size

    def forward(self, x: Tensor) -> Tensor:  # float32 [n, in, *sides] -> [n, out, *windows]
        num_dims = len(self.sides)
        for dim, side in enumerate(self.sides, 2):
            x = x.unfold(dim, side, side)
        windows = x.movedim(1, num_dims + 1).flatten(num_dims + 1)  # [n, *windows, in * sides]
        return super().forward(windows).movedim(-1, 1)


class NativeNorm(nn.Module):
    """An RMS norm or, if it has a bias, a layer norm by the CPU kernels."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, norm.weight)
        self.bias = cast(nn.Parameter | None, getattr(norm, "bias", None))
        is_layer_norm = isinstance(norm, nn.LayerNorm)
        self.eps = cast(float, norm.eps if is_layer_norm else norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:  # float32 [..., size]
        if self.bias is None:
            return native.rms_norm(x, None, self.weight, self.eps)[0]
        return native.layer_norm(x, None, self.weight, self.bias, self.eps)[0]


def attend(
    x_dtype: torch.dtype,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention by the CPU kernels for transformers, float32 [batch, heads, n, head_dim] ->
    [batch, n, heads, head_dim]. A mask hides nothing, as a tower gets one picture at a time.
    `x_dtype`: see PackedMatrix.
    """
    assert query.shape == key.shape == value.shape
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    out = torch.empty(q.shape)
    native.call("attend_all", native.TYPES[x_dtype], q, k, v, *q.shape, scaling, out)
    return out, None


class VisionTower:
    """A checkpoint's vision tower with its projector."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.model = model
        self.dtype = dtype  # of pixels and of results
        self.device = device
        matrices = [module.matrix for module in model.modules() if isinstance(module, NativeLinear)]
        tensors = [*model.parameters(), *model.buffers(), *matrices]
        self.nbytes = sum(tensor.nbytes for tensor in tensors)

    @classmethod
    def load(cls, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> "VisionTower":
        """Load the tower of a checkpoint. With servd's kernels for CPUs, matrices keep 16 bits and
        all else is float32. Raises ModelNotFound if weights are missing; UnsupportedModel if they
        are quantized or do not fit config.json.
        """
        folder = Path(spec.folder)
        tensors = _read_vision(folder)
        is_native = target.runs_native(device)
        weight_dtype = dtype
        if is_native:
            dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
            weight_dtype = min([dtype, *dtypes], key=lambda dtype: dtype.itemsize)
        model = _build(folder, tensors, weight_dtype)
        if is_native:
            _use_kernels(model, dtype)
            model.float()
            dtype = torch.float32
        return cls(model.to(device), dtype, device)

    @torch.inference_mode()
    def encode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of the image tokens of a picture, or of its part, in their order:
        [num_embeds, embed_size]. `tensors`: ProcessedImage.tensors.
        """
        inputs = {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }
        outputs = cast(Any, self.model).get_image_features(**inputs, return_dict=True)
        deepstack = getattr(outputs, "deepstack_features", None) or ()
        # Features of a picture are a tensor, or a list of tensors.
        features = [
            torch.cat([part.flatten(0, -2) for part in parts])
            for parts in (outputs.pooler_output, *deepstack)
        ]
        return torch.cat(features, dim=-1)


def _read_vision(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint that are not the language model's, mapped."""
    files = find_weight_files(folder)
    tensors = dict(read_tensors(files, lambda name: text_name(name) is None))
    quantized = [
        name
        for name, tensor in tensors.items()
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32)
        and not name.endswith("position_ids")
    ]
    if quantized:
        names = ", ".join(quantized[:MAX_NAMED])
        raise UnsupportedModel(
            f"{folder}: its vision tower is quantized ({names}), which servd does not read: "
            f"{WITHOUT_TOWER}"
        )
    return tensors


def _build(folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Return transformers' model of a folder without its language model."""
    import transformers

    values = read_json(folder / "config.json")
    values.pop("quantization_config", None)  # which concerns the language model
    try:
        with _silent_transformers():
            config = transformers.AutoConfig.for_model(**values)
            text_config = config.get_text_config()
            for name, value in REDUCED.items():
                if hasattr(text_config, name):
                    setattr(text_config, name, value)
            with torch.device("meta"):
                of_family = transformers.AutoModelForImageTextToText.from_config(config)
            whole, info = type(of_family).from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises any
        raise UnsupportedModel(
            f"{folder}: its vision tower cannot be loaded: {error}; {WITHOUT_TOWER}"
        ) from error
    if missing := sorted(name for name in info["missing_keys"] if text_name(name) is None):
        names = ", ".join(missing[:MAX_NAMED])
        raise ModelNotFound(f"{folder} lacks {len(missing)} weights of its vision tower: {names}")
    model = whole.eval().base_model
    [decoder] = [name for name, part in model.named_children() if part is whole.get_decoder()]
    delattr(model, decoder)
    return model


def _use_kernels(model: nn.Module, x_dtype: torch.dtype) -> None:
    """Replace layers by those of the CPU kernels."""
    import transformers
    from transformers.activations import get_activation

    attention = f"servd_{x_dtype}"
    transformers.AttentionInterface.register(attention, partial(attend, x_dtype))
    cast(Any, model).set_attn_implementation({"vision_config": attention})
    activations = {type(get_activation(name)): name for name in ACTIVATIONS}
    for name, module in list(model.named_modules()):
        kind = type(module)
        if kind is nn.Linear:  # subclasses are read by what they are in
            model.set_submodule(name, NativeLinear(module, x_dtype))
        elif isinstance(module, nn.Conv2d | nn.Conv3d) and module.stride == module.kernel_size:
            model.set_submodule(name, NativePatches(module, x_dtype))
        elif kind is nn.LayerNorm and module.bias is not None:
            model.set_submodule(name, NativeNorm(module))
        elif kind.__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            model.set_submodule(name, NativeNorm(module))
        elif kind in activations:
            model.set_submodule(name, Activation(activations[kind]))


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Within this context, transformers does not report that the language model is missing."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    has_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
