"""A layer of a decode step is few launches, because a graph waits about 2 microseconds for each."""

from pathlib import Path

import pytest

from tests.worker.gates import catalogue

MOST = {"8B": 10, "Gemma 3 27B": 12, "30B-A3B": 30}


@pytest.mark.parametrize("family", MOST)
def test_launches_of_a_layer(tmp_path: Path, family: str):
    folder = catalogue.write_headers(tmp_path, family, None)
    launches = catalogue.layer_of(catalogue.decode_step(catalogue.load(folder), 64, 1024))
    assert len(launches) <= MOST[family], [launch.name for launch in launches]
