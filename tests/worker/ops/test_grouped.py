"""Matrices of 4 and 8 bits in groups: the weights that are stated, equal bits in any batch."""

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from servd.worker.layers import packed
from servd.worker.layers.packed import ExpertMatrices, GroupedMatrix
from servd.worker.layers.quantized import Quantized, QuantizedMatrix, stack
from servd.worker.ops import native
from tests.worker.cpu_kernels import EXACT_SUMS, INTEGER_SUMS, forced

UNEVEN = (-8.0, 0.5, 1.5, 7.0, -127.0, 3.25, 1e-3, 40.0, 2, 4, 6, 8, 10, 12, 14, 113)
INTEGERS = tuple(map(float, range(16)))
SIGNED = tuple(float(i - 8) for i in range(16))
WIDE = (-128.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)
SIXES = torch.int16  # here: int8 from -32 to 31
# shape, group size, type of codes, of scales, whether there is an offset, values of 4 bits
CASES = [
    ((33, 64), 32, torch.uint8, torch.float16, True, INTEGERS),
    ((70, 1600), 128, torch.uint8, torch.bfloat16, False, UNEVEN),  # blocks of k end inside groups
    ((5, 100), 64, torch.uint8, torch.float32, True, INTEGERS),  # the last group is short
    ((64, 96), 16, torch.int8, torch.float32, False, None),
    ((40, 1000), 1000, torch.int8, torch.bfloat16, True, None),  # a group is a row
    ((48, 256), 128, torch.float8_e4m3fn, torch.float32, False, None),
    ((31, 2100), 32, torch.uint8, torch.float16, False, SIGNED),  # the last group is short
    ((95, 1152), 64, torch.uint8, torch.bfloat16, False, SIGNED),
    ((65, 2176), 128, torch.int8, torch.float16, True, None),
    ((37, 288), 32, torch.uint8, torch.float16, False, WIDE),
    ((67, 1536), 32, torch.uint8, torch.int8, True, INTEGERS),  # blocks of k are of 768
    ((50, 2304), 16, torch.int8, torch.int8, False, None),
    ((35, 1408), 32, torch.int8, torch.int8, True, None),  # and end inside what shares a factor
    ((33, 256), 16, torch.uint8, torch.int8, True, SIGNED),
    ((37, 1280), 16, SIXES, torch.int8, False, None),
    ((70, 1000), 32, SIXES, torch.float16, True, None),
]
WHOLE = [case for case in CASES if case[2] != torch.float8_e4m3fn and case[5] != UNEVEN]


