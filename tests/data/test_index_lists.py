"""Notes of index lists: other rows after a resume are noticed."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jaxdp.data.torch_source import IndexLists  # noqa: E402


class Index:
    """Shows nothing of itself but where it is."""

    def __init__(self, index):
        self.index = index

    def __index__(self):
        return self.index


@pytest.mark.parametrize("index", [Index, lambda i: torch.tensor(i), np.int64])
def test_index_lists_are_noted_by_their_numbers(index):
    def noted(order, expected=None):
        lists = IndexLists("loader", "Sampler")
        made = [[index(i) for i in each] for each in order]
        assert len([*lists.noted(iter(made), expected)]) == len(order)
        return lists.note(len(order))

    order = [[3, 1], [2, 0]]
    note = noted(order)
    assert note is not None
    assert noted(order, [2, note]) == note
    with pytest.warns(UserWarning, match="come twice"):
        noted(order[::-1], [2, note])


def test_indices_that_are_no_numbers_are_not_noted():
    lists = IndexLists("loader", "Sampler")
    assert len([*lists.noted(iter([[object()], [1]]), [2, 5])]) == 2
    assert lists.note(2) is None
