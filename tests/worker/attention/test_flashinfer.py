"""The FlashInfer backend before a stand-in that reads the arguments as documented; on a CPU."""

import importlib.util
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from servd.worker.attention import AttentionSpec, flashinfer
from tests.worker.attention.paged import Rows, dense

SPEC = AttentionSpec(8, 2, 64, 16, None, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
LENS = [(40, 1), (0, 23), (16, 16), (33, 9), (0, 1), (15, 1)]


class PagedWrapper:
    """`BatchPrefillWithPagedKVCacheWrapper`, row by row."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        self.device = float_workspace_buffer.device

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        q_data_type="float16",
        kv_data_type=None,
    ):
        lengths = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert all(t.dtype == torch.int32 for t in (*lengths, paged_kv_indices))
        # Those on a device would be waited for.
        assert (
            all(t.device.type == "cpu" for t in lengths) and paged_kv_indices.device == self.device
        )
        assert causal and paged_kv_indices.shape == (paged_kv_indptr[-1],)
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        self.query_lens = qo_indptr.diff().tolist()
        self.pages = paged_kv_indices.long().split(paged_kv_indptr.diff().tolist())
        self.seq_lens = ((paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len).tolist()
        self.page_shape = (page_size, num_kv_heads, head_dim_qk)
        self.query_shape = (sum(self.query_lens), num_qo_heads, head_dim_qk)
        self.scale, self.window = (
            sm_scale or head_dim_qk**-0.5,
            None if window_left < 0 else window_left + 1,
        )
        self.dtypes = q_data_type, kv_data_type or q_data_type

    def run(self, q, paged_kv_cache, *, k_scale=None):
        keys, values = paged_kv_cache
        assert q.shape == self.query_shape and keys.shape[1:] == values.shape[1:] == self.page_shape
        assert (q.dtype, keys.dtype) == self.dtypes
        outputs = []
        for rows, pages, seq_len in zip(
            q.split(self.query_lens), self.pages, self.seq_lens, strict=True
        ):
            k, v = (cache[pages].flatten(0, 1)[:seq_len] for cache in (keys, values))
            outputs.append(dense(rows, k, v, self.window, self.scale * (k_scale or 1.0)))
        return torch.cat(outputs).to(q.dtype)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is there, on a machine that has all that FlashInfer needs."""
    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PagedWrapper)
    )
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name == "flashinfer" else find(name)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def spec_of(**changes: object) -> AttentionSpec:
    return AttentionSpec(**vars(SPEC) | changes)


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_it_says_what_flashinfer_documents(window: int | None, block_size: int):
    float32 = {"dtype": torch.float32, "kv_dtype": torch.float32}
    spec = spec_of(sliding_window=window, block_size=block_size, **float32)
    rows, backend = Rows(spec, LENS, rotary=True), flashinfer.Backend(spec)
    out = rows.run(backend)
    torch.testing.assert_close(out.double(), rows.expected(), atol=1e-5, rtol=0)


def test_the_stand_in_has_the_parameters_of_flashinfer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    there = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    for name in ("__init__", "plan", "run"):
        mine, theirs = (
            inspect.signature(getattr(wrapper, name)).parameters
            for wrapper in (PagedWrapper, there.BatchPrefillWithPagedKVCacheWrapper)
        )
        assert mine.keys() <= theirs.keys()
        positional = [
            parameter for parameter, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        assert positional == list(theirs)[: len(positional)]
