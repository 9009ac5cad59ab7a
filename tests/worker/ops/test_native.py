"""Packed matrices by every instruction set of this CPU: exact, and equal bits in any batch."""

import _ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from servd.worker.layers.packed import ExpertMatrices, GroupedMatrix, PackedMatrix, spread
from servd.worker.layers.quantized import Quantized
from servd.worker.multimodal._tower import attend
from servd.worker.ops import native
from servd.worker.ops.reference import LowRank, RoutingRule
from servd.worker.quantization import gguf, int4, int8
from servd.worker.sample.logit_edits import Bitmasks, LogitEdits, Penalized
from servd.worker.sample.ops import native as sampling
from tests.worker.cpu_kernels import EXACT_SUMS, INTEGER_SUMS, forced
from tests.worker.driver import Driver, config_for
from tests.worker.ops.test_states import convolution_inputs, scan_inputs, state_rows

# [out, in]: whole panels and not, one piece and more, nothing to add up.
SHAPES = [(33, 20), (1, 1), (64, 768), (100, 1024), (50, 2500), (5, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
ROOT = Path(__file__).parents[3]
MANY = 131  # rows: several tiles, the last ones lower
ROUNDING = {torch.bfloat16: ("amx", "bf16", "i8mm"), torch.int8: INTEGER_SUMS}


@pytest.fixture(params=native.CAPABILITIES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from forced(request.param, monkeypatch)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    yield native.set_num_threads
    native.set_num_threads(len(os.sched_getaffinity(0)))


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> tuple[PackedMatrix, torch.Tensor]:
    """A matrix of this type, and its values in float64."""
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator)
    if dtype != torch.int8:
        return PackedMatrix(weight.to(dtype)), weight.to(dtype).double()
    scale = torch.rand(shape[0], generator=generator) + 0.1
    rounded = (weight * 40).round().clamp(-127, 127)
    return PackedMatrix(rounded.to(torch.int8), scale), rounded.double() * scale.double()[:, None]


def inputs(num_rows: int, size: int) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_rows_equal_float64(shape: tuple[int, int], dtype: torch.dtype):
    packed, exact = matrix(shape, dtype)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(0))
    index = torch.tensor([0, shape[0] - 1, shape[0] // 2])
    torch.testing.assert_close(packed.rows(index), exact[index].float(), rtol=1e-6, atol=0)
    for num_rows in (0, 1, 2, 13, 14, 15, 40, MANY):
        x = inputs(num_rows, shape[1])
        terms = x.double().abs() @ exact.abs().T
        for b in (None, bias):
            got = packed.multiply(x, b).double()
            error = got - (x.double() @ exact.T + (0 if b is None else b.double()))
            assert bool((error.abs() <= 1e-6 * (terms + 1) * max(1, shape[1] ** 0.5 / 8)).all())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(shape: tuple[int, int], dtype: torch.dtype):
    packed, _ = matrix(shape, dtype)
    x = inputs(MANY, shape[1])
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(0))
    together = packed.multiply(x, bias)
    for num_rows in range(1, 41):
        first = MANY // 2
        assert torch.equal(
            packed.multiply(x[first : first + num_rows], bias), together[first : first + num_rows]
        )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-9), (torch.int8, 2**-6)])
