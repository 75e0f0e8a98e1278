"""Devices, and meshes of them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ..basics.arguments import check_count

Devices = int | Sequence[Any] | jax.Device | None
"""A number of devices, the first ones; a list of `jax.Device`s; or None for all."""


def find_devices(devices: Devices) -> list[Any]:
    """Returns all devices, the first `devices`, or the ones listed."""
    available = jax.devices()
    if devices is None:
        return available
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        if not 1 <= devices <= len(available):
            raise ValueError(
                f"`devices`: {devices} asked for, but there are {len(available)}"
                f" ({available[0].platform}). To fake more on the CPU, call"
                f' jax.config.update("jax_num_cpu_devices", {max(devices, 1)}) before'
                " any JAX array is made."
            )
        return available[:devices]
    devices = list(devices) if isinstance(devices, Iterable) else [devices]
    if not devices or not all(isinstance(device, jax.Device) for device in devices):
        raise TypeError(
            "`devices` must be a number or a list of jax.Device (a mesh is passed by"
            f" name, `mesh=...`); got {devices!r}."
        )
    if len(set(devices)) < len(devices):
        raise ValueError(f"`devices` names a device twice: {devices!r}.")
    return devices


def make_mesh(devices: Sequence[Any], shape: Mapping[str, int]) -> Mesh:
    """Returns a mesh over devices, by the sizes of its axes.

    Axes are Auto: under Explicit ones (the default of `jax.make_mesh`) embeddings,
    dropout keys and reshapes in ordinary models raise.
    """
    array = np.empty(len(devices), dtype=object)
    array[:] = list(devices)
    array = array.reshape(tuple(shape.values()))
    return Mesh(array, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def make_topology_mesh(devices: Sequence[Any], shape: Mapping[str, int]) -> Mesh:
    """Returns a mesh in the order of the devices' interconnect, if JAX knows it."""
    auto = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), auto, devices=devices)


def check_sizes(mesh_shape: Mapping[str, int], count: int) -> None:
    """Raises unless the sizes of a mesh are counts whose product is `count` devices."""
    for name, size in mesh_shape.items():
        check_count(f"mesh_shape: {name}", size)
    product = math.prod(mesh_shape.values())
    if product != count:
        sizes = " x ".join(map(str, mesh_shape.values()))
        raise ValueError(
            f"`mesh_shape` {dict(mesh_shape)} is for {sizes} = {product} devices, and"
            f" there are {count}. Change a size, or pass `devices={product}` if fewer"
            " are to be used."
        )


def clear_ambient_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the body of a `jax.shard_map` that traces without an ambient mesh.

    Equinox's `closure_convert`, and so diffrax's default adjoint, compares the
    shapes of two traces, shardings included, which differ under a `shard_map`'s mesh.
    """

    def run(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return function(*arguments)

    return run


def get_axis_names(names: Any) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a `PartitionSpec`."""
    if names is None:
        return ()
    return names if isinstance(names, tuple) else (names,)
