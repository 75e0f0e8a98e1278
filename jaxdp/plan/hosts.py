"""What of a compiled step falls to each host, where its devices are those of several.

A host is a process of the job here: it loads the rows of its own devices, reaches the
others' over the network, and writes its part of every checkpoint.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Owners = Mapping[Any, int]
"""The number of the host that each device is on, in the order of the mesh."""


class Hosts(NamedTuple):
    """What the busiest host has to do."""

    count: int
    devices: int
    """Of a host."""
    rows: int
    """Rows of the global batch that it loads per step, padding included."""
    batch_bytes: int
    """Of these rows."""
    sent_bytes: float
    """What it sends to other hosts per step, where a ring visits host after host."""
    checkpoint_bytes: int
    """What it writes of a checkpoint, before compression."""
    checkpoint_total: int
    """What all write."""


def owners(
    devices: Sequence[Any], devices_per_host: int | None = None
) -> dict[Any, int]:
    """Which host each device is on: as it says itself, or so many to each, in order."""
    if devices_per_host is not None:
        return {device: i // devices_per_host for i, device in enumerate(devices)}
    indices = [getattr(device, "process_index", 0) for device in devices]
    numbers = {index: number for number, index in enumerate(sorted(set(indices)))}
    return {
        device: numbers[index] for device, index in zip(devices, indices, strict=True)
    }


def crosses(groups: Iterable[Sequence[int]], hosts: Sequence[int]) -> bool:
    """Whether devices of several hosts exchange data in any of the groups.

    Args:
        groups: places in the mesh.
        hosts: the host of each place.
    """
    return any(len({hosts[place] for place in group}) > 1 for group in groups)


def sent(
    kind: str, groups: Iterable[Sequence[int]], wire_bytes: float, hosts: Sequence[int]
) -> dict[int, float]:
    """Bytes that each host sends to others in a collective, by its number.

    Args:
        kind: of `jaxdp.plan.hlo.KINDS`.
        groups: places in the mesh.
        wire_bytes: what each device sends.
        hosts: the host of each place.
    """
    found: dict[int, float] = collections.defaultdict(float)
    for group in groups:
        here = collections.Counter(hosts[place] for place in group)
        if len(here) == 1:
            continue
        for host, count in here.items():
            if kind.endswith("all-to-all"):
                # Every device sends its own part to every other.
                others = len(group) - count
                found[host] += count * wire_bytes * others / (len(group) - 1)
            else:
                # A ring leaves a host once, and all that a device sends goes there.
                found[host] += wire_bytes
    return found


def loaded(sharding: Any, shape: Sequence[int], owner: Owners) -> dict[int, float]:
    """The share of an array that each host has, replicas on it counted once."""
    parts: dict[int, set[Any]] = collections.defaultdict(set)
    everything: set[Any] = set()
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        part = tuple((each.start, each.stop) for each in index)
        parts[owner[device]].add(part)
        everything.add(part)
    return {host: len(found) / len(everything) for host, found in parts.items()}


def written(
    sharding: Any, shape: Sequence[int], together: bool, owner: Owners
) -> dict[int, float]:
    """The share of an array that each host writes into a checkpoint, as Orbax does.

    Args:
        sharding: of the array.
        shape: of the array.
        together: whether devices that hold the same part write a piece of it each, as
            they do where an axis of the part is divisible by their number; else the
            first of them writes it all.
        owner: the host of each device.
    """
    seen: set[Any] = set()
    counts: collections.Counter[int] = collections.Counter()
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        part = tuple((each.start, each.stop) for each in index)
        counts[owner[device]] += together or part not in seen
        seen.add(part)
    return {host: count / counts.total() for host, count in counts.items()}
