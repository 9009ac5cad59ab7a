"""How long tests wait: for conditions, with one generous limit that only a hang exceeds."""

WAIT_SECONDS = 240.0
