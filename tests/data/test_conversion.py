"""Conversion of batches: structure, dtypes and errors."""

import collections

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdp.data import open_loader
from jaxdp.data.conversion import normalize_batch


def test_lists_become_tuples_and_nested_batches_keep_their_structure():
    Pair = collections.namedtuple("Pair", "x y")
    x = np.ones((3, 2), np.float32)
    same = normalize_batch([x, x])
    assert isinstance(same, tuple) and np.shares_memory(same[0], x)
    assert not np.shares_memory(normalize_batch((x,), copy=True)[0], x)
    nested = normalize_batch({"a": (x, {"b": jnp.asarray(x)}), "c": Pair(x, x)})
    assert nested["a"][1]["b"].shape == (3, 2)
    assert isinstance(nested["c"], Pair)

    # A mapping that JAX does not know, such as those of tokenizers.
    other = [collections.UserDict(a=x)]
    (found,) = open_loader(other, "loader", 0).read_epoch()
    assert isinstance(found, dict) and [*found] == ["a"]


def test_torch_tensors_share_memory_and_keep_their_dtype():
    torch = pytest.importorskip("torch")
    x = torch.arange(6, dtype=torch.float32, requires_grad=True).reshape(3, 2)
    host = normalize_batch((x, x.to(torch.bfloat16), x > 2, x.to(torch.uint8)))
    assert host[0].ctypes.data == x.data_ptr()
    assert [str(leaf.dtype) for leaf in host] == [
        "float32", "bfloat16", "bool", "uint8",
    ]  # fmt: skip
    np.testing.assert_array_equal(host[1], np.arange(6).reshape(3, 2))
    assert host[1].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("given, dtype", [
    ("int64", "int32"), ("uint64", "uint32"), ("float64", "float32"),
    (">f4", "float32"), (">f8", "float32"), (">i8", "int32"),
])  # fmt: skip
def test_arrays_become_native_and_of_32_bits(given, dtype):
    numbers = [1, 2, 3, *([np.inf, -np.inf, np.nan] if "f" in given else [])]
    (found,) = normalize_batch((np.array(numbers, given),))
    assert found.dtype == dtype and found.dtype.isnative
    np.testing.assert_array_equal(found, numbers)


def test_long_doubles_are_refused_with_their_place():
    batch = (np.ones(2, np.float32), np.ones(2, np.longdouble))
    with pytest.raises(TypeError, match=r"batch\[1\] is an ndarray of dtype"):
        normalize_batch(batch)
