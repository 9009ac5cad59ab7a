"""Run a transformers model layer by layer: the inputs of each matrix, and the perplexity."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from servd.base.errors import UnsupportedModel

# Name of a matrix in the model, the matrix [out, in], and sums of x^T x and (y - x)^T x over the
# halves of its inputs x and those of the original, y, [2, in, in] each -> what it is from now on.
Change = Callable[[str, Tensor, Tensor, Tensor], Tensor]
# A layer's arguments beside hidden states: positions, masks.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Reached(Exception):
    """Raised to stop a layer when it reaches the wanted matrix."""


class CalibrationModel:
    """A model of transformers in float32. Raises UnsupportedModel: transformers cannot load it, or
    its layers are not in a list.
    """

    def __init__(self, folder: Path) -> None:
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        except Exception as error:  # transformers may raise anything for unknown files
            why = str(error).partition("\n")[0] or type(error).__name__
            raise UnsupportedModel(f"{folder}: transformers cannot load it: {why[:200]}") from None
        count = model.config.get_text_config().num_hidden_layers
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if not lists:
            raise UnsupportedModel(f"{folder}: {type(model).__name__} has no list of layers")
        self.model = model.requires_grad_(False)
        self.layers = lists[0]
        self.base_prefix = model.base_model_prefix
        self.num_weights = model.num_parameters()
        self.names = {
            module: name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
        }

    @torch.inference_mode()
    def perplexity(self, rows: Tensor) -> float:
        """Return the perplexity of token ids [n, size]. A row's first token is not scored."""
        losses = []
        for row in rows:
            logits = self.model(row[None], use_cache=False).logits[0, :-1]
            losses.append(F.cross_entropy(logits, row[1:]).item())
        return math.exp(sum(losses) / len(losses))

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each matrix of the layers, and the matrix [out, in]."""
        inside = {*self.layers.modules()}
        for module, name in self.names.items():
            if module in inside:
                yield name, _matrix_of(module)

    @torch.inference_mode()
    def exchange(
        self, batches: Sequence[Tensor], change: Change, progress: Callable[[float], None]
    ) -> None:
        """Call `change` for every matrix of the layers, in the order of their use. The inputs of a
        matrix come from the changed matrices before it. `batches`: token ids [n, size].
        """
        inputs, calls = self._enter(batches)
        exact = [*inputs]
        for index, layer in enumerate(self.layers):
            original = copy.deepcopy(layer)
            twins = dict(zip(layer.modules(), original.modules(), strict=True))
            for modules in self._by_input(layer, inputs[0], calls[0][index]):
                moments = torch.zeros(())
                drift = torch.zeros(())
                for hidden, of_original, of_layers in zip(inputs, exact, calls, strict=True):
                    x = _input_of(modules[0], layer, hidden, of_layers[index])
                    y = _input_of(twins[modules[0]], original, of_original, of_layers[index])
                    moments = moments + _products(x, x)
                    drift = drift + _products(y - x, x)
                for module in modules:
                    weight = _matrix_of(module)
                    weight.copy_(change(self.names[module], weight, moments, drift))
            for place, of_layers in enumerate(calls):
                inputs[place] = _run(layer, inputs[place], of_layers[index])
                exact[place] = _run(original, exact[place], of_layers[index])
            progress((index + 1) / len(self.layers))

    def _enter(self, batches: Sequence[Tensor]) -> tuple[list[Tensor], list[list[Call]]]:
        """Return the first layer's input for each batch, and the other arguments of every layer."""
        inputs: list[Tensor] = []
        calls: list[list[Call]] = []

        def record(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            calls[-1].append((args, kwargs))
            if len(calls[-1]) == 1:
                inputs.append(hidden)
            return hidden

        for layer in self.layers:
            layer.forward = record
        try:
            for batch in batches:
                calls.append([])
                self.model.base_model(batch, use_cache=False)
        finally:
            for layer in self.layers:
                del layer.forward
        return inputs, calls

    def _by_input(
        self, layer: nn.Module, hidden: Tensor, call: Call
    ) -> list[list[nn.Linear | Conv1D]]:
        """Return the layer's matrices in order of use; one list has those with the same input."""
        groups: list[tuple[Tensor, list[nn.Linear | Conv1D]]] = []

        def see(module: nn.Linear | Conv1D, args: tuple[Tensor, ...]) -> None:
            if not groups or groups[-1][0] is not args[0]:
                groups.append((args[0], []))
            groups[-1][1].append(module)

        hooks = [m.register_forward_pre_hook(see) for m in layer.modules() if m in self.names]
        _run(layer, hidden, call)
        for hook in hooks:
            hook.remove()
        return [modules for _, modules in groups]


def _matrix_of(module: Any) -> Tensor:
    """Return the matrix [out, in]; GPT-2's Conv1D has [in, out]."""
    return module.weight.t() if isinstance(module, Conv1D) else module.weight


def _input_of(module: nn.Module, layer: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """Return the input of `module` in this call of `layer`, [tokens, in]."""
    inputs: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0].flatten(0, -2))
        raise Reached

    hook = module.register_forward_pre_hook(stop)
    try:
        _run(layer, hidden, call)
    except Reached:
        pass
    finally:
        hook.remove()
    return inputs[0]


def _products(y: Tensor, x: Tensor) -> Tensor:
    """Return y^T x of each half of the tokens: [tokens, in] twice -> [2, in, in]."""
    halves = zip(y.tensor_split(2), x.tensor_split(2), strict=True)
    return torch.stack([of_y.t() @ of_x for of_y, of_x in halves])


def _run(layer: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    args, kwargs = call
    out = layer(hidden, *args, **kwargs)
    return out[0] if isinstance(out, tuple) else out
