"""What is kept: by owner and key, so many of each, and no longer than the owner lives."""

import gc

import pytest

from distsim.cache import Cache, cached, fewer_collections, kept, uncollected
from distsim.hardware import load_cluster
from distsim.hardware.routes import find_route


class Owner:
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def test_the_results_used_last_of_each_owner_are_kept(collect):
    cache, a, b = Cache[Owner, str]("texts, by owner and number", 2), Owner(), Owner()
    made: list[int] = []

    def get(owner: Owner, key: int) -> str:
        return cache.get(owner, key, lambda: made.append(key) or f"made {key}")

    assert [get(a, key) for key in (1, 2, 1, 3, 1)] == ["made 1", "made 2", "made 1", "made 3", "made 1"]
    assert made == [1, 2, 3]
    get(b, 1), get(a, 2)  # 2 was forgotten for 3, and b has its own
    assert made == [1, 2, 3, 1, 2] and len(cache) == 3 == kept()["texts, by owner and number"]
    del a
    collect()
    assert len(cache) == 1


def test_what_cannot_be_made_is_not_kept():
    cache, owner = Cache[Owner, int]("nothing, by owner", 2), Owner()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.get(owner, 0, lambda: 1 // 0)
    assert len(cache) == 0 and cache.get(owner, 0, lambda: 3) == 3


def test_results_by_value_are_counted_too():
    @cached("squares, by number", 2)
    def square(number: int) -> int:
        return number * number

    assert [square(n) for n in (1, 2, 3)] == [1, 4, 9] and kept()["squares, by number"] == 2


def test_a_topology_that_changes_is_asked_again():
    topology = load_cluster("dgx-a100")
    group = tuple(topology.devices[:2])
    before = find_route(group, topology)
    assert find_route(group, topology) is before
    topology.set_link(group[0], group[1], topology.link(*group))
    assert find_route(group, topology) is not before


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (1_000_000, 50, 1000)])
def test_fewer_collections_are_as_before_afterwards_and_never_more(before):
    own = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with pytest.raises(ValueError), fewer_collections():
            within = gc.get_threshold()
            raise ValueError
        assert gc.get_threshold() == before
        assert within == ((200_000, 20, 20) if before[0] == 700 else before)
    finally:
        gc.set_threshold(*own)


def young() -> set[int]:
    return {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}


def test_who_collects_no_garbage_or_froze_objects_is_left_alone():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with uncollected():
            pass
        assert gc.get_freeze_count() >= count - 100 > 0  # some of them are gone by now
    finally:
        gc.unfreeze()
