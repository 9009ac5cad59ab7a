"""`servd simulate`: the simulation against the engine that it stands for."""

import json
import stat
from typing import Any

import pytest

from servd import cli
from servd.base.errors import ConfigError
from servd.config import Config
from servd.simulate import costs as step_costs
from servd.simulate.cluster import ClusterOptions, ClusterSim, identify_blocks
from servd.simulate.costs import Costs
from servd.simulate.recorder import Recorder
from servd.simulate.traces import SHAPES, RequestLine, ServerLine, StepLine, make_requests, read
from tests.api.harness import serve

COSTS = Costs(step=5e6, token=4e5, context=500, pair=3, before=1e6, after=2e6)
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 256}


def cluster(
    num_blocks: int, costs: Costs = COSTS, windows: tuple[int | None, ...] = (None,), **options: Any
) -> ClusterSim:
    options = {**SIZES, "block_size": 16, "max_model_len": 2000, **options}
    return ClusterSim(ServerLine(num_blocks, 1 << 20, options, windows), costs, ClusterOptions())


def lines(count: int, rate: float, shape: str = "short") -> list[RequestLine]:
    return [*make_requests(SHAPES[shape], count, rate, 2000)]


def total(requests: list[RequestLine], name: str) -> int:
    return sum(getattr(request, name) for request in requests)


@pytest.mark.parametrize(
    ("num_blocks", "rate", "options"),
    [
        (2000, 3, {}),
        (150, 9, {}),  # requests are preempted
        (500, 20, {"data_parallel_size": 3, "scheduling_policy": "fcfs"}),
        (300, 9, {"kv_offloading_size": 1, "block_size": 8}),
        (900, 9, {"windows": (None, 48)}),
    ],
)
def test_every_request_ends_and_frees_its_blocks(num_blocks, rate, options):
    simulated = cluster(num_blocks, **options)
    requests = lines(250, rate)
    simulated.run(requests)
    assert len(simulated.served) == 250
    num_output = total(requests, "output_length")
    assert total(simulated.served, "output_length") == num_output
    assert simulated.gaps.total() == num_output - 250
    for engine in simulated.engines:
        pool = engine.scheduler.kv_cache.pool
        assert pool.num_free == pool.num_blocks and not engine.scheduler.has_work


def test_costs_are_found_from_steps_alone(monkeypatch):
    """What a simulation with known costs did, as a recording: the fit must explain it."""
    costs = Costs(step=4e6, row=2e5, token=3e4, token_beyond_16=5e4, context=300, pair=8, idle=3e6)
    steps: list[StepLine] = []
    requests = lines(150, 6)
    simulated = cluster(3000, costs=costs)
    engine = simulated.engines[0]
    end_step = engine.end_step

    def recorded():
        assert engine.launched is not None
        tokens = sum(row.num_scheduled_tokens for row in engine.launched.rows)
        rows = len(engine.launched.rows)
        steps.append(StepLine(0, engine.began_ns, engine.clock.ns, tokens, rows))
        step = end_step()
        for output in step[0]:
            line = requests[int(output.request_id) - 1]
            for mark in output.marks:
                if mark.stage in ("scheduled", "first_token", "finished"):
                    setattr(line, mark.stage, mark.at_ns / 1e6)
            line.cached = max(line.cached, output.num_cached_tokens)
        return step

    monkeypatch.setattr(engine, "end_step", recorded)
    simulated.run(requests)
    for line in requests:  # marks are times, a recording has what came after the arrival
        line.timestamp = line.scheduled
        line.first_token, line.finished = (
            line.first_token - line.scheduled,
            (line.finished - line.scheduled),
        )
        line.scheduled = 0.0
    fitted = step_costs.fit(steps, requests)
    assert fitted is not None
    steps_like = (1, 1, 80, 0), (12, 12, 5000, 0), (130, 6, 900, 9000), (150, 1, 0, 11_000, True)
    for like in steps_like:
        assert fitted.of_step(*like) == pytest.approx(costs.of_step(*like), rel=0.05)