@pytest.mark.parametrize("shape", [(33, 20), (100, 1024), (50, 2500)], ids=str)
def test_products_round_activations_at_most_to_what_they_may(shape, dtype, error):
    """By some kernels; the others have no use for it. A row keeps its bits among others."""
    exact = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    exact = exact.bfloat16() if dtype == torch.bfloat16 else (exact * 30).clamp(-127, 127).int()
    packed = PackedMatrix(exact.to(dtype), x_dtype=dtype)
    x = inputs(MANY, shape[1])
    together = packed.multiply(x, None)
    expected = x.double() @ exact.double().T
    assert (together.double() - expected).norm() <= error * expected.norm()
    if native.loaded_library().name not in ROUNDING[dtype]:
        assert torch.equal(together, PackedMatrix(exact.to(dtype)).multiply(x, None))
    for num_rows in range(1, 41):
        assert torch.equal(packed.multiply(x[9 : 9 + num_rows], None), together[9 : 9 + num_rows])


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(33, 20), (100, 1024), (50, 2500)], ids=str)
def test_libraries_with_integer_sums_give_the_same_bits(shape, x_dtype, monkeypatch):
    codes = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(0))
    x = inputs(MANY, shape[1])
    results = []
    for switch in EXACT_SUMS if x_dtype == torch.float32 else INTEGER_SUMS:
        monkeypatch.setenv(native.SWITCH, switch)
        native.library.cache_clear()
        if native.library() is not None:
            packed = PackedMatrix(codes.to(torch.int8), torch.ones(shape[0]), x_dtype)
            results.append(packed.multiply(x, None))
    native.library.cache_clear()
    if len(results) < 2:
        pytest.skip("fewer than two libraries for this CPU sum integers")
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.usefixtures("kernels")
def test_numbers_without_a_second_term_are_multiplied_exactly():
    """Nothing is left of infinity and of what bfloat16 holds."""
    x = torch.tensor([[torch.inf, 1.0], [-2.0, 2.0**-126], [torch.nan, 0.0]])
    packed = PackedMatrix(torch.tensor([[1.0, 0.0], [2.0, 4.0]]).bfloat16())
    expected = torch.tensor([[torch.nan, torch.inf], [-2.0, -4.0], [torch.nan, torch.nan]])
    got = packed.multiply(x, None)
    torch.testing.assert_close(got[:, 1:], expected[:, 1:], equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(got[1:], expected[1:], equal_nan=True, rtol=0, atol=0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
def test_rows_of_the_smallest_numbers_and_of_none_stay_in_their_row(x_dtype: torch.dtype):
    """What is over the largest of them must not be infinite."""
    packed = PackedMatrix(torch.full((33, 70), 127, dtype=torch.int8), torch.ones(33), x_dtype)
    x = inputs(5, 70)
    x[1] = 1e-38
    x[2] = 0
    x[3, 7] = torch.nan
    got = packed.multiply(x, None)
    assert bool((got[1] >= 0).all() and (got[1] <= 1e-34).all()) and not got[2].any()
    assert got[3].isnan().all()
    x[1:4] = 0
    torch.testing.assert_close(got[[0, 4]], packed.multiply(x, None)[[0, 4]], rtol=0, atol=0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_16_bits_is_widened_exactly(dtype: torch.dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).unsqueeze(1)
    widened = PackedMatrix(numbers).rows(torch.arange(len(numbers)))
    torch.testing.assert_close(widened, numbers.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("kernels")
def test_nan_stays_nan():
    """A limit that replaces it would make plausible numbers of a broken model's."""
    x = torch.linspace(-5, 5, 70).unsqueeze(0)
    x[0, [3, 69]] = torch.nan
    for name in native.FUNCTIONS:
        assert torch.equal(native.activate(x, name).isnan(), x.isnan()), name
    log_totals, _ = sampling.score(x, torch.tensor([0]))
    assert log_totals.isnan().all()


@pytest.mark.usefixtures("kernels")
def test_the_number_of_threads_changes_nothing(threads: Callable[[int], None]):
    packed, _ = matrix((500, 1100), torch.bfloat16)
    x = inputs(40, 1100)
    results = []
    for num_threads in (1, 2, 3, 2):
        threads(num_threads)
        results.append(packed.multiply(x, None))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.usefixtures("kernels")
def test_products_may_be_made_at_once(threads: Callable[[int], None]):
    """Only one gets the threads, and a late thread must not work on what came after."""
    packed = [matrix((500 + 32 * i, 300), torch.float32)[0] for i in range(4)]
    x = inputs(40, 300)
    expected = [p.multiply(x, None) for p in packed]
    threads(4)  # more than there are processors, perhaps: some are always late
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda i: packed[i % 4].multiply(x, None), range(2000)))
    assert all(torch.equal(result, expected[i % 4]) for i, result in enumerate(results))


def test_a_forked_process_starts_threads_of_its_own(threads: Callable[[int], None]):
    if native.library() is None:
        pytest.skip("no CPU kernels here")
    packed, _ = matrix((500, 300), torch.float32)
    x = inputs(40, 300)
    threads(2)
    expected = packed.multiply(x, None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if torch.equal(packed.multiply(x, None), expected) else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_matrix_may_be_given_by_columns():
    """GPT-2's checkpoints have them the other way round."""
    if native.library() is None:
        pytest.skip("no CPU kernels here")
    weight = torch.randn(70, 48)
    x = inputs(5, 48)
    turned = weight.T.contiguous().T
    assert torch.equal(
        PackedMatrix(turned).multiply(x, None), PackedMatrix(weight).multiply(x, None)
    )


def test_rows_may_be_named_by_any_tensor():
    """A copy of it lives as long as it is read."""
    if native.library() is None:
        pytest.skip("no CPU kernels here")
    packed, exact = matrix((100, 20), torch.float32)
    index = torch.arange(99, -1, -1).repeat_interleave(2)[::2]
    assert not index.is_contiguous()
    assert torch.equal(packed.rows(index), exact.float().flip(0))


def test_inputs_of_another_size_are_not_read_beyond_their_end():
    if native.library() is None:
        pytest.skip("no CPU kernels here")
    packed, _ = matrix((33, 20), torch.float32)
    for x in (torch.ones(2, 19), torch.ones(2, 20, dtype=torch.bfloat16)):
        with pytest.raises(AssertionError):
            packed.multiply(x, None)


def test_a_library_without_the_table_of_kernels_is_not_used(tmp_path, monkeypatch, caplog):
    """As one that was compiled by hand, before there was a table."""
    shutil.copy(_ctypes.__file__, tmp_path / "_generic.so")
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setenv(native.SWITCH, "generic")
    native.library.cache_clear()
    with caplog.at_level("WARNING", logger="servd.worker"):
        assert native.library() is None
    assert "install servd again" in caplog.text
    native.library.cache_clear()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kernel", "arguments"), [("embed", ()), ("no_such_kernel", ()), ("embed", ("x",) * 6)]
)
def test_a_call_that_does_not_fit_the_table_is_refused(kernel: str, arguments: tuple[Any, ...]):
    with pytest.raises((KeyError, TypeError, AttributeError)):
        native.call(kernel, *arguments)


def calls_of(
    action: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[Any, ...]]:
    """The arguments of one call of each kernel that an action calls."""
    calls: dict[str, tuple[Any, ...]] = {}
    encode = native.Library.encode

    def spy(self: native.Library, kernel: str, *arguments: Any) -> bytes:
        calls[kernel] = arguments
        return encode(self, kernel, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(native.Library, "encode", spy)
        action()
    return calls


def call_many(tiny_llama: Path) -> None:
    """Call every kernel, by the steps of a model and by hand."""
    driver = Driver(config_for(tiny_llama, block_size=16))
    slot = driver.add([5, 17, 99, 200, 31, 8, 44, 3])
    driver.generate([slot], 2)
    x = torch.rand(3, 64)
    positions = torch.arange(3)
    native.embed(positions, x)
    matrix((33, 64), torch.int8)[0].rows(positions)
    spread(x)
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    groups = [torch.rand(32, 2).bfloat16() for _ in range(2)]
    grouped = GroupedMatrix(Quantized(codes, *groups, 32, tuple(map(float, range(16)))))
    grouped.multiply(x, None)
    grouped.rows(positions)
    routing = native.route(torch.rand(3, 4), RoutingRule(2, True))
    plain = ExpertMatrices([matrix((32, 64), torch.float32)[0]] * 4)
    plain.multiply(x, routing.tokens, routing.starts)
    y = ExpertMatrices([grouped] * 4).multiply(x, routing.tokens, routing.starts)
    native.combine(y, routing)
    native.scale(x, 2.0, x)
    ends = torch.tensor([64])
    factors = LowRank(torch.rand(2, 64, 16), torch.rand(2, 16, 64), torch.tensor([[4], [8]]), ends)
    native.add_low_rank(x.clone(), x, factors, torch.tensor([0, 1, -1]))
    words = torch.full((3, 2), -1, dtype=torch.int32)
    sampling.edit_logits(x, LogitEdits(bitmasks=Bitmasks(words, torch.arange(3).int())))
    weights = sampling.to_weights(x, x.amax(dim=1), torch.ones(3))
    lowest = torch.zeros(3)
    top_p = torch.ones(3, dtype=torch.float64)
    sampling.filter_top_k_top_p(weights, lowest, positions, top_p)
    sampling.draw(weights, lowest, positions, positions)
    sampling.score(x, positions)
    int8.quantize(x)
    for inputs in (scan_inputs((2, 6, 12, 10), "delta"), convolution_inputs(16, 4, is_gated=True)):
        inputs.run(native, state_rows(inputs))
    native.gated_norm(x, x, x[0].contiguous(), 1e-6, gates_first=False)
    native.multiply_sigmoid(x, x)
    int4.quantize(x, importance=torch.rand(64))
    blocks = torch.zeros(3, 2 * 20, dtype=torch.uint8)
    gguf._unpack(gguf.BLOCKS["Q4_1"], blocks, 32, 20, torch.device("cpu"))
    q = torch.rand(1, 2, 3, 16)
    attend(torch.bfloat16, torch.nn.Identity(), q, q, q, None, 1.0)


@pytest.mark.usefixtures("kernels")
def test_kernels_refuse_wrong_types_and_sizes(tiny_llama, monkeypatch):
    calls = calls_of(lambda: call_many(tiny_llama), monkeypatch)
    assert calls.keys() >= native.loaded_library().signatures.keys() - {"set_threads"}
    run = native.Library.run
    monkeypatch.setattr(native.Library, "run", lambda *_: pytest.fail("it ran"))
    for kernel, arguments in calls.items():
        for place, tensor in enumerate(arguments):
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            other = torch.float16 if tensor.dtype != torch.float16 else torch.bfloat16
            for bad in (
                tensor.to(other),
                tensor.new_empty(0),
                torch.empty_like(tensor, device="meta"),
            ):
                with pytest.raises(ValueError, match=f"^{kernel}: "):
                    native.call(kernel, *arguments[:place], bad, *arguments[place + 1 :])
    monkeypatch.setattr(native.Library, "run", run)


@pytest.mark.usefixtures("kernels")
def test_rows_apart_must_all_lie_in_their_memory():
    memory = torch.rand(60)
    rows = memory.as_strided((3, 10), (20, 1), 9)  # the last one ends with the memory, but for one
    sampling.score(rows, torch.zeros(3, dtype=torch.int64))
    sums = torch.empty(4)
    ranks = torch.empty(4, dtype=torch.int64)
    for stride, count in ((21, 3), (20, 4)):
        with pytest.raises(ValueError, match="^score: logits"):
            native.call("score", rows, stride, ranks[:count] * 0, count, 10, sums, ranks)


def embed(index: list[int]) -> None:
    native.embed(torch.tensor(index), torch.zeros(10, 4))


def gather_rows(index: list[int]) -> None:
    matrix((33, 20), torch.bfloat16)[0].rows(torch.tensor(index))


def score(token_ids: list[int]) -> None:
    sampling.score(torch.zeros(2, 50), torch.tensor(token_ids))


def penalize(slots: list[int]) -> None:
    counts = torch.zeros(4, 50, dtype=torch.int32)
    factors = torch.ones(4, 3)
    rows = torch.arange(len(slots))
    penalized = Penalized(rows, torch.tensor(slots), counts, factors)
    sampling.edit_logits(torch.zeros(2, 50), LogitEdits(penalized=penalized))


def mask(*shape: int) -> None:
    words = torch.full(shape, -1, dtype=torch.int32)
    bitmasks = Bitmasks(words, torch.arange(shape[0]).int())
    sampling.edit_logits(torch.zeros(2, 50), LogitEdits(bitmasks=bitmasks))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: embed([9, 10]), "embed: index[1] is 10, not in [0, 10)"),
        (lambda: embed([-1]), "embed: index[0] is -1, not in [0, 10)"),
        (lambda: embed([0] * 20 + [2**62]), f"embed: index[20] is {2**62}, not in [0, 10)"),
        (lambda: gather_rows([0, 33]), "gather_rows: index[1] is 33, not in [0, 33)"),
        (lambda: score([49, 50]), "score: token_ids[1] is 50, not in [0, 50)"),
        (lambda: penalize([3, 4]), "edit_logits: slots[1] is 4, not in [-1, 4)"),
        (lambda: mask(1, 2), "edit_logits: rows of the bitmask is 2, at most 1 are there"),
        (lambda: mask(2, 1), "edit_logits: vocab of the bitmask is 50, at most 32 are there"),
    ],
)
def test_an_index_outside_is_an_error_that_names_it(call: Callable[[], None], message: str):
    with pytest.raises(IndexError, match=f"^{re.escape(message)}$"):
        call()
    embed([9])  # and the process is well


