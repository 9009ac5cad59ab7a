"""What `servd plan --device h100` estimates: near what the bytes take, and no change makes a step
slower unnoticed. `python -m tests.worker.gates.test_step_times` records the table anew, and writes
that of docs/explanation/gpu.md.
"""

import json
import tempfile
from pathlib import Path

import pytest

from servd.worker.runner import step_cost
from tests.worker.gates import catalogue

TABLE = Path(__file__).with_name("step_times.json")
PAGE = Path(__file__).parents[3] / "docs/explanation/gpu.md"
BEGIN = "| model | checkpoint | runs as | speed beside 16 bits, at 1, 64, 256 requests |\n"
NUM_LAYERS = {
    "8B": 32,
    "Phi-3 mini": 32,
    "Gemma 3 27B": 62,
    "30B-A3B": 48,
    "GPT-OSS-20B": 24,
    "V2-Lite": 27,
}
PRODUCTS = {
    None: "16 bits, by cuBLAS",
    "fp8 rows": "8-bit floats from Hopper on, else packed",
    "MXFP4": "packed; attention in 16 bits",
}
MODELS = [
    ("8B", None),
    ("8B", "fp8 rows"),
    ("8B", "fp8 blocks"),
    ("8B", "AWQ"),
    ("8B", "c-t w8a16"),
    ("30B-A3B", None),
    ("30B-A3B", "fp8 blocks"),
    ("30B-A3B", "AWQ"),
    ("GPT-OSS-20B", None),
    ("GPT-OSS-20B", "MXFP4"),
    ("Gemma 3 27B", None),
    ("Gemma 3 27B", "AWQ"),
    ("Phi-3 mini", None),
    ("V2-Lite", None),
]
ROWS = (1, 64, 256)


def times_of(folder: Path, family: str, form: str | None) -> dict[str, float]:
    """Milliseconds by requests, of all layers."""
    runner = catalogue.load(catalogue.write_headers(folder, family, form))
    times: dict[str, float] = {}
    for num_rows in ROWS:
        launches = catalogue.decode_step(runner, num_rows, 1024)
        first, *_, last = [i for i, x in enumerate(launches) if x.name in step_cost.ATTENTION]
        whole = step_cost.time_on(catalogue.H100, launches, num_rows).total
        layers = step_cost.time_on(catalogue.H100, launches[first:last], num_rows).total
        more = (NUM_LAYERS[family] - catalogue.NUM_LAYERS) / (catalogue.NUM_LAYERS - 1)
        times[str(num_rows)] = round(whole + more * layers, 3)
    return times


@pytest.mark.parametrize(("family", "form"), MODELS, ids=str)
def test_no_step_is_slower_than_recorded(tmp_path: Path, family: str, form: str | None):
    recorded = json.loads(TABLE.read_text())[f"{family}, {form or 'bf16'}"]
    times = times_of(tmp_path, family, form)
    assert times == pytest.approx(recorded, rel=0.03), "record the table if steps became faster"


@pytest.mark.parametrize(("family", "form"), MODELS, ids=str)
def test_a_layer_takes_its_bytes_and_launches(tmp_path: Path, family: str, form: str | None):
    folder = catalogue.write_headers(tmp_path, family, form)
    runner = catalogue.load(folder)
    for num_rows in ROWS:
        layer = catalogue.layer_of(catalogue.decode_step(runner, num_rows, 1024))
        time = step_cost.time_on(catalogue.H100, layer, num_rows)
        num_bytes = catalogue.stored_bytes(folder, num_rows) + sum(x.kv_cache for x in layer)
        bound = 1e3 * num_bytes / catalogue.H100.bandwidth + time.launches
        # Products of many rows take longer than the bytes of weights of 4 or 8 bits.
        assert time.total <= 1.11 * bound or time.products > 0.2 * time.total, (num_rows, time)


def page_rows(table: dict[str, dict[str, float]]) -> str:
    """The table of the page."""
    lines = []
    for family, form in MODELS:
        times = table[f"{family}, {form or 'bf16'}"]
        wide = table[f"{family}, bf16"]
        shares = ", ".join(f"{wide[rows] / times[rows]:.1f}x" for rows in times)
        product = PRODUCTS.get(form, "packed")
        lines.append(f"| {family} | {form or '16 bits'} | {product} | {shares} |\n")
    return BEGIN + "|---|---|---|---|\n" + "".join(lines)


def test_the_page_has_the_recorded_times():
    assert page_rows(json.loads(TABLE.read_text())) in PAGE.read_text()


def main() -> None:
    table = {}
    for family, form in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            table[f"{family}, {form or 'bf16'}"] = times_of(Path(folder), family, form)
    TABLE.write_text(json.dumps(table, indent=2) + "\n")
    before, _, table_and_more = PAGE.read_text().partition(BEGIN)
    _, _, after = table_and_more.partition("\n\n")
    PAGE.write_text(f"{before}{page_rows(table)}\n{after}")


if __name__ == "__main__":
    main()
