"""--batch-invariant: makes a request's results bit-identical for any other requests in the step.

Two parts are replaced: matrix products, where cuBLAS chooses kernels by the number of rows, and
attention, which splits rows by the device's load.
"""

from dataclasses import replace

from torch import Tensor

from servd.base.errors import ConfigError
from servd.worker.layers._matrix import Dense, Matrix
from servd.worker.layers.experts import Expert
from servd.worker.runner.model_runner import ModelRunner


class InvariantMatrix(Dense):
    """A matrix that is multiplied by one kernel, with fixed tiles."""

    def __init__(self, weight: Tensor) -> None:
        from servd.worker.ops.triton.product import product  # needs triton

        super().__init__(weight.contiguous())
        self.product = product

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.product(x, self.weight, bias)


def make_batch_invariant(runner: ModelRunner) -> None:
    """Replace the products and the attention of a runner whose model is loaded. Raises ConfigError
    if a part of the model has no batch-invariant kernel.
    """
    if not runner.backend.supports_batch_invariance:
        raise ConfigError(
            f"--batch-invariant: attention backend {runner.backend_name} depends on the batch; "
            "use triton"
        )
    if any(isinstance(part, Expert) for _, part in runner.model.named_modules()):
        raise ConfigError("--batch-invariant: models with experts are not supported")
    for name, weight in runner.model.named_parameters():
        if not isinstance(weight, Matrix):
            continue
        if weight.quant_method is not None:
            raise ConfigError(
                f"--batch-invariant does not work with quantized weights ({name}); leave it out"
            )
        weight.quant_method = InvariantMatrix(weight.data)
        weight.data = weight.data.new_empty(0)
    runner.backend = type(runner.backend)(replace(runner.backend.spec, batch_invariant=True))