@pytest.mark.usefixtures("kernels")
def test_a_program_ends_at_a_bad_index():
    lib = native.loaded_library()
    table = torch.arange(3.0).unsqueeze(1)
    out = torch.full((3, 1), -1.0)
    indices = torch.tensor([2, 3, 1])
    program = b"".join(
        lib.encode("embed", table, 3, 1, index, 1, out[i])
        for i, index in enumerate(indices.split(1))
    )
    with pytest.raises(IndexError, match="embed"):
        lib.run(program)
    assert out.flatten().tolist() == [2.0, -1.0, -1.0]
    indices[1] = 0
    lib.run(program)
    assert out.flatten().tolist() == [2.0, 0.0, 1.0]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        # Before its loop. Of the weight: type, terms, packed, table, scales, group size, n, k.
        ("matmul", lambda x: (x, 2**40, 0, 1, x, None, 0, None, None, None, 0, 1, 1, None, x, 1))
    ],
)
def test_a_kernel_without_memory_for_its_work_is_an_error_that_names_it(
    kernel, arguments, monkeypatch
):
    signature = native.loaded_library().signatures[kernel]
    monkeypatch.setattr(signature, "fits", lambda *_: True)  # its sizes are made up
    with pytest.raises(MemoryError, match=f"^{kernel}: no memory for intermediate results$"):
        native.call(kernel, *arguments(torch.zeros(6)))
    embed([9])  # and the process is well


