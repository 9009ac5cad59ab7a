"""Which request a queue has next, beside a plain model of it."""

import random

import pytest

from servd.base import plugins
from servd.core.queues import QUEUES
from servd.core.queues.fair import MAX_BYPASSES
from servd.core.queues.fcfs import FcfsQueue
from servd.core.request import Request
from tests.core.engines import make_request

LONG = 8


class Model:
    """A queue, and what waits in it."""

    def __init__(self, policy: str, seed: int, owners: str = "ab") -> None:
        self.owners = owners
        self.queue: FcfsQueue = plugins.load_class(QUEUES, policy, FcfsQueue)(LONG)
        self.random = random.Random(seed)
        self.waiting: set[Request] = set()
        self.num_requests = self.num_bypasses = 0

    def add(self) -> None:
        """Add a request of any owner and priority, sometimes a long one."""
        self.num_requests += 1
        prompt = [1] * (LONG + 1 if self.random.random() < 0.2 else LONG)
        message = make_request(
            str(self.num_requests),
            prompt,
            owner=self.random.choice(self.owners),
            priority=self.random.randrange(2),
        )
        request = Request.from_message(message, self.queue.order(message.options), 64)
        self.queue.add(request)
        self.waiting.add(request)

    def first(self, is_long: bool) -> Request | None:
        """The one that came first, of the long ones or the others."""
        those = [request for request in self.waiting if self.queue.is_long(request) is is_long]
        return min(those, key=lambda request: request.order, default=None)

    def start(self, request: Request) -> None:
        """Start a request, and give its slot back at once."""
        is_bypass = not self.queue.is_long(request) and self.first(is_long=True) is not None
        self.num_bypasses = self.num_bypasses + 1 if is_bypass else 0
        self.queue.start(request)
        self.queue.stop(request)
        self.waiting.remove(request)


@pytest.mark.parametrize("seed", range(5))
def test_first_come_first_served_whatever_their_length(seed):
    model = Model("fcfs", seed)
    for number in range(1, 300):
        model.add()
        model.add()
        head = model.queue.head()
        assert head.request_id == str(number)
        model.start(head)


@pytest.mark.parametrize("seed", range(5))
def test_short_prompts_of_an_owner_go_first_until_a_long_one_is_due(seed):
    model = Model("fair", seed, owners="a")
    num_due = 0
    for _ in range(500):
        model.add()
        model.add()
        short, longer = model.first(is_long=False), model.first(is_long=True)
        head = model.queue.head()
        if longer is not None and model.num_bypasses == MAX_BYPASSES:
            assert head is longer
            assert model.queue.head([longer]) is short  # a long one is computed
            num_due += 1
        else:
            assert head is (short or longer)
        model.start(head)
    assert num_due > 3


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", plugins.names(QUEUES))
def test_a_queue_has_what_was_added_and_neither_started_nor_removed(policy, seed):
    model = Model(policy, seed)
    for _ in range(300):
        model.queue.begin_step()
        for _ in range(model.random.randrange(3)):
            model.add()
        assert len(model.queue) == len(model.waiting)
        assert bool(model.queue) is bool(model.waiting)
        if model.waiting and model.random.random() < 0.5:
            model.start(model.queue.head())
        elif model.waiting and model.random.random() < 0.5:
            longer = model.queue.next([], 0, may_start=True, only_long=True)
            if policy != "fcfs":  # it knows no long ones
                assert longer is None or model.queue.is_long(longer)
                assert (longer is None) is (model.first(is_long=True) is None)
        elif model.waiting:
            request = model.random.choice(sorted(model.waiting, key=lambda waiting: waiting.order))
            model.queue.remove(request)
            model.waiting.remove(request)
    while model.queue:
        model.start(model.queue.head())
    assert not model.waiting
