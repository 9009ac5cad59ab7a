"""Which engines are whose, by the options of data parallelism."""

import pytest

from servd.base.errors import ConfigError
from servd.config import Config
from servd.config.data_parallel import divide

RAY = {"data_parallel_backend": "ray"}


def divided(**options) -> tuple[int, int, int]:
    """Engines of the server, those of this host, and the number of the first of these."""
    config = Config.load({"data_parallel_size": 4} | options)
    decided = {name: decision.value for name, decision in divide(config).items()}
    parallel = config.replace(**decided).parallel
    return parallel.data_parallel_size, parallel.num_engines_here, parallel.first_rank


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (4, 4, 0)),
        ({"data_parallel_size_local": 4}, (4, 4, 0)),
        (RAY, (4, 0, 0)),
        (RAY | {"data_parallel_size_local": 1}, (4, 1, 0)),
        ({"data_parallel_start_rank": 2, "data_parallel_size_local": 1}, (1, 1, 2)),
        ({"data_parallel_start_rank": 2}, (2, 2, 2)),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2}, (2, 2, 0)),
        ({"data_parallel_rank": 3}, (1, 1, 3)),
        ({"data_parallel_rank": 0, "data_parallel_external_lb": True}, (1, 1, 0)),
        ({"data_parallel_rank": 40, "data_parallel_size": 64}, (1, 1, 40)),
    ],
)
def test_engines_are_divided_as_by_vllm(options, expected):
    assert divided(**options) == expected


def test_nothing_is_decided_where_one_host_has_all():
    assert divide(Config()) == divide(Config.load({"data_parallel_size": 3})) == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"data_parallel_size_local": 2}, "2 of 4 engines .* --data-parallel-backend ray"),
        ({"data_parallel_size_local": 5}, "--data-parallel-size 4 has no 5 engines from number 0"),
        ({"data_parallel_start_rank": 4}, "this host would run no engine"),
        ({"data_parallel_start_rank": 3, "data_parallel_size_local": 2}, "from 0 to 3"),
        (RAY | {"data_parallel_rank": 1}, "works with one server"),
        (RAY | {"executor": "ray"}, "leave out --executor ray"),
        (RAY | {"headless": True, "ipc_dir": "/x"}, "one engine on this host"),
        ({"data_parallel_rank": 4}, "has no 1 engines from number 4 on: numbers are from 0 to 3"),
        ({"data_parallel_rank": 1, "data_parallel_size_local": 2}, "has no 2 engines"),
        ({"data_parallel_external_lb": True}, "needs --data-parallel-rank"),
        ({"data_parallel_size": 64}, "at most 32 engines"),
        ({"headless": True, "data_parallel_rank": 1, "ipc_dir": "/x"}, "no port for a balancer"),
        ({"headless": True}, "--headless needs --ipc-dir"),
        (
            {"headless": True, "ipc_dir": "/x"},
            "--headless supports one engine on this host, but the options start 4",
        ),
        ({"attach": "/x"}, "--attach supports one engine on this host, but the options start 4"),
        ({"attach": "/x", "headless": True}, "give one of them"),
        (RAY | {"enable_lora": True}, "--enable-lora"),
    ],
)
def test_what_does_not_go_together_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        divided(**options)
