"""Notes of index lists: other rows after a resume are noticed."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jaxdp.data.torch_source import noted  # noqa: E402


class Index:
    """Shows nothing of itself but where it is."""

    def __init__(self, index):
        self.index = index

    def __index__(self):
        return self.index


@pytest.mark.parametrize("index", [Index, lambda i: torch.tensor(i), np.int64])
def test_index_lists_are_noted_by_their_numbers(index):
    def note(order):
        total = 0
        for numbers in order:
            total = noted([index(i) for i in numbers], total)
        return total

    order = [[3, 1], [2, 0]]
    assert note(order) == noted([2, 0], noted([3, 1], 0)) != note(order[::-1])


def test_indices_that_are_no_numbers_are_not_noted():
    assert noted([1], noted([object()], 0)) is None
