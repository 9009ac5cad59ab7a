"""The varlen backend before a stand-in that reads the arguments as torch documents; on a CPU."""

import inspect
import os

import pytest
import torch

from servd.worker.attention import AttentionSpec, auto_backends, fused_write, make_backend, varlen
from tests.worker.attention.paged import Rows, dense

SPEC = AttentionSpec(4, 2, 16, 16, None, torch.bfloat16, torch.bfloat16, torch.device("cpu"))


def paged_attention(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale,
    window_size,
    enable_gqa,
    seqused_k,
    block_table,
    num_splits,
):
    """`varlen_attn` of a paged cache, row by row."""
    assert cu_seq_k is None and enable_gqa and num_splits is None
    lens = cu_seq_q.diff()
    assert max_q >= lens.max() and max_k >= seqused_k.max()
    assert all(t.dtype == torch.int32 for t in (cu_seq_q, seqused_k, block_table))
    left, right = window_size
    assert right == 0
    outputs = []
    for q, table, seq_len in zip(
        query.split(lens.tolist()), block_table.long(), seqused_k.tolist(), strict=True
    ):
        keys, values = (part[table].flatten(0, 1)[:seq_len] for part in (key, value))
        outputs.append(dense(q, keys, values, None if left < 0 else left + 1, scale))
    return torch.cat(outputs).to(query.dtype)


@pytest.fixture
def backend_class(monkeypatch: pytest.MonkeyPatch) -> type[varlen.Backend]:
    monkeypatch.setattr(varlen, "_varlen_attn", lambda: paged_attention)
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", lambda name: None)
    return varlen.Backend


@pytest.mark.parametrize("window", [None, 1, 20])
def test_it_says_what_torch_documents(backend_class: type[varlen.Backend], window: int | None):
    spec = AttentionSpec(4, 2, 16, 16, window, torch.float32, torch.float32, torch.device("cpu"))
    rows = Rows(spec, [(40, 1), (0, 23), (33, 9)], rotary=True)
    torch.testing.assert_close(
        rows.run(backend_class(spec)).double(), rows.expected(), atol=1e-5, rtol=0
    )


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
def test_keys_and_values_are_written_by_one_kernel(backend_class: type[varlen.Backend]):
    """On a GPU; here in the interpreter."""
    pytest.importorskip("triton")
    spec = AttentionSpec(4, 2, 16, 16, None, torch.float32, torch.float32, torch.device("cpu"))
    backend, rows = backend_class(spec), Rows(spec, [(40, 1), (0, 23)], rotary=True)
    assert backend.fused_write is None
    backend.fused_write = fused_write(
        AttentionSpec(**vars(spec) | {"device": torch.device("cuda")})
    )
    assert backend.fused_write is not None
    torch.testing.assert_close(rows.run(backend).double(), rows.expected(), atol=1e-5, rtol=0)
    assert (
        fused_write(AttentionSpec(**vars(SPEC) | {"device": torch.device("cuda"), "head_dim": 80}))
        is None
    )


def test_the_stand_in_has_the_parameters_of_torch():
    there = inspect.signature(varlen._varlen_attn()).parameters
    if missing := varlen.NEEDED_PARAMETERS - there.keys():
        pytest.skip(f"this torch has no {', '.join(sorted(missing))}")
    mine = inspect.signature(paged_attention).parameters
    assert mine.keys() <= there.keys() and varlen.NEEDED_PARAMETERS <= mine.keys()
    assert [name for name, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == list(there)[
        :7
    ]


def test_auto_takes_the_triton_kernels_where_varlen_cannot_run(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(
        varlen.Backend, "supports", classmethod(lambda cls, spec: "needs the package flash-attn-3")
    )
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    spec = AttentionSpec(**vars(SPEC) | {"device": torch.device("cuda")})
    assert auto_backends("cuda")[0] == "varlen" and make_backend("auto", spec)[0] == "triton"
