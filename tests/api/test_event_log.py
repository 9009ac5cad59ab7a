"""EventLog: readers of a stored response's events."""

import asyncio

from servd.api.responses.event_log import EventLog


def test_a_reader_gets_a_long_log_in_parts():
    """Each of many readers would otherwise hold a copy of all events, made in one piece."""

    async def read() -> list[bytes]:
        log = EventLog()
        for number in range(1000):
            log.append(b"%d\n" % number)
        log.close()
        return [part async for part in log.follow(10)]

    parts = asyncio.run(read())
    assert b"".join(parts) == b"".join(b"%d\n" % number for number in range(10, 1000))
    assert max(map(len, parts)) < 500
