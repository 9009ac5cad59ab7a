"""--compile: the same tokens, whatever the sizes of the steps, from few compiled pieces."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from servd.worker import worker as worker_module
from servd.worker.layers._matrix import Matrix
from servd.worker.quantization.fp8 import CPU_TORCH
from servd.worker.runner.compile import compile_layers
from tests.parity.families import CASES, LLAMA, greedy, make_checkpoint
from tests.worker.cpu_kernels import forced
from tests.worker.driver import Driver, config_for

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5] * 17, [8]]
VARIANTS = [("gpt2", "tied"), pytest.param("qwen3", "bias", marks=pytest.mark.slow)]
# Before and after attention, of the layer and of its attention; the first layer has no residual
# yet; 1 token or more.
MOST_PIECES = 10


@pytest.fixture(autouse=True)
def no_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on CUDA: matrices are tensors."""
    yield from (None for _ in forced("off", monkeypatch))


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Compiled code is kept for each function, so that of another test would count too."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counter:
    """A backend that compiles nothing."""

    num_pieces = 0

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]
    ) -> Callable[..., object]:
        self.num_pieces += 1
        return graph.forward


def outputs(
    driver: Driver, prompts: list[list[int]], num_outputs: int, chunk: int
) -> list[list[int]]:
    """Prompts in chunks beside decoding; the logits of samples are in `driver.logits`."""
    slots = [driver.add(prompt) for prompt in prompts]
    driver.generate(slots, num_outputs, chunk)
    return [driver.free(slot) for slot in slots]


@pytest.mark.parametrize("model_type, variant", VARIANTS)
def test_steps_of_all_sizes_share_what_is_compiled(tmp_path: Path, model_type: str, variant: str):
    folder = make_checkpoint(tmp_path, model_type, CASES[model_type][variant])
    driver = Driver(config_for(folder))
    counter = Counter()
    compile_layers(driver.worker.runner.model, counter)
    outputs(
        driver, PROMPTS[:1], 2, chunk=4
    )  # 4 tokens, as many as a row of cos has numbers, then 1
    num_pieces = counter.num_pieces
    assert 0 < num_pieces <= MOST_PIECES
    for chunk in (1, 2, 3, 7, 13, 100):
        for prompt, tokens in zip(PROMPTS, outputs(driver, PROMPTS, 6, chunk), strict=True):
            assert tokens == greedy(folder, prompt, 6)
    assert counter.num_pieces == num_pieces


@pytest.mark.skipif(
    torch.__version__ < CPU_TORCH, reason=f"torch {CPU_TORCH} has products of fp8 on a CPU"
)
def test_rounding_to_8_bits_is_part_of_what_is_compiled(tmp_path: Path):
    """Not the kernel of its own that rounds otherwise."""
    folder = make_checkpoint(tmp_path, "llama", LLAMA | {"num_hidden_layers": 1})
    expected = outputs(Driver(config_for(folder, quantization="fp8")), PROMPTS, 6, chunk=100)
    driver = Driver(config_for(folder, quantization="fp8"))
    model = driver.worker.runner.model
    compile_layers(model, Counter())
    for name, weight in model.named_parameters():
        if isinstance(weight, Matrix) and ".layers." in name:
            weight.quant_method.round_rows = None  # type: ignore[union-attr]
    assert outputs(driver, PROMPTS, 6, chunk=100) == expected


@pytest.mark.parametrize("compile", [False, True])
def test_the_option_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compile: bool):
    compiled: list[object] = []
    monkeypatch.setattr(worker_module, "compile_layers", compiled.append)
    driver = Driver(config_for(make_checkpoint(tmp_path, "llama", LLAMA), compile=compile))
    assert compiled == [driver.worker.runner.model] * compile


@pytest.mark.parametrize(
    "where",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # the compiler has advice for every machine
def test_the_compiler_gives_the_same_tokens(tmp_path: Path, where: str):
    """On CUDA with decode steps as graphs."""
    if where == "cpu" and not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    folder = make_checkpoint(tmp_path, "llama", LLAMA | {"head_dim": 16})
    driver = Driver(config_for(folder, device=where, block_size=16, compile=True))
    for chunk in (3, 100):
        for prompt, tokens in zip(PROMPTS, outputs(driver, PROMPTS, 12, chunk), strict=True):
            assert tokens == greedy(folder, prompt, 12)