def test_blocks_are_those_of_the_prompt_and_of_the_answer():
    line = RequestLine(0, 40, 30, [5, 6], [7, 8], 16)
    assert identify_blocks(line, 1, 16) == [5, 6, 7, 8]
    own_blocks = identify_blocks(RequestLine(0, 40, 30, [5, 6], [], 16), 1, 16)
    assert own_blocks[:2] == [5, 6] and not {7, 8} & {*own_blocks} and len({*own_blocks}) == 4
    assert own_blocks[2:] != identify_blocks(RequestLine(0, 40, 30, [5, 6], [], 16), 2, 16)[2:]
    # Of a published trace, whose last block is filled in part.
    first, second = (RequestLine(0, 1000, 30, [1, last], [], 512) for last in (2, 3))
    both = [identify_blocks(request_line, i, 16) for i, request_line in enumerate((first, second))]
    same = [a == b for a, b in zip(*both, strict=True)]
    assert same == [True] * 32 + [False] * 32
    again = identify_blocks(first, 9, 16)
    assert again[:62] == both[0][:62] and again[62:] != both[0][62:]
    assert len(identify_blocks(first, 1, 2048)) == 0


async def test_a_recorded_conversation_is_cached_as_it_was(tmp_path):
    """The simulated caches have what those of the fake executor had; no text is in the file."""
    path = tmp_path / "trace.jsonl"
    async with serve(record_trace=str(path), block_size=4) as served:
        text = "Tell me of the sea, please."
        for _ in range(3):
            body = {"prompt": text, "max_tokens": 11, "seed": 1, "n": 2}
            answer = (await served.http.post("/v1/completions", json=body)).json()
            text += answer["choices"][0]["text"] + " More of it."
        vectors = {"prompt": "Another one, and longer than the others", "max_tokens": 3}
        await served.http.post("/v1/completions", json=vectors)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "sea" not in path.read_text() and "101,108,108" not in path.read_text()
    recording = read(str(path))
    assert recording.server is not None and recording.server.options["block_size"] == 4
    assert len(recording.requests) == 7 and recording.steps
    assert sum(request.cached for request in recording.requests[2:6]) > 60
    assert all(
        0 < request.scheduled <= request.first_token <= request.finished
        for request in recording.requests
    )
    quick = Costs(step=1000)  # the next turn comes when there is an answer
    simulated = cluster(recording.server.num_blocks, costs=quick, block_size=4, max_num_seqs=64)
    simulated.run(recording.requests)
    for name in ("cached", "output_length"):
        assert total(simulated.served, name) == total(recording.requests, name)


def test_recordings_share_a_key_that_is_not_in_them(tmp_path):
    config = Config.load({"block_size": 4})
    recorder, second = (Recorder(str(tmp_path / "a"), config) for _ in range(2))
    third = Recorder(str(tmp_path / "b"), config)
    tokens = [*range(9)]
    assert (
        recorder._hash_blocks(tokens, b"")
        == second._hash_blocks(tokens, b"")
        != third._hash_blocks(tokens, b"")
    )
    assert recorder._hash_blocks(tokens, b"salt")[0] != recorder._hash_blocks(tokens, b"")[0]
    whole, end = recorder._hash_blocks(tokens, b"")
    first, middle = recorder._hash_blocks(tokens[:4], b"")
    assert recorder._hash_blocks(tokens[4:], middle) == (whole[1:], end) and first == whole[:1]
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600
    for open_recorder in (recorder, second, third):
        open_recorder.close()
    with pytest.raises(ConfigError, match="--record-trace"):
        Recorder(str(tmp_path / "no" / "a"), config)


def run_simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", *arguments])
    assert isinstance(end.value.code, int)
    captured = capsys.readouterr()
    return end.value.code, captured.out + captured.err


