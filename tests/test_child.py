"""A child process and its parent."""

from __future__ import annotations

import os
import signal
import threading

from servd.child import Child
from servd.config import Config


def test_a_child_that_is_stopped_holds_up_nobody_who_posts_to_it():
    child = Child("stopped", "servd.child", Config())  # never reads more than it is given
    os.kill(child.process.pid, signal.SIGSTOP)
    large = Config.load({"served_model_name": ["x" * 100_000]})  # more than a pipe holds

    def post() -> None:
        for _ in range(5):
            child.post(large)

    posting = threading.Thread(target=post, daemon=True)
    posting.start()
    posting.join(60)
    assert not posting.is_alive()
    child.process.kill()
    child.stop(60)
