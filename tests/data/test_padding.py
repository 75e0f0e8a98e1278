"""Batches on their way to the step: converted, narrowed, checked, padded."""

import collections

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdp.data import open_loader
from jaxdp.data.batches import Portion
from jaxdp.data.conversion import check_targets, to_host
from jaxdp.data.padding import Packer, are_alike
from jaxdp.fit.feed import windows


def test_lists_become_tuples_and_nested_batches_keep_their_structure():
    Pair = collections.namedtuple("Pair", "x y")
    x = np.ones((3, 2), np.float32)
    assert isinstance(to_host([x, x]), tuple)
    nested = to_host({"a": (x, {"b": jnp.asarray(x)}), "c": Pair(x, x)})
    assert nested["a"][1]["b"].shape == (3, 2)
    assert isinstance(nested["c"], Pair)

    # A mapping that JAX does not know, as the tokenizers of transformers give.
    other = [collections.UserDict(a=x)]
    (found,) = open_loader(other, "loader", 0).epoch()
    assert isinstance(found, dict) and [*found] == ["a"]


def test_arrays_are_not_copied_unless_asked():
    x = np.ones((3, 2), np.float32)
    assert np.shares_memory(to_host((x,))[0], x)
    assert not np.shares_memory(to_host((x,), copy=True)[0], x)


def test_torch_tensors_share_memory_and_keep_their_dtype():
    torch = pytest.importorskip("torch")
    x = torch.arange(6, dtype=torch.float32, requires_grad=True).reshape(3, 2)
    host = to_host((x, x.to(torch.bfloat16), x > 2, x.to(torch.uint8)))
    assert host[0].ctypes.data == x.data_ptr()
    assert [str(leaf.dtype) for leaf in host] == [
        "float32", "bfloat16", "bool", "uint8",
    ]  # fmt: skip
    np.testing.assert_array_equal(host[1], np.arange(6).reshape(3, 2))
    assert host[1].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    "wide, narrow",
    [("int64", "int32"), ("uint64", "uint32"), ("float64", "float32")],
)
def test_64_bits_are_narrowed_on_the_host(wide, narrow):
    host = to_host((np.array([1, 2, 3], wide),))[0]
    assert host.dtype == narrow
    np.testing.assert_array_equal(host, [1, 2, 3])


def test_infinities_and_nans_pass():
    host = to_host((np.array([np.inf, np.nan, -np.inf, 1.0]),))[0]
    np.testing.assert_array_equal(host, [np.inf, np.nan, -np.inf, 1.0])


@pytest.mark.parametrize("kind", [">f4", ">f8", ">i8"])
def test_big_endian_arrays_are_turned_round(kind):
    numbers = np.arange(4)
    (found,) = to_host((numbers.astype(kind),))
    assert found.dtype == np.dtype(kind[1] + "4")
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, numbers)


def test_rows_that_are_lists_of_numbers_are_told_in_a_few_words():
    with pytest.raises(ValueError, match=r"and 45 more.*np\.asarray") as caught:
        to_host([[float(i) for i in range(50)]])
    assert len(str(caught.value)) < 500


def test_labels_outside_the_classes_are_refused():
    check_targets((np.ones(2), np.array([0, 9])), 10)
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=f"0 to 9.*labels from .*{bad}|{bad} to"):
            check_targets((np.ones(2), np.array([3, bad])), 10)


def test_short_batches_are_padded_with_their_own_first_row_and_counted():
    packer = Packer(4, "train")
    full = packer.pack([[(np.arange(8.0),)]])
    short = packer.pack([[(np.arange(3.0) + 5,)]])
    assert full.shape == short.shape
    np.testing.assert_array_equal(
        short.groups[0].batch[0], [[5.0, 6.0, 7.0, 5.0, 5.0, 5.0, 5.0, 5.0]]
    )
    np.testing.assert_array_equal(short.groups[0].counts, [[3]])
    assert short.rows == [3]


