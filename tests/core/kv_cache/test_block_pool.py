"""BlockPool against a model that only knows who owns what."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.block_times import BlockTimes

NUM_BLOCKS = 6


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.owners: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # block -> hash that it was last registered with
        self.num_hashes = 0

    @rule(num_blocks=st.integers(0, 3))
    def take(self, num_blocks):
        if num_blocks > self.pool.num_free:
            return
        owned = self.owned()
        blocks = self.pool.take(num_blocks)
        assert len(set(blocks)) == num_blocks and not owned.keys() & set(blocks)
        for block in blocks:
            self.content.pop(block, None)
        self.owners.append(blocks)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), again=st.booleans())
    def register(self, data, again):
        block = data.draw(st.sampled_from(sorted(self.owned())))
        if block in self.content:
            return
        if again and self.content:  # content that another block has already
            block_hash = data.draw(st.sampled_from(sorted(self.content.values())))
            self.pool.register(block, block_hash)
            assert self.pool.find(block_hash) != block
        else:
            self.num_hashes += 1
            self.content[block] = b"%d" % self.num_hashes
            self.pool.register(block, self.content[block])

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data):
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.share([block])
        self.owners.append([block])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.release(reversed(self.owners.pop(index)))

    @rule()
    def forget_cached(self):
        self.pool.forget_cached()
        owned = self.owned()
        self.content = {
            block: block_hash for block, block_hash in self.content.items() if block in owned
        }

    def owned(self) -> Counter[int]:
        return Counter(block for blocks in self.owners for block in blocks)

    @invariant()
    def every_block_is_free_or_owned(self):
        owned = self.owned()
        assert self.pool.ref_counts == [owned[block] for block in range(NUM_BLOCKS)]
        assert self.pool.num_free == NUM_BLOCKS - len(owned)

    @invariant()
    def content_is_found_until_the_block_is_taken_again(self):
        for block, block_hash in self.content.items():
            assert self.pool.find(block_hash) == block
        for number in range(1, self.num_hashes + 1):
            assert (self.pool.find(b"%d" % number) is not None) == (
                b"%d" % number in self.content.values()
            )


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_are_taken_blank_first_then_least_recently_released():
    pool = BlockPool(4)
    first, second, third = pool.take(3)
    for block in (first, second, third):
        pool.register(block, b"%d" % block)
    pool.release([second])
    pool.release([third, first])
    assert pool.take(1) == [3]
    assert pool.take(3) == [second, third, first]


def test_sharing_a_cached_block_makes_it_the_last_to_be_evicted():
    pool = BlockPool(2)
    blocks = pool.take(2)
    for block in blocks:
        pool.register(block, b"%d" % block)
    pool.release(blocks)
    pool.share([blocks[0]])
    pool.release([blocks[0]])
    assert pool.take(2) == [blocks[1], blocks[0]]


def test_block_times_are_reported_at_eviction():
    clock = iter([1, 10, 14, 50])
    pool = BlockPool(2, BlockTimes(2, clock.__next__))
    blocks = pool.take(2)  # the second is followed, from 1 on
    for block in blocks:
        pool.register(block, b"%d" % block)
    for _ in range(2):  # it is found at 10 and at 14
        pool.share(blocks)
    for _ in range(3):
        pool.release(blocks)
    assert pool.times and pool.times.news() == []
    pool.forget_cached()
    [eviction] = pool.times.news()
    assert (eviction.lifetime_ns, eviction.idle_ns, eviction.reuse_gaps_ns) == (49, 36, [4])
    assert pool.times.news() == []
