"""No kernel is compiled while requests wait: steps launch what the warm-up has launched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servd.messages.engine import GrammarOutput
from servd.messages.params import SamplingParams
from servd.worker.compat import intercept_launches
from servd.worker.runner import graph_runner
from tests.parity.families import CASES, make_checkpoint
from tests.worker.driver import Driver, config_for
from tests.worker.gates.signatures import Signatures, compile_all
from tests.worker.gates.simulated import use_simulated_device

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=None),
    SamplingParams(seed=1, max_tokens=None),
    SamplingParams(seed=1, top_p=0.9, max_tokens=None),
    SamplingParams(seed=1, top_k=5, min_p=0.1, max_tokens=None),
    SamplingParams(seed=1, logprobs=2, max_tokens=None),
    SamplingParams(temperature=0.0, logit_bias={3: 1.0}, max_tokens=None),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=None),
    SamplingParams(logit_bias={3: 1.0}, frequency_penalty=0.2, max_tokens=None),
]
# Numbers decide nothing about what is launched, so these need not run.
HEAVY = ("attention", "merge", "norm", "gate", "rotate_and_store", "experts", "low_bit")


class LightSignatures(Signatures):
    def launch(self, kernel: Any, arguments: dict[str, Any], run: Any) -> None:
        self.runs = not kernel.__name__.startswith(HEAVY)
        super().launch(kernel, arguments, run)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that nobody has written
def test_steps_launch_kernels_that_are_compiled(tmp_path: Path, monkeypatch, eager: bool):
    use_simulated_device(monkeypatch)
    monkeypatch.setattr(graph_runner, "decode_sizes", lambda size: [1, 2, size])
    monkeypatch.setattr(graph_runner, "mixed_sizes", lambda size: [size])
    folder = make_checkpoint(tmp_path, "llama", CASES["llama"]["llama3 rope"])
    config = config_for(
        folder,
        dtype="float16",
        enable_lora=True,
        attention_backend="triton",
        block_size=16,
        max_num_seqs=5,
        max_num_batched_tokens=48,
        max_model_len=2048,
        kv_cache_memory=1 << 26,
        enforce_eager=eager,
    )
    warm = LightSignatures()
    with intercept_launches(warm.launch):
        driver = Driver(config)
    served = LightSignatures()
    with intercept_launches(served.launch):
        for num_rows in (1, 2, 3, 5):
            for params in PARAMS:
                serve(driver, num_rows, params)
    missing = served.by_text.keys() - warm.by_text.keys()
    assert not missing, "\n".join(sorted(missing))
    if eager:
        return
    # Those of attention and of products are compiled as true models launch them.
    signatures = [
        signature
        for signature in warm.by_text.values()
        if ".sample." in signature["kernel"] or "low_rank" in signature["kernel"]
    ]
    results = compile_all(signatures, 90, tmp_path / "cache")
    assert {"draw_kernel", "shrink_kernel"} <= {result["kernel"] for result in results}
    # The search of top-k and top-p spills 56 bytes, outside of its loops.
    assert {x["kernel"] for x in results if x["spilled"]} <= {"top_k_top_p_kernel"}


def serve(driver: Driver, num_rows: int, params: SamplingParams) -> None:
    """Prompts, steps of all rows with and without a grammar in the first, of which one is long."""
    lengths = (1, 10, 19, 28, 600)[:num_rows]
    slots = [driver.add([7] * length, params) for length in lengths]
    if params.seed:
        driver.worker.runner.adapters.occupy(slots[0])
    while pending := [slot for slot in slots if driver.num_left(slot) > 1]:
        driver.step({slot: min(driver.num_left(slot), 45 // len(pending)) for slot in pending})
    words = np.full(-(-driver.spec.vocab_size // 32), -1, dtype=np.int32).tobytes()
    driver.step(dict.fromkeys(slots, 1))
    driver.step(dict.fromkeys(slots, 1), GrammarOutput([0], [0], words))
    for slot in slots:
        driver.free(slot)