def test_batches_like_the_one_before_are_padded_to_a_size_that_has_grown():
    packer = Packer(1, "train")
    rows = [8, 8, 8, 16, 8, 16, 16, 3]
    packed = [packer.pack([[(np.ones((size, 2)), np.ones(size))]]) for size in rows]
    sizes = [dispatch.groups[0].batch[0].shape[1] for dispatch in packed]
    assert sizes == [8, 8, 8, 16, 16, 16, 16, 16]
    assert [dispatch.rows for dispatch in packed] == [[size] for size in rows]
    assert len({dispatch.shape for dispatch in packed}) == 2


def test_sizes_are_rounded_up_to_the_devices():
    packed = Packer(4, "train").pack([[(np.ones(13),)]])
    assert packed.shape == (True, 1, ((1, 16, "float64[]"),))


def test_batches_keep_their_size_where_nothing_is_padded():
    packer = Packer(4, "train", pads=None)
    assert packer.pack([[(np.ones(8),)]]).shape == (True, 1, ((1, 8, "float64[]"),))
    assert packer.pack([[(np.ones(6),)]]).shape == (False, 1, ((1, 6, "float64[]"),))
    sizes = [8, 8, 6, 8]
    packed = packer.pack([[(np.ones(size),) for size in sizes]], 4)
    split, steps, groups = packed.shape
    assert not split and steps == 1
    assert [group[:2] for group in groups] == [(2, 8), (1, 6), (1, 8)]


def test_only_full_windows_of_batches_of_one_shape_are_alike():
    sizes = [16, 16, 16, 16, 15]
    batches = [{"x": (np.zeros((size, 2), np.float32),)} for size in sizes]
    alone = [[batch] for batch in batches]
    assert are_alike(alone[:4], 1) and are_alike([batches[:2], batches[2:4]], 2)
    assert not are_alike(alone, 1)
    assert not are_alike([batches[:2], batches[2:3]], 2)
    assert not are_alike([alone[0], [(batches[0],)]], 1)
    portions = [[Portion(batches[0], counts)] for counts in ((16, 16), (16, 12))]
    assert not are_alike(portions, 1) and are_alike(portions[:1] * 2, 1)


def test_a_window_with_places_left_is_filled_with_empty_batches():
    packed = Packer(1, "train").pack([[(np.ones(4),)]], slots=3)
    assert packed.shape == (True, 1, ((3, 4, "float64[]"),))
    np.testing.assert_array_equal(packed.groups[0].counts, [[4], [0], [0]])


def test_a_batch_that_changes_is_named_leaf_by_leaf():
    packer = Packer(1, "train")
    packer.pack([[{"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.int32)}]])
    with pytest.raises(ValueError) as caught:
        packer.pack([[{"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)}]])
    for part in (
        "batch['x'] was float32 (rows, 2), is float32 (rows, 3)",
        "batch['y'] was int32 (rows, -), is float32 (rows, -)",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="structure"):
        packer.pack([[{"x": np.ones((4, 2), np.float32)}]])


def test_each_form_is_padded_to_its_own_size():
    packer, long, short = Packer(4, "training"), np.zeros((8, 5)), np.zeros((16, 3))
    for batch in long, short:
        packer.pack([[(batch,)]])
    tails = [packer.pack([[(batch[:2],)]]) for batch in (long, short)]
    assert [tail.groups[0].batch[0].shape for tail in tails] == [(1, 8, 5), (1, 16, 3)]
    assert packer.forms.sizes == {"float64[5]": 8, "float64[3]": 16}


def test_micro_batches_of_one_form_come_together_whatever_their_order():
    packer = Packer(1, "training")
    a, b = np.zeros((4, 2)), np.ones((4, 3))
    packed = [packer.pack([list(window)], 3) for window in ([(a,), (b,), (a,)],
              [(b,), (a,), (a,)])]  # fmt: skip
    assert packed[0].shape == packed[1].shape
    assert packed[0].shape[2] == ((2, 4, "float64[2]"), (1, 4, "float64[3]"))


def test_windows_cut_batches_into_steps():
    assert list(windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
