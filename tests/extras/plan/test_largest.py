"""The search for the largest batch that fits, in any function of its rows."""

import math

import pytest

from jaxdp.extras.plan.plan import find_largest


@pytest.mark.parametrize("peak", [
    lambda rows: 1000 + 17 * rows,
    lambda rows: 1000 + 128 * math.ceil(rows / 8),
    lambda rows: 5 * rows + rows**2 // 1000,
    lambda rows: max(7000, 3 * rows),
    lambda rows: 1000 + 40 * rows - 35 * max(0, rows - 300),
    lambda rows: 1000 + 2 * rows if rows < 450 else math.inf,
])  # fmt: skip
@pytest.mark.parametrize("limit", [900, 1017, 9000, 10**6])
@pytest.mark.parametrize("start", [1, 64, 5000])
def test_the_search_finds_the_largest(peak, limit, start):
    asked = []

    def asking(rows):
        asked.append(rows)
        return peak(rows)

    found = find_largest(asking, limit, start)
    assert found == 0 or peak(found) <= limit
    assert peak(found + 1) > limit
    assert len(asked) == len(set(asked)) <= 40
    assert all(n <= 16 * max(asked[:i]) for i, n in enumerate(asked) if i)
