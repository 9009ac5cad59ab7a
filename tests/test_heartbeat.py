"""What a parent reads of an engine's heartbeat."""

from servd.ipc.heartbeat import STOPPED_TIMEOUT, Heartbeat, Watchdog


def looks(watch: Watchdog, count: int) -> list[str | None]:
    return [watch.look() for _ in range(count)]


def test_the_prompts_of_the_steps_in_flight_outlive_the_engine():
    heartbeat = Heartbeat()
    assert heartbeat.computing() == []
    for prompts, expected in (
        ({"a": 5, "b": 7}, "ab"),
        ({}, "ab"),
        ({"c": 2}, "c"),
        ({}, "c"),
        ({}, ""),
    ):
        heartbeat.compute(prompts)
        assert heartbeat.computing() == [*expected]
    heartbeat.compute(["x" * 100_000])
    assert set("".join(heartbeat.computing())) == {"x"}


def test_an_engine_without_a_beat_is_hung():
    heartbeat = Heartbeat()
    watch = Watchdog(heartbeat, interval=0.5, timeout=2.0)
    assert not any(looks(watch, 1200)), "it is not ready, and imports hold up everything"
    assert watch.look() == "it has shown no sign of life for 600 s"
    heartbeat.get_ready()
    heartbeat.beat()
    assert looks(watch, 5) == [None] * 5
    assert watch.look() == "it has shown no sign of life for 2 s"


def test_a_step_is_hung_only_beyond_its_own_limit():
    heartbeat = Heartbeat()
    watch = Watchdog(heartbeat, interval=1.0, timeout=1000.0)
    heartbeat.get_ready()
    heartbeat.work(3.0)
    assert looks(watch, 4) == [None] * 4
    heartbeat.work(10.0)  # the next one
    assert looks(watch, 11) == [None] * 11
    assert watch.look() == "a step has taken 11 s, more than 10 s"
    heartbeat.pause()
    assert not any(looks(watch, 100)), "an idle engine takes no steps"


def test_the_time_that_a_thread_waits_for_a_cpu_does_not_count():
    """Engines under load were restarted, as a thread waited for a CPU while it held the GIL."""
    heartbeat = Heartbeat()
    waits = {"main": 7.0, "beat": 1.0}
    watch = Watchdog(heartbeat, interval=0.5, timeout=5.0, cpu_waits=waits.copy)
    heartbeat.get_ready()
    heartbeat.beat()
    for _ in range(40):
        assert watch.look() is None
        waits["main"] += 0.5
    assert looks(watch, 13)[-1] == "it has shown no sign of life for 26 s"
    heartbeat.beat()
    heartbeat.work(5.0)
    for _ in range(40):
        assert watch.look() is None
        heartbeat.beat()
        waits["main"] += 0.5
    waits["new thread"] = 1000.0
    for _ in range(13):
        heartbeat.beat()
        reason = watch.look()
    assert reason == "a step has taken 26 s, more than 5 s"


def test_a_hung_thread_that_computes_on_a_busy_machine_is_found():
    heartbeat = Heartbeat()
    waits = {"main": 0.0}
    watch = Watchdog(heartbeat, interval=0.5, timeout=5.0, cpu_waits=waits.copy)
    heartbeat.get_ready()
    heartbeat.beat()
    for _ in range(50):
        assert watch.look() is None
        waits["main"] += 0.49
    assert looks(watch, 3)[-1] == "it has shown no sign of life for 26 s"


def test_a_stopped_process_is_hung():
    """Even while it loads, and long before a missing beat would tell."""
    is_stopped = False
    watch = Watchdog(Heartbeat(), 0.2, timeout=1000.0, is_stopped=lambda: is_stopped)
    for _ in range(5):  # a shell that stops and continues a job: never for so long
        is_stopped = True
        assert looks(watch, round(STOPPED_TIMEOUT / 0.2) - 1) == [None, None]
        is_stopped = False
        assert watch.look() is None
    is_stopped = True
    assert looks(watch, 3)[-1] == "a signal has stopped it (SIGSTOP)"
