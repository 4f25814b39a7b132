from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rendezvous.values.frozen_map import EMPTY, FrozenMap

_CHANGES = st.lists(st.tuples(st.sampled_from("abcdefgh") | st.text(max_size=3), st.none() | st.integers()))


@given(changes=_CHANGES)
def test_it_says_what_a_dict_would_and_never_changes(changes: list[tuple[str, int | None]]) -> None:
    plain: dict[str, int] = {}
    frozen: FrozenMap[str, int] = FrozenMap()
    for key, value in changes:
        before, frozen_before = dict(plain), frozen
        if value is None:
            plain.pop(key, None)
            frozen = frozen.minus(key)
        else:
            plain[key] = value
            frozen = frozen.plus(key, value)
        assert dict(frozen_before.items()) == before
        assert dict(frozen.items()) == plain
        assert len(frozen) == len(plain)
        assert frozen == FrozenMap(plain.items())
        assert hash(frozen) == hash(FrozenMap(plain.items()))
        assert (key in frozen) == (key in plain)
        assert frozen.get(key, -1) == plain.get(key, -1)
    assert len(EMPTY) == 0


def test_order_does_not_depend_on_the_seed_of_string_hashes() -> None:
    """As it was under other seeds; a set of these names comes out in another order each time."""
    names = [f"node{i}" for i in range(5)]
    assert list(FrozenMap((n, 0) for n in names)) == ["node1", "node4", "node0", "node3", "node2"]
