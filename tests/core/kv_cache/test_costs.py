"""Whether blocks are loaded or computed, by what either took recently."""

from servd.core.kv_cache.connector.costs import LoadCosts


def test_a_place_that_is_too_slow_is_skipped_and_tried_again():
    costs = LoadCosts(block_size=16)
    costs.computing.add(1000, 10)  # 1600 ns a block
    costs.loading["host"].add(1500, 1)
    costs.loading["disk"].add(3000, 1)
    assert costs.is_worth_loading("host") and not costs.is_worth_loading("disk")
    assert costs.skipped == {"disk"}
    assert any(costs.is_worth_loading("disk") for _ in range(100))
    assert not costs.skipped
    costs.loading["disk"].add(3000, 1)  # it is as slow as before
    assert not costs.is_worth_loading("disk")