@pytest.mark.parametrize(
    ("is_built", "capability", "says"),
    [
        (False, "AVX512", "not built here: compile it with SERVD_KERNELS=all"),
        (True, "DEFAULT", "not for this CPU"),
        (False, "DEFAULT", "not for this CPU"),
    ],
)
def test_a_wanted_library_that_is_not_here(tmp_path, monkeypatch, is_built, capability, says):
    if is_built:
        (tmp_path / "_avx2.so").write_bytes(b"")
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setenv(native.SWITCH, "avx2")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    native.library.cache_clear()
    assert f"SERVD_CPU_KERNELS=avx2: {says}" in native.explain_absence()
    native.library.cache_clear()


def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch, caplog):
    """With the functions of old and other arguments it would read and write anywhere."""
    if native.library() is None:
        pytest.skip("no CPU kernels here")
    shutil.copytree(native.FOLDER / "cpu", tmp_path / "cpu")
    for path in native.FOLDER.glob("_*.so"):
        (tmp_path / path.name).write_bytes(
            path.read_bytes() + f"servd_state_{native.state()}".encode()
        )
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native.library.cache_clear()
    assert native.library() is not None
    (tmp_path / "cpu" / "vectors.h").write_text("// something else")
    native.library.cache_clear()
    with caplog.at_level("WARNING", logger="servd.worker"):
        assert native.library() is None
    assert "its sources have changed since it was compiled): install servd again" in caplog.text
    shutil.rmtree(tmp_path / "cpu")  # a wheel has none
    native.library.cache_clear()
    assert native.library() is not None
    native.library.cache_clear()


def test_setup_names_the_state_of_the_sources():
    """In a process of its own: setuptools wants to be imported before whoever needs distutils."""
    lines = (
        "import runpy, setuptools",
        "setuptools.setup = lambda **options: None",
        "print(runpy.run_path('setup.py')['STATE'])",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == native.state()
