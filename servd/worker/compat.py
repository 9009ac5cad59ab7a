"""The parts of torch's and transformers' private APIs that servd uses, each with its reason.

`servd/base/compat.py` has the parts that need no torch. Look here first when a newer version fails.
Slow imports are inside functions.
"""
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# The oldest and newest versions that tests run with, by `make test-oldest` and `test-newest`.
TESTED = {"torch": "2.11-2.15", "transformers": "5.17-5.24", "triton": "3.6-3.9"}

# ---- torch ----


class DispatchMode(TorchDispatchMode):
    """A mode that sees each operation below autograd. torch has no public class for that."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, the default, imports torch's compiler at the first call, for seconds


def without_function_modes() -> AbstractContextManager[Any]:
    """Return a context without function modes. torch has no public context for this."""
    return torch._C.DisableTorchFunction()


def use_a_symbol_per_size() -> None:
    """Make torch.compile distinguish sizes that are equal by chance. No public option does it."""
    from torch.fx.experimental import _config as symbols

    symbols.use_duck_shape = False


def multiply_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return torch's product by 8-bit weights on a CPU, which has no public name."""
    return torch.ops.aten._weight_int8pack_mm(x, weight, scale)


def copy_with(module: nn.Module, **parts: nn.Module | Tensor) -> Any:
    """Return a copy of a torch module that shares its contents, with some parts replaced.
    `copy.copy` alone shares the tables of parts, so assigning a part would change the original. If
    a part is a tensor, the copy has only the parameters among `parts`.
    """
    made = copy.copy(module)
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    made._modules = {**module._modules, **modules}
    if len(modules) < len(parts):
        made._parameters = {k: v for k, v in parts.items() if k not in modules}  # type: ignore[assignment]
    return made


def stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters and persistent buffers. torch's public methods neither
    tell persistent buffers from others, nor return a tensor for both modules that share it.
    """
    transient = module._non_persistent_buffers_set
    buffers = {name: x for name, x in module._buffers.items() if name not in transient}
    return {k: v for k, v in {**module._parameters, **buffers}.items() if v is not None}


def replace_stored_tensor(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter or buffer by `parameter`, without the checks of torch's Module."""
    module._buffers.pop(name, None)
    module._parameters[name] = parameter


# ---- triton ----


@contextmanager
def intercept_launches(
    launch: Callable[[Any, dict[str, Any], Callable[[], object]], None],
) -> Iterator[None]:
    """Within a `with` block, call `launch` instead of launching kernels of triton: with the kernel,
    its arguments by name, and a call that launches it. triton's hooks come after the compilation.
    """
    from triton.runtime.jit import KernelInterface

    getitem = KernelInterface.__getitem__

    def intercept(kernel: Any, grid: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> None:
            by_name = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            launch(kernel, by_name, partial(getitem(kernel, grid), *args, **kwargs))

        return run

    KernelInterface.__getitem__ = intercept  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        KernelInterface.__getitem__ = getitem


# ---- transformers ----


@contextmanager
def without_weights() -> Iterator[None]:
    """Within a `with` block, create parameters without storage and values. Buffers are as usual, on
    a CPU even under function modes; transformers' own way has no storage for buffers either.
    """
    from transformers.initialization import no_init_weights

    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        with no_init_weights(), without_function_modes():
            yield
    finally:
        nn.Module.register_parameter = register


def conversion_rules(model: Any) -> tuple[list[Any], list[Any]]:
    """Return the renamings and converters by which transformers reads old checkpoints of this
    model. No public form takes tensors one by one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in rules if isinstance(rule, WeightConverter)]


def rename_tensor(
    name: str, renamings: list[Any], converters: list[Any], prefix: str, state: Mapping[str, Any]
) -> tuple[str, str | None]:
    """Return a tensor's name in the model, and the pattern of the converter that makes it. Uses an
    undocumented function of transformers.
    """
    from transformers.core_model_loading import rename_source_key

    return rename_source_key(name, renamings, converters, prefix, state)  # type: ignore[arg-type]


def unneeded_patterns(model: Any) -> list[str]:
    """Return patterns of checkpoint tensors that the model does not use. transformers reads them
    only in its own loading.
    """
    return [*(model._keys_to_ignore_on_load_unexpected or ())]


def precise_modules(model: Any) -> list[str]:
    """Return the parts that stay in float32, such as router biases: with 16 bits, routers choose
    other experts. transformers reads the names only in its own loading.
    """
    return [*(model._keep_in_fp32_modules_strict or ())]


def parallel_plan(model: Any) -> dict[str, str]:
    """Return how ranks share each linear layer, by name patterns. transformers has a public form
    only in its own loading, which would split the model itself.
    """
    return model._tp_plan or {}


def replace_flash_attention(model_type: str, name: str, flash: Callable[..., Tensor]) -> None:
    """Make old classes, which lack transformers' attention interface, call `flash` instead of flash
    attention, with the module as first argument. `name` is the name of the implementation.
    """
    modeling: Any = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    table = next(t for key, t in vars(modeling).items() if key.endswith("_ATTENTION_CLASSES"))

    class Flash(table["flash_attention_2"]):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            modeling._flash_attention_forward = lambda *tensors, **options: flash(
                self, *tensors, **options
            )
            return super().forward(*args, **kwargs)

    table[name] = Flash
