"""Large arrays that worker processes are started with."""

import contextlib
import mmap
import multiprocessing
import os

import numpy as np
import pytest

from jaxdp.data.torch_sending import context_of_workers

LARGE = np.arange(2**16, dtype=np.float32).reshape(256, 256)
PAIRS = np.zeros(2**14, dtype=[("name", "U4"), ("value", np.float64)])


class Dataset:
    def __init__(self, **arrays):
        self.__dict__.update(arrays)
        self.counts = 0

    def collate(self, rows):
        return rows


def describe(array):
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return (
        isinstance(base, mmap.mmap),
        array.flags.c_contiguous,
        array.flags.writeable,
        array.dtype,
        content_of(array),
    )


def content_of(array):
    return array.tolist() if array.dtype.hasobject else array.tobytes()


def look(dataset, answers):
    answers.put({k: describe(v) for k, v in vars(dataset).items() if k != "counts"})


def look_at_tensors(dataset, answers):
    import torch

    tensors = dataset.tensors
    answers.put(
        (
            [
                (str(t.dtype), t.shape, t.stride(), t.detach().float().numpy())
                for t in tensors
            ],
            int(torch.randint(99, (), generator=dataset.generator)),
        )
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no such files")
def test_tensors_arrive_however_many_they_are():
    torch = pytest.importorskip("torch")
    tensors = [torch.full((3, 4), i) for i in range(400)]
    tensors += [torch.arange(6.0).reshape(2, 3).T, torch.ones(4, dtype=torch.bfloat16)]
    tensors += [torch.ones(2, dtype=torch.bool), torch.zeros(0, 3), torch.tensor(5.0)]
    tensors += [torch.ones(2**15), torch.ones(2**15, requires_grad=True)]
    generator = torch.Generator().manual_seed(3)
    arrays = {"tensors": tensors, "generator": generator}
    found = run(look_at_tensors, Dataset(**arrays), number=2)
    drawn = int(torch.randint(99, (), generator=generator))
    for described, number in found:
        assert number == drawn
        for sent, (dtype, shape, stride, values) in zip(
            tensors, described, strict=True
        ):
            assert (dtype, shape) == (str(sent.dtype), sent.shape)
            assert stride == sent.stride()
            np.testing.assert_array_equal(values, sent.detach().float().numpy())


def write(dataset, function, start, answers):
    """Writes, and tells whether others' writing or its own is seen."""
    assert function.__self__ is dataset
    start.wait()
    before = dataset.large.sum()
    dataset.large[:] += os.getpid()
    changed = dataset.large.sum() - before
    answers.put((float(before), bool(changed > 0)))


def run(target, *arguments, number=1, during=None):
    with context_of_workers() as context:
        answers = context.Queue()
        workers = [
            context.Process(target=target, args=(*arguments, answers))
            for _ in range(number)
        ]
        for worker in workers:
            worker.start()
    if during is not None:
        during()
    found = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    return found


@pytest.mark.slow
def test_what_arrives_is_what_was_sent():
    fixed = LARGE.copy()
    fixed.flags.writeable = False
    arrays = {
        "large": LARGE,
        "columns_first": LARGE.T,
        "fixed": fixed,
        "pairs": PAIRS,
        "parts": LARGE[:, ::2],
        "small": np.arange(4),
        "empty": np.zeros((0, 9)),
        "words": np.array(["a", None] * 2**14, dtype=object),
    }
    (found,) = run(look, Dataset(**arrays))
    shared = {name for name, (is_shared, *_) in found.items() if is_shared}
    if hasattr(os, "memfd_create"):
        assert shared == {"large", "columns_first", "fixed", "pairs"}
    for name, (_, c_contiguous, writeable, dtype, content) in found.items():
        sent = arrays[name]
        assert (dtype, content) == (sent.dtype, content_of(sent))
        assert writeable == sent.flags.writeable
        if name in shared:
            assert c_contiguous == sent.flags.c_contiguous


@pytest.mark.slow
def test_a_worker_alone_sees_what_it_writes():
    large = LARGE.copy()
    dataset = Dataset(large=large)
    start = multiprocessing.get_context("forkserver").Event()

    def during():
        large[:] = -1
        start.set()

    found = run(write, dataset, dataset.collate, start, number=2, during=during)
    assert found == [(float(LARGE.sum()), True)] * 2
    assert (large == -1).all()


@pytest.mark.slow
def test_later_workers_see_what_has_changed():
    dataset = Dataset(large=LARGE.copy())
    for value in (1, 2):
        dataset.large[:] = value
        (found,) = run(look, dataset)
        assert found["large"][-1] == np.full_like(LARGE, value).tobytes()


def describe_file(dataset, answers):
    answers.put(
        {
            name: (type(array), array.mode, describe(array))
            for name, array in vars(dataset).items()
            if name != "counts"
        }
    )
    if dataset.written.flags.writeable:
        dataset.written[0] = 7


@pytest.mark.slow
def test_files_that_are_mapped_are_mapped_anew(tmp_path):
    (tmp_path / "numbers").write_bytes(b"head" * 3 + np.tile(LARGE, (3, 1)).tobytes())
    np.save(tmp_path / "saved.npy", LARGE.T)
    whole = np.memmap(tmp_path / "numbers", np.float32, "r", 12, (3, 256, 256))
    written = np.memmap(tmp_path / "written", np.float32, "w+", shape=LARGE.shape)
    own = np.memmap(tmp_path / "numbers", np.float32, "c", 12, (3, 256, 256))
    own[:] = 1
    arrays = {
        "whole": whole,
        "part": whole[1, 7:],
        "saved": np.load(tmp_path / "saved.npy", mmap_mode="r"),
        "written": written,
        "own": own,
    }
    sent = {name: describe(array) for name, array in arrays.items()}
    (found,) = run(describe_file, Dataset(**arrays))
    for name, (kind, mode, description) in found.items():
        assert kind is np.memmap
        assert description[1:] == sent[name][1:]
        assert mode == (None if name == "own" else "r+" if name == "written" else "r")
    assert (written[0] == 7).all()


def memory_files():
    """The files of no name that this process has open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in names if "arrays of jaxdp" in name]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no such files")
def test_no_file_is_left_open():
    with context_of_workers() as context:
        worker = context.Process(target=len, args=(LARGE,))
        worker.start()
        seen = memory_files()
    worker.join()
    assert len(seen) == 1
    assert not memory_files()
