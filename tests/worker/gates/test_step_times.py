"""What `servd plan --device h100` estimates for models of three layers: near what their bytes take,
and no change makes a step slower unnoticed. `python -m tests.worker.gates.test_step_times` records
the table anew.
"""

import json
import tempfile
from pathlib import Path

import pytest

from servd.worker.runner import step_cost
from tests.worker.gates import catalogue

TABLE = Path(__file__).with_name("step_times.json")
MODELS = [
    ("8B", None),
    ("8B", "fp8 rows"),
    ("8B", "fp8 blocks"),
    ("8B", "AWQ"),
    ("8B", "c-t w8a16"),
    ("30B-A3B", None),
    ("30B-A3B", "fp8 blocks"),
    ("30B-A3B", "AWQ"),
    ("GPT-OSS-20B", "MXFP4"),
    ("Gemma 3 27B", None),
    ("Gemma 3 27B", "AWQ"),
    ("Phi-3 mini", None),
    ("V2-Lite", None),
]
ROWS = (1, 64, 256)


def times_of(folder: Path, family: str, form: str | None) -> dict[str, float]:
    """Milliseconds by requests."""
    runner = catalogue.load(catalogue.write_headers(folder, family, form))
    return {
        str(num_rows): round(
            step_cost.time_on(
                catalogue.H100, catalogue.decode_step(runner, num_rows, 1024), num_rows
            ).total,
            4,
        )
        for num_rows in ROWS
    }


@pytest.mark.parametrize(("family", "form"), MODELS, ids=str)
def test_no_step_is_slower_than_recorded(tmp_path: Path, family: str, form: str | None):
    recorded = json.loads(TABLE.read_text())[f"{family}, {form or 'bf16'}"]
    times = times_of(tmp_path, family, form)
    assert times == pytest.approx(recorded, rel=0.03), "record the table if steps became faster"


def main() -> None:
    table = {}
    for family, form in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            table[f"{family}, {form or 'bf16'}"] = times_of(Path(folder), family, form)
    TABLE.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
