"""Which rows of a global array are real, for each of several processes."""

import jax.numpy as jnp
import pytest

from jaxdp.data.batches import LocalBatch, fetch_real_rows
from jaxdp.distributed import RowBlocks


@pytest.mark.parametrize("local", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    "counts, rows",
    [
        ((3, 2), [0, 1, 2, None, 3, 4, None, None]),  # padded blocks
        ((3, 2), [0, 1, 2, 3, 4]),  # computed in full: no padding
        ((4, 1), [0, 1, 2, 3, 4]),
        ((2, 2), [0, 1, 2, 3]),  # blocks without padding
        ((3, 0), [0, 1, 2]),
    ],
)
def test_each_real_row_is_fetched_once(counts, rows, local):
    leaf = jnp.array([-1 if row is None else row for row in rows])
    batch, blocks = LocalBatch(None, counts), RowBlocks(2, local)
    fetched = fetch_real_rows(leaf, batch, blocks, local=False)
    assert fetched.tolist() == [*range(sum(counts))]
    starts = 0, counts[0], sum(counts)
    expected = [row for n in local for row in range(starts[n], starts[n + 1])]
    assert fetch_real_rows(leaf, batch, blocks, local=True).tolist() == expected