@pytest.fixture(params=native.CAPABILITIES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from forced(request.param, monkeypatch)


def example(
    shape: tuple[int, int],
    group_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    has_offset: bool,
    table: tuple[float, ...] | None,
) -> Quantized:
    generator = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    num_bits = 6 if dtype == SIXES else 8
    if table is not None:
        codes %= 16
    elif dtype == SIXES:
        codes = codes.view(torch.int8) >> 2
        dtype = torch.int8
    elif dtype == torch.float8_e4m3fn:
        codes[codes & 127 == 127] = 0  # NaN
    groups = (shape[0], -(-shape[1] // group_size))
    scale, offset = torch.rand(2, *groups, generator=generator)
    factors = None
    if scale_dtype == torch.int8:
        max_value = 63 if has_offset else 127  # products with the values are exact
        scale = (scale * 2 * max_value - max_value).round()
        offset = (offset * 63).round()
        size = (shape[0], -(-shape[1] // 256) * (1 + has_offset))
        factors = torch.randn(size, generator=generator).half()
    scale = scale.to(scale_dtype)
    offset = offset.to(scale_dtype)
    if has_offset:
        scale = scale.half().to(scale_dtype)  # products with the values are exact
    offset = -offset if has_offset else None
    of_groups = (scale, offset, group_size, table)
    return Quantized(codes.view(dtype), *of_groups, factors=factors, num_bits=num_bits)


def before_a_guard(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last of its page; the next page is not accessible."""
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    end = -(-tensor.nbytes // page) * page
    memory = mmap.mmap(-1, end + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address + end), page, 0) == 0
    flat = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=end - tensor.nbytes
    )
    return flat.view(tensor.shape).copy_(tensor)


def inputs(num_rows: int, size: int) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_are_exact_and_products_equal_float64(case):
    quantized = example(*case)
    packed = GroupedMatrix(quantized)
    exact = quantized.dequantize()
    num_rows, size = exact.shape
    assert torch.equal(packed.rows(torch.arange(num_rows)), exact)
    bias = torch.randn(num_rows, generator=torch.Generator().manual_seed(0))
    for count in (1, 15, 131):
        x = inputs(count, size)
        error = packed.multiply(x, bias).double() - (x.double() @ exact.double().T + bias)
        terms = x.double().abs() @ exact.double().abs().T
        assert bool((error.abs() <= 1e-6 * (terms + 1) * max(1, size**0.5 / 8)).all())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(case):
    quantized = example(*case)
    packed = GroupedMatrix(quantized)
    x = inputs(131, quantized.shape[1])
    together = packed.multiply(x, None)
    for count in (1, 2, 3, 13, 14, 15, 29, 40):
        assert torch.equal(packed.multiply(x[60 : 60 + count], None), together[60 : 60 + count])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_activations_are_rounded_at_most_to_what_they_may(case):
    """By products of integers, exactly those of the rounded numbers; a row keeps its bits."""
    quantized = example(*case)
    packed = GroupedMatrix(quantized, torch.int8)
    x = inputs(131, quantized.shape[1])
    exact = quantized.dequantize().double()
    together = packed.multiply(x, None)
    expected = x.double() @ exact.T
    assert (together.double() - expected).norm() <= 2**-6 * expected.norm()
    is_rounded = not torch.equal(together, GroupedMatrix(quantized).multiply(x, None))
    can_round = native.loaded_library().name in INTEGER_SUMS
    assert is_rounded == can_round
    for count in range(1, 30):
        assert torch.equal(packed.multiply(x[60 : 60 + count], None), together[60 : 60 + count])
    x = (x * 30).round().clamp(-127, 127)
    x[:, ::16] = 127  # which int8 holds with a scale of 1
    error = packed.multiply(x, None).double() - x.double() @ exact.T
    terms = x.abs() @ exact.abs().T.float()
    assert bool((error.abs() <= 1e-6 * (terms + 1) * max(1, exact.shape[1] ** 0.5 / 8)).all())


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_libraries_with_integer_sums_give_the_same_bits(case, x_dtype, monkeypatch):
    quantized = example(*case)
    results = []
    is_exact = x_dtype == torch.float32 and quantized.codes.dtype == torch.int8
    for switch in EXACT_SUMS if is_exact else INTEGER_SUMS:
        monkeypatch.setenv(native.SWITCH, switch)
        native.library.cache_clear()
        if native.library() is not None:
            packed = GroupedMatrix(quantized, x_dtype)
            results.append(packed.multiply(inputs(29, quantized.shape[1]), None))
    native.library.cache_clear()
    if len(results) < 2:
        pytest.skip("fewer than two libraries for this CPU sum integers")
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.usefixtures("kernels")
def test_large_activations_leave_the_others_of_their_row_exact():
    """Each run of 32 has a scale of its own."""
    quantized = example((40, 1000), 1000, torch.int8, torch.float32, False, None)
    quantized.codes[:, 64:96] = 0
    packed = GroupedMatrix(quantized, torch.int8)
    x = inputs(3, 1000)
    x[:, 64:96] *= 1e5
    expected = x.double() @ quantized.dequantize().double().T
    assert (packed.multiply(x, None) - expected).norm() <= 2**-6 * expected.norm()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "values",
    [range(-128, -112), range(112, 128), range(-8, 8), (*range(15), 16), (*range(15), 17), WIDE],
    ids=str,
)
@pytest.mark.parametrize(("size", "group_size"), [(8229, 32), (4099, 128), (1025, 96)])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
def test_the_largest_sums_are_those_of_integers(values, size, group_size, x_dtype):
    """Codes and activations at their ends, of one sign or of both."""
    values = tuple(map(float, values))
    ends = torch.tensor([[0], [15]], dtype=torch.uint8).expand(2, size).contiguous()
    ends = torch.cat([ends, (torch.arange(size) % 2 * 15).to(torch.uint8).unsqueeze(0)])
    scale = torch.ones(3, -(-size // group_size))
    packed = GroupedMatrix(Quantized(ends, scale, None, group_size, values), x_dtype)
    whole = packed.rows(torch.arange(3)).long()
    assert set(whole.flatten().tolist()) == {int(values[0]), int(values[-1])}
    x = torch.tensor([[127], [-127]]).expand(2, size).contiguous()
    x = torch.cat([x, 127 - 254 * (torch.arange(size) % 2).unsqueeze(0)])
    expected = x @ whole.T
    bound = 127 * whole.abs().sum(1)
    error = packed.multiply(x.float(), None).double() - expected
    rounded = (
        1e-6 if native.loaded_library().name in INTEGER_SUMS else 2**-24 * size
    )  # float32 sums
    assert bool((error.abs() <= rounded * bound).all())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_beyond_the_end_is_touched(case, x_dtype: torch.dtype):
    """Each tensor ends where a page begins that may not be read."""
    quantized = example(*case)
    packed = GroupedMatrix(quantized, x_dtype)
    size = quantized.shape[1]
    expected = packed.multiply(inputs(15, size), None)
    for name in ("packed", "scale", "offset", "factors", "table"):
        if (tensor := getattr(packed, name)) is not None:
            setattr(packed, name, before_a_guard(tensor))
    for count in (1, 2, 5, 13, 15):
        out = before_a_guard(torch.zeros(count, quantized.shape[0]))
        packed.multiply_into(out, before_a_guard(inputs(15, size)[:count]), None)
        assert torch.equal(out, expected[:count])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case[3] == torch.int8], ids=str)
def test_factors_change_no_bit_of_products(case, x_dtype: torch.dtype):
    quantized = example(*case)
    forms = [GroupedMatrix(q, x_dtype) for q in (quantized, quantized.without_factors())]
    x = inputs(7, quantized.shape[1])
    products = [form.multiply(x, None) for form in forms]
    assert torch.equal(*products)
    experts = [ExpertMatrices([form] * 3) for form in forms]
    starts = torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    assert all(torch.equal(matrices.multiply(x, None, starts), products[0]) for matrices in experts)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(65, 2176), (31, 254), (16, 126), (33, 61)], ids=str)
def test_codes_of_6_bits_take_less_and_change_no_bit_of_products(shape):
    codes = torch.randint(-32, 32, shape, generator=torch.Generator().manual_seed(1))
    quantized = Quantized(codes.to(torch.int8), torch.rand(shape[0], 1), None, shape[1])
    forms = [GroupedMatrix(replace(quantized, num_bits=n), torch.int8) for n in (6, 8)]
    assert torch.equal(forms[0].rows(torch.arange(shape[0])), quantized.dequantize())
    can_multiply = native.loaded_library().name in ("amx", "bf16", "vnni", "avxvnni", "avx2")
    assert (forms[0].nbytes < forms[1].nbytes) == can_multiply
    for count in (1, 2, 15):
        x = inputs(count, shape[1])
        assert torch.equal(*(form.multiply(x, None) for form in forms))
    if not can_multiply:
        forms[1].arguments = (native.INT6, *forms[1].arguments[1:])
        with pytest.raises(IndexError, match="6 bits"):
            forms[1].multiply(x, None)


@pytest.mark.usefixtures("kernels")
def test_scales_of_8_bits_need_factors_of_their_groups():
    quantized = example(*CASES[13])
    for wrong in (
        replace(quantized, factors=None),
        replace(quantized, scale=quantized.scale.float(), offset=quantized.offset.float()),
    ):
        with pytest.raises(IndexError, match="factors"):
            GroupedMatrix(wrong).multiply(inputs(1, 256), None)


@pytest.mark.usefixtures("kernels")
def test_parts_of_several_types_are_one_matrix():
    parts = [example((n, 64), 32, *CASES[i][2:]) for n, i in ((33, 0), (7, 3), (40, 5))]
    forms = [GroupedMatrix(part) for part in parts]
    x = inputs(20, 64)
    bias = torch.arange(80.0)
    expected = torch.cat([form.multiply(x, None) for form in forms], dim=1) + bias
    torch.testing.assert_close(packed.Stacked(forms).multiply(x, bias), expected)


@pytest.mark.usefixtures("kernels")
def test_every_8_bit_float_is_widened_exactly():
    numbers = torch.tensor([n for n in range(256) if n & 127 != 127], dtype=torch.uint8)
    codes = numbers.view(torch.float8_e4m3fn).unsqueeze(0)
    packed = GroupedMatrix(Quantized(codes, torch.ones(1, 1), None, 254))
    assert torch.equal(packed.rows(torch.tensor([0])), codes.float())


def test_torch_multiplies_the_same_weights():
    quantized = example(*CASES[0])
    form = QuantizedMatrix(quantized, torch.bfloat16)
    x = inputs(3, 64)
    exact = quantized.dequantize()
    assert torch.equal(form.multiply(x, None), x @ exact.T)
    assert torch.equal(form.rows(torch.tensor([4, 1])), exact[[4, 1]].bfloat16())
    assert form.nbytes == 33 * 64 + 2 * 33 * 2 * 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_slices_are_slices_of_the_weights(case):
    quantized = example(*case)
    exact = quantized.dequantize()
    num_rows, size = case[0]
    assert torch.equal(quantized.narrow(0, 2, 3).dequantize(), exact[2:5])
    for start, end in ((0, size // 2), (size // 2, size), (size // 4, size // 2)):
        part = quantized.narrow(1, start, end - start)
        assert torch.equal(part.dequantize(), exact[:, start:end])
    padded = quantized.padded(num_rows + 2).dequantize()
    assert torch.equal(padded[:num_rows], exact) and not padded[num_rows:].any()
    rows = [2, num_rows - 2]
    assert torch.equal(stack(quantized.split(rows)).dequantize(), exact)


@pytest.mark.parametrize("size", [32, 64, 20])
def test_columns_take_their_scales_along(size: int):
    """Heads of Qwen 3.5 in a GGUF file; those of 20 columns are no whole groups."""
    matrix = example((6, 1280), 32, torch.uint8, torch.int8, True, SIGNED)
    order = torch.arange(1280).view(-1, 4, size).transpose(0, 1).flatten()
    reordered = matrix.with_heads(order, size)
    whole = reordered if isinstance(reordered, torch.Tensor) else reordered.dequantize()
    assert torch.equal(whole, matrix.dequantize()[:, order])
    assert isinstance(reordered, torch.Tensor) == (size == 20)
