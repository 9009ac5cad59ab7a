"""Turns of adapters, where the workers hold fewer than requests name."""

from servd.core.queues._adapters import MAX_DEFERRED_STEPS
from servd.messages.adapter import Adapter
from tests.core.engines import Log, make_engine, make_request
from tests.core.queues.test_sharing import Clocked

A, B, C = (Adapter(name, f"{i:064x}", "") for i, name in enumerate("abc", 1))


def make(**options):
    options = {"max_model_len": 4096, "enable_lora": True, "max_loras": 1} | options
    return make_engine(num_blocks=2048, executor_class=Clocked, **options)


def steps_until(engine, log: Log, request_id: str, max_steps: int = 4000) -> int:
    for step in range(max_steps):
        if log.finished(request_id):
            return step
        log.step(engine)
    raise AssertionError(f"{request_id} has not ended after {max_steps} steps")


def test_a_long_request_and_one_that_waits_lock_no_newcomer_out():
    engine, log = make(), Log()
    engine.handle(make_request("long", [1], 2500, adapter=A))
    engine.handle(make_request("waits", [2], 4, adapter=B))
    for _ in range(MAX_DEFERRED_STEPS + 20):
        log.step(engine)
    engine.handle(make_request("short", [3], 4, adapter=A))
    assert 200 < steps_until(engine, log, "short") < MAX_DEFERRED_STEPS + 50
    assert not log.finished("long")
    log.run(engine, 3000)


def test_newcomers_do_not_keep_an_adapter_out_for_ever():
    engine, log = make(), Log()
    engine.handle(make_request("a0", [1], 100, adapter=A))
    engine.handle(make_request("b", [2], 4, adapter=B))
    for step in range(1, 3000):
        if log.finished("b"):
            break
        if step % 50 == 0:
            engine.handle(make_request(f"a{step}", [3], 100, adapter=A))
        log.step(engine)
    assert step < 2 * MAX_DEFERRED_STEPS


def test_patience_goes_on_when_another_adapter_gets_the_place():
    engine, log = make(), Log()
    engine.handle(make_request("a", [1], MAX_DEFERRED_STEPS - 6, adapter=A))
    engine.handle(make_request("b", [2], 100, adapter=B))
    engine.handle(make_request("c", [3], 4, adapter=C))
    steps_until(engine, log, "a")
    for _ in range(30):
        log.step(engine)
    engine.handle(make_request("b2", [4], 400, adapter=B))
    steps_until(engine, log, "c", 150)
    assert not log.finished("b2")


def test_a_background_request_gives_its_adapters_place_to_a_better_class():
    engine, log = make(), Log()
    engine.handle(make_request("background", [1], 1504, adapter=A, priority_class=1))
    for _ in range(5):
        log.step(engine)
    engine.handle(make_request("chat", [2], 4, adapter=B))
    assert steps_until(engine, log, "chat") < 40
    log.run(engine)
    assert len(log.token_ids("background")) == 1504
