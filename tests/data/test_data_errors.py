"""Errors for invalid batches, loaders and arguments of `Arrays`."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest
from toys import linear, make_small, rows

from jaxdp import Arrays, Whole

X, Y = rows(53)
ONE, TWO = np.ones(3), np.ones((3, 2))


@dataclasses.dataclass
class Pair:
    x: np.ndarray


def no_batch(words):
    return f"can only have arrays of numbers. .*{words}"


def sparse():
    return pytest.importorskip("torch").eye(8).to_sparse()


def opened(loader):
    make_small(loss="mse").fit(loader)


@pytest.mark.parametrize("batch, error, words", [
    *(({"id": np.array([1, value], dtype)}, ValueError,
       rf"batch\['id'\] is {dtype} and has the value")
      for value, dtype in [(2**40 + 5, "int64"), (-(2**31) - 1, "int64"),
                           (2**33, "uint64"), (1e300, "float64")]),
    (np.array([1, np.nan, 1e300]), ValueError, re.escape("has the value 1e+300,")),
    (np.array([1, -(2**63)]), ValueError, f"has the value {-(2**63)},"),
    *(({"x": ONE, "name": leaf}, TypeError, r"batch\['name'\]")
      for leaf in (["a", "b"], np.array(["a", "b"]), np.array([None] * 2), object())),
    ((collections.UserDict(x=ONE),), TypeError, no_batch(r"dict\(x\)")),
    (Pair(ONE), TypeError, no_batch("register_dataclass")),
    (np.ma.masked_equal(ONE, 1), TypeError, no_batch("filled.* of a masked array")),
    ((np.ones((4, 2)), ONE), ValueError, r"batch\[0\] \(4, 2\), batch\[1\] \(3,\)"),
    ((TWO[:0], ONE[:0]), ValueError, "leading axis of one or more rows"),
    ({"x": ONE, "rate": 0.5}, ValueError, "leading axis of one or more rows"),
    ([[float(i) for i in range(50)]], ValueError, r"and 45 more.*np\.asarray"),
    (lambda: (X[:8], sparse()), TypeError, r"batch\[1\] is a Tensor .*torch.sparse"),
])  # fmt: skip
def test_invalid_batches_are_refused(batch, error, words):
    batch = batch() if callable(batch) else batch
    is_one = isinstance(batch, np.ndarray)
    with pytest.raises(error, match=words) as caught:
        make_small().validate([(batch,) if is_one else batch])
    assert len(str(caught.value)) < 500


def test_a_masked_array_without_a_mask_and_a_missing_weight_are_accepted():
    batches = (X, Y), (np.ma.masked_array(X), Y, None)
    plain, same = (make_small(loss="cross_entropy").validate([b]) for b in batches)
    assert same == plain


@pytest.mark.parametrize("batch, error, words", [
    (Whole((ONE, ONE)), TypeError, "got a Whole.*pass `loss_fn"),
    ((TWO, np.ones(5)), ValueError, r"into a jaxdp\.Whole\(array\)"),
    ({"x": TWO, "rate": 0.5}, ValueError, r"a jaxdp\.Whole\(array\)"),
    ((TWO, Whole(ONE)), TypeError, "can't be a Whole, .*`loss_fn"),
    ((ONE, ONE, Whole(ONE)), TypeError, "array, array, Whole"),
    ((X[:8], jax.random.key(0)), ValueError,
     r"batch\[1\] is a single PRNG key.*jaxdp.Whole\(key\)"),
    ((X[:8], jax.random.split(jax.random.key(0), 3)), ValueError,
     "must share a leading axis"),
])  # fmt: skip
def test_batches_that_do_not_fit_the_loss_are_refused(batch, error, words):
    with pytest.raises(error, match=words):
        make_small(loss="mse").fit([batch])


@pytest.mark.parametrize("make, error, words", [
    (lambda: Arrays(), TypeError, r"needs arrays with rows: Arrays\(x, y"),
    (lambda: Arrays(Whole(X)), TypeError, "needs arrays with rows"),
    (lambda: Arrays([1, 2]), TypeError, r"arrays\[0\] is an int.*np.asarray"),
    (lambda: Arrays(pytest.importorskip("pandas").DataFrame(X)), TypeError,
     r"is a DataFrame, .*df\.to_numpy\(\) of a DataFrame"),
    (lambda: Arrays(X, "y"), TypeError, r"arrays\[1\] is a str.*np.asarray"),
    (lambda: Arrays(np.ma.masked_less(X, 0)), TypeError, r"x\.filled\(0\)"),
    (
        lambda: Arrays(X, Y.astype(str)),
        TypeError,
        r"batch\[1\] is an ndarray of dtype",
    ),
    (lambda: Arrays(X, Y[1:]), ValueError, r"\[0\] \(53, 4\), arrays\[1\] \(52,\)"),
    (lambda: Arrays(X[:0], Y[:0]), ValueError, "of one or more rows"),
    (lambda: Arrays(X, batch_size=0), ValueError, "`batch_size` must be 1 or more"),
    (lambda: Arrays(X, batch_size=8.0), TypeError, "`batch_size` must be an int"),
    (lambda: Arrays(X, shuffle=None), TypeError, "`shuffle` must be a bool"),
    (lambda: make_small().fit(Arrays(X[:9], Y[:9], drop_last=True)), ValueError,
     "shorter than one batch with drop_last=True"),
    (lambda: opened(np.ones(3)), TypeError,
     r"is an ndarray, not an iterable of batches; .* For arrays.*x alone jaxdp.Arr"),
    (lambda: opened({"x": 1}), TypeError, "not an iterable of batches"),
    (lambda: opened(pytest.importorskip("pandas").DataFrame(X)), TypeError,
     r"is a DataFrame, not an iterable of batches; .*`to_numpy\(\)`"),
    (lambda: opened(3), TypeError, "is an int, not an iterable"),
    (lambda: make_small().predict([(X[:8],), None]), TypeError,
     "a batch has no arrays in it: None"),
    (lambda: opened(pytest.importorskip("squares").Squares()), TypeError,
     r"is a Squares, not .* for a dataset of examples, torch.utils.data.DataL"),
    (lambda: opened(linear()), TypeError, r"is a Linear, .*Trainer\(model\).fit"),
])  # fmt: skip
def test_invalid_loaders_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()
