"""Which devices a collective joins: how programs spell it, and along which mesh axes.

A group is a tuple of partitions, which are the places of devices in the mesh.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from .hlo_text import ints, matched

Groups = tuple[tuple[int, ...], ...]


def groups_in(attributes: str, num_devices: int) -> Groups:
    """Those of a collective, from its attributes; by default all devices in one."""
    _, named, pairs = attributes.partition("source_target_pairs=")
    if named:
        return _connected(parse_groups(pairs, 1))
    _, named, groups = attributes.partition("replica_groups=")
    return parse_groups(groups if named else "{}", num_devices)


def parse_groups(text: str, num_devices: int) -> Groups:
    """Groups from what stands behind `replica_groups=`, in any of the spellings.

        {{0,1},{2,3}}    {}    [2,4]<=[8]    [4,2]<=[2,4]T(1,0)
        mesh['a'=4,'b'=2] {'a'}    mesh['a'=8], device_ids=([2,4]T(1,0)) {'a':(2)4}

    Args:
        text: starts with the groups; more may follow.
        num_devices: what `{}` stands for.
    """
    text = text.lstrip()
    if text.startswith("{"):
        inner = matched(text)[1:-1]
        groups = tuple(ints(found) for found in re.findall(r"\{([^{}]*)\}", inner))
        return groups or (tuple(range(num_devices)),)
    if text.startswith("["):
        return tuple(map(tuple, _iota(text).tolist()))
    if match := re.match(r"(?:maximal_)?mesh\[([^\]]*)\]", text):
        return _mesh_groups(match[1], text[match.end() :])
    raise ValueError(f"replica_groups of an unknown spelling: {text[:80]!r}")


def _mesh_groups(axes: str, rest: str) -> Groups:
    sizes = {
        name.strip().strip("'\""): int(size)
        for name, size in (axis.rsplit("=", 1) for axis in axes.split(","))
    }
    rest = rest.lstrip(", ")
    ids = np.arange(math.prod(sizes.values()))
    if rest.startswith("device_ids="):
        listed = matched(rest[len("device_ids=") :])
        rest = rest[len("device_ids=") + len(listed) :].lstrip(", ")
        inner = listed[1:-1]
        iota = inner.startswith("[")
        ids = _iota(inner).ravel() if iota else np.array(ints(inner))

    # A group may lie along a part of an axis, `'a':(before)size`: each axis is taken
    # apart into what is before that part, the part, and what is after it.
    named = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", matched(rest))
    along = {name: (int(b or 1), int(size or sizes[name])) for name, b, size in named}
    shape: list[int] = []
    inside: dict[str, int] = {}
    for name, size in sizes.items():
        before, part = along.get(name, (1, 1))
        inside[name] = len(shape) + 1
        shape += [before, part, size // (before * part)]
    dims = [inside[name] for name in along]
    others = [dim for dim in range(len(shape)) if dim not in dims]
    width = math.prod(shape[dim] for dim in dims)
    table = ids.reshape(shape).transpose(others + dims).reshape(-1, width)
    return tuple(map(tuple, table.tolist()))


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, or `[2,4]T(1,0)`."""
    match = re.match(r"\[([\d,]*)\](?:<=\[([\d,]*)\])?(?:T\(([\d,]*)\))?", text)
    assert match is not None
    shape, source, order = map(ints, (match[1], match[2] or "", match[3] or ""))
    array = np.arange(math.prod(shape)).reshape(source or shape)
    array = array.transpose(order) if order else array
    return array.reshape(shape) if source else array


def _connected(pairs: Sequence[Sequence[int]]) -> Groups:
    """The sets of partitions that a permutation connects."""
    set_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = set_of.get(source, {source}) | set_of.get(target, {target})
        for member in joined:
            set_of[member] = joined
    unique = {id(members): members for members in set_of.values()}
    return tuple(tuple(sorted(members)) for members in unique.values())