def test_routing_by_prefix_finds_more_than_turns(capsys, tmp_path):
    costs = '{"step": 5e6, "token": 1e5}'
    common = ["--shape", "short", "--rate", "30", "--costs", costs]
    common += ["--num-blocks", "2000", "--data-parallel-size", "4"]
    results = []
    counts = {"servd": 400, "round-robin": 400, "prefix": 40, "least": 40, "random": 40}
    for routing, count in counts.items():
        file = tmp_path / routing
        options = ["--requests", str(count), "--routing", routing, "--json", str(file)]
        code, output = run_simulate(capsys, *common, *options)
        assert code == 0 and "prefix_hits_%" in output, output
        results.append(json.loads(file.read_text())["simulated"])
        busy = f"simulated: keeping up: engines busy {results[-1]['busy_%']:.0f} % of the time"
        assert output.startswith(busy), output
    servd, turns, *_ = results
    assert servd["prefix_hits_%"] > turns["prefix_hits_%"] + 10
    assert servd["lost_by_routing_%"] < turns["lost_by_routing_%"] - 10
    assert [simulated["requests"] for simulated in results] == [*counts.values()]


def test_four_engines_find_almost_what_one_of_four_times_the_size_does():
    """Within 2 points, where none of them does more than 1.1 times the mean."""
    hits, busy = [], []
    for count in (1, 4):
        speed = 4 // count
        costs = Costs(step=5e6 / speed, token=3e4 / speed, context=40 / speed)
        sizes = {"max_num_seqs": 256 * speed, "max_num_batched_tokens": 8192 * speed}
        sizes |= {"max_model_len": 1 << 15, "data_parallel_size": count}
        simulated = cluster(speed * 4000, costs, **sizes)
        made_up = make_requests(SHAPES["chat"], 1500, 48, 1 << 15)
        simulated.run(made_up)
        served = simulated.served
        hits.append(100 * total(served, "cached") / total(served, "input_length"))
        busy = [engine.busy_ns for engine in simulated.engines]
    assert hits[1] > hits[0] - 2, hits
    assert max(busy) < 1.1 * sum(busy) / 4, busy


def test_what_is_missing_or_wrong_is_named(capsys, tmp_path):
    made_up = ["--shape", "chat", "--costs", '{"step": 1}', "--num-blocks", "4000"]
    for arguments, expected in (
        ([], "give a TRACE"),
        (["--shape", "chat", "--costs", '{"step": 1}'], "--num-blocks"),
        (["--shape", "chat", "--costs", '{"stop": 1}'], "stop"),
        ([str(tmp_path / "none")], "No such file"),
        ([*made_up, "--servers", "0"], "--servers: 0: must be above 0"),
        ([*made_up, "--requests", "2", "--json", str(tmp_path / "a" / "b")], "--json"),
    ):
        code, output = run_simulate(capsys, *arguments)
        assert code == 2 and expected in output, output


def test_generated_requests_need_no_recording(capsys):
    """An H100 with an 8B model answers faster than two CPUs with a model of 135M."""
    latency = {}
    for options in ([], ["--costs", "cpu"], ["--costs", "h100"]):
        code, output = run_simulate(capsys, "--shape", "chat", "--requests", "200", *options)
        assert code == 0, output
        [line] = [line for line in output.splitlines() if line.startswith("ttft_ms_p50")]
        latency[*options] = float(line.split()[1])
    assert latency[()] == latency["--costs", "cpu"] > latency["--costs", "h100"]


def test_long_requests_are_refused_and_counted():
    requests = [RequestLine(0, 100, 20), RequestLine(1, 1990, 20), RequestLine(2, 50, 0)]
    simulated = cluster(1000)
    simulated.run(requests)
    assert simulated.num_refused == 1
    assert sorted(request.output_length for request in simulated.served) == [0, 20]
    assert all(request.first_token > 3 for request in simulated.served)
