"""Plans made by compiling on shapes, for devices that may not be here."""

import contextlib
import functools
import importlib.util
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from ...basics.arguments import check_number
from ...basics.hardware import get_memory_limit, get_product_precision
from ...step import Batch, map_row_leaves
from ...strategies.base import count_shards
from ..pipeline import Pipeline
from .hardware import (
    HARDWARE,
    Hardware,
    find_hardware,
    get_usable_memory,
    hardware_of,
)
from .plan import Plan
from .products import BY_DEFAULT
from .reading import StepAnalysis, estimate_time, list_notes

MAX_FAKE_DEVICES: Final = 2048
"""XLA's CPU compiler takes more devices for those of several processes, and refuses."""


class TargetDevices(NamedTuple):
    """Devices to compile for."""

    devices: tuple[Any, ...]
    name: str
    """For people: `"1024 x H100"`."""
    platform: str
    """`"cpu"`, `"gpu"` or `"tpu"`."""
    hardware: Hardware | None
    are_here: bool = False


class Planner:
    """Compiles a train step on shapes, for devices that may not be here.

    Args:
        engine_on: `(strategy) -> engine` with shapes for a state, whose
            `get_program("train", dispatch)` compiles with that strategy.
        strategy: as it trains.
        window: one step's batches, of which only shapes and dtypes are used.
        topology: as for `make_topology_devices`; a name that ends in a number
            may be asked for other numbers.
        hardware: a profile for `estimate_time`; that of the devices by default.
    """

    def __init__(
        self,
        engine_on: Callable[[Any], Any],
        strategy: Any,
        window: Sequence[Batch],
        topology: str | None = None,
        hardware: str | Hardware | None = None,
    ):
        mesh = strategy.mesh
        devices = jax.devices()[:1] if mesh.empty else mesh.devices.flat
        self.local = make_local_devices(list(devices))
        self.devices_per_host: int | None = None
        self.engine_on = engine_on
        self.strategy = strategy
        self.window = [_make_zeros(batch) for batch in window]
        self.topology = topology
        self.hardware = None if hardware is None else find_hardware(hardware)

    def set_hosts(self, num_devices: int | None, hosts: int) -> None:
        """Spreads the devices evenly over hosts, in all plans that follow.

        Args:
            num_devices: those of the strategy by default.
            hosts: how many.
        """
        count = num_devices or len(self.local.devices)
        if count % hosts:
            raise ValueError(
                f"`hosts`={hosts} does not divide the {count} devices; each host has as"
                " many as the others."
            )
        self.devices_per_host = count // hosts

    def num_shards(self, num_devices: int) -> int:
        """Returns the number of parts that these devices split the rows into."""
        return count_shards(self._strategy_on(self._devices(num_devices)))

    def limit(self, memory: int | float | None) -> int:
        """Returns the bytes of memory that a program may use."""
        if memory is None:
            devices = self._devices(None)
            profile = self.hardware or devices.hardware
            has = devices.are_here and get_memory_limit(devices.devices[0])
            has = has or profile and get_usable_memory(profile)
            if not has:
                raise ValueError(
                    "`memory` is needed: this device does not say how much it"
                    " has. Pass the bytes that one device may use, for example"
                    " memory=80e9, or plan with `hardware` or `topology`."
                )
            memory = 0.9 * has
        check_number("memory", memory, above=0, below=math.inf, suffix=", in bytes")
        return int(memory)

    def plan(self, num_devices: int | None = None, rows: int | None = None) -> Plan:
        """Compiles the step and reads its costs.

        Args:
            num_devices: how many; those of the strategy or the topology by default.
            rows: of each batch, instead of those that the loader gave.
        """
        devices = self._devices(num_devices)
        strategy = self._strategy_on(devices)
        window = self.window
        if rows is not None:
            window = [_make_zeros(batch, rows) for batch in window]

        engine = self.engine_on(strategy)
        with warnings.catch_warnings():
            # `not_overwritten` reports them, with names.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            # A compiler without its devices can't take up what it compiled before.
            warnings.filterwarnings("ignore", "Error reading persistent compilation")
            dispatch = engine.pack([window])
            engine.get_program("train", dispatch)
        per_host = self.devices_per_host
        is_faked = not devices.are_here and self.topology is None
        if per_host is None and is_faked and jax.process_count() > 1:
            per_host = jax.local_device_count()
        hosts = _number_hosts(devices.devices, per_host)
        return _make_plan(
            engine, devices, hosts, self.hardware or devices.hardware, self
        )

    def _devices(self, count: int | None) -> TargetDevices:
        if self.topology is not None:
            return make_topology_devices(self.topology, count)
        if count is None or count == len(self.local.devices):
            return self.local
        return make_fake_devices(count)

    def _strategy_on(self, devices: TargetDevices) -> Any:
        if devices.are_here:
            return self.strategy
        return self.strategy.on(devices.devices)


def plan_running(engine: Any) -> Plan | None:
    """Returns the plan of the step that an engine has compiled and runs.

    Nothing is compiled or traced for it, so it can't be asked about other devices.

    Args:
        engine: one with a state.

    Returns:
        None before there is a step, and for a step that is not XLA's.
    """
    runs = engine.get_train_program()
    if getattr(runs and runs.compiled, "memory_analysis", lambda: None)() is None:
        return None
    mesh = engine.strategy.mesh
    held = engine.device_state.get_shapes().step.sharding.device_set
    devices = make_local_devices(list(held if mesh.empty else mesh.devices.flat))
    return _make_plan(engine, devices, _number_hosts(devices.devices), devices.hardware)


def _make_plan(
    engine: Any,
    devices: TargetDevices,
    hosts: Sequence[int],
    profile: Hardware | None,
    planner: Planner | None = None,
) -> Plan:
    """Makes the plan of the train step that an engine has compiled.

    Args:
        engine: with the step.
        devices: those that it is compiled for, in the mesh's order.
        hosts: the number of the host of each.
        profile: what the devices can do, if it is known.
        planner: whose plan it is.
    """
    runs, count = engine.get_train_program(), len(hosts)
    limit = _find_memory(devices, profile)
    reading = StepAnalysis(engine, hosts, None if devices.platform == "cpu" else limit)

    products, strategy = reading.products, engine.strategy
    bubble = strategy.bubble if isinstance(strategy, Pipeline) else 0.0
    return Plan(
        planner=planner,
        limit=limit or None,
        device=devices.name,
        platform=devices.platform,
        num_devices=count,
        num_hosts=len(set(hosts)),
        mesh=reading.mesh,
        strategy=repr(engine.strategy),
        rows=reading.rows,
        micro_batches=reading.micro_batches,
        steps=reading.steps,
        memory=reading.memory(),
        flops=None if products is None else sum(products.values()),
        products=None if products is None else _name_products(products, devices),
        bubble=bubble,
        traffic=reading.traffic,
        leaves=tuple(reading.leaves),
        bounds=reading.bounds(),
        not_overwritten=reading.not_overwritten,
        estimate=profile and estimate_time(profile, reading),
        compile_seconds=runs.compile_seconds,
        notes=list_notes(reading, devices.platform, devices.are_here, profile),
    )


def _name_products(
    products: dict[str, float], devices: TargetDevices
) -> dict[str, float]:
    """Returns the operations by the precision that these devices compute them in."""
    by_default = (
        f"{get_product_precision(devices.devices[0])} (JAX's default for float32)"
    )
    return {
        by_default if name == BY_DEFAULT else name: count
        for name, count in products.items()
    }


def _find_memory(devices: TargetDevices, profile: Hardware | None) -> int:
    """Returns the bytes of each device that JAX may use; 0 if that is not known."""
    if devices.are_here:
        if memory := get_memory_limit(devices.devices[0]):
            return memory
    return 0 if profile is None else get_usable_memory(profile)


def _number_hosts(devices: Sequence[Any], each: int | None = None) -> list[int]:
    """Returns the host of each device: its process, or its index divided by `each`."""
    if each is not None:
        return [place // each for place in range(len(devices))]
    indices = [device.process_index for device in devices]
    return np.unique(indices, return_inverse=True)[1].tolist()


def _make_zeros(batch: Batch, rows: int | None = None) -> Batch:
    """Makes a batch like `batch` that takes no memory, maybe with other `rows`."""

    def zeros(leaf: Any) -> Any:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    if rows is not None:
        batch = map_row_leaves(
            lambda x: np.broadcast_to(x[:1], (rows, *x.shape[1:])), batch
        )
    return jax.tree.map(zeros, batch)


# These devices need not exist. A program is compiled for stand-ins, which are devices
# of compilers in this process. They are either a second CPU client with any number of
# devices (3 ms), or the topology of a TPU slice or a GPU cluster, which the real
# compiler of the extra `plan` takes instead of hardware. JAX's own devices and the
# environment stay as they were. `DataParallel.on` puts the strategy on the stand-ins.
# It compiles there as it does here, so the plan is of the very program that would run.
# Models, losses and optimizers, often closures that can't be pickled, stay here.


def make_local_devices(devices: Sequence[Any]) -> TargetDevices:
    """Describes devices that programs run on."""
    first = devices[0]
    platform = "gpu" if first.platform in ("cuda", "rocm") else first.platform
    name = f"{len(devices)} x {first.device_kind}"
    return TargetDevices(
        tuple(devices), name, platform, hardware_of(first), are_here=True
    )


@functools.lru_cache(maxsize=8)
def make_fake_devices(count: int) -> TargetDevices:
    """Makes CPU devices, independent of those that this process was started with."""
    if not 1 <= count <= MAX_FAKE_DEVICES:
        raise ValueError(
            f"`devices`={count} must be 1 to {MAX_FAKE_DEVICES}, as many as XLA's CPU"
            " compiler takes in one process; plan for more with `topology`, such as"
            ' "v5p-8192".'
        )
    from jaxlib import xla_client

    client = xla_client.make_cpu_client(num_devices=count)
    return TargetDevices(tuple(client.devices()), f"{count} x CPU, faked", "cpu", None)


@functools.lru_cache(maxsize=8)
def make_topology_devices(name: str, count: int | None = None) -> TargetDevices:
    """Makes stand-ins for the devices of a GPU cluster or TPU slice.

    Args:
        name: `"h100x1024"`: so many GPUs, in nodes of 8. `"v5p-2048"`, `"v5e-256"`: a
            TPU slice as Google names it (v5p counts cores, two per chip and device; the
            others chips). `"v5e:4x8"`: its shape in chips.
        count: the number of devices, in place of the one in the name.

    Raises:
        ValueError: for other names.
        ImportError: if the compiler is not installed, or does not start.
    """
    match = _NAME.fullmatch(name.lower().replace("v5litepod", "v5e"))
    if match is None:
        raise ValueError(
            f"`topology`={name!r} is not known: GPUs are written"
            f" {', '.join(f'{kind}xN' for kind in _GPUS)}, TPU slices v5e-N, v5p-N,"
            " v6e-N, or by their shape in chips, v5e:4x8."
        )
    gpu, gpus, tpu, number, lengths = match.groups()

    # GPUs, eight to a node.
    if gpu:
        count = count or int(gpus)
        per_node = math.gcd(count, 8) if count > 8 else count
        shape = f"1x{count // per_node}x{per_node}"
        target = _TARGET.format(
            *_GPUS[gpu], bandwidth=int(HARDWARE[gpu].memory_bandwidth)
        )
        devices = make_gpu_devices(name, target, shape)
        return TargetDevices(devices, f"{count} x {gpu.upper()}", "gpu", HARDWARE[gpu])

    # TPUs, in a slice.
    shape = tuple(map(int, lengths.split("x"))) if lengths else ()
    if not lengths or count not in (None, math.prod(shape)):
        chips = count or int(number) // (2 if tpu == "v5p" else 1)
        shape = find_slice_shape(tpu, chips, name)
    devices = make_tpu_devices(name, tpu, shape)
    return TargetDevices(devices, f"{len(devices)} x TPU {tpu}", "tpu", HARDWARE[tpu])


def find_slice_shape(kind: str, chips: int, name: str) -> tuple[int, ...]:
    """Returns the shape of a TPU slice: as near to a cube or square as possible.

    Those are the shapes that Google offers: 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, ...
    """
    dims = 3 if kind == "v5p" else 2
    power = chips.bit_length() - 1
    if not chips or chips != 1 << power:
        raise ValueError(
            f"`topology`={name!r} has {chips} chips; slices named by a number have a"
            f" power of 2. Name another by its shape: {kind}:"
            + ("2x2x3." if dims == 3 else "4x6.")
        )
    lengths = [1 << (power // dims + (i >= dims - power % dims)) for i in range(dims)]
    return tuple(sorted(lengths, reverse=dims == 3 and chips < 8))


# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities for the
# limits of a capability; NVIDIA's architecture papers for cores, caches and clocks.
_HOPPER: Final = (9, 132, 128, 233472, 232448, 52428800, 1.98)
_GPUS: Final = {
    "a100": (8, 108, 64, 167936, 166912, 41943040, 1.41, 85094825984, "A100-SXM4-80GB"),
    "h100": (*_HOPPER, 84929347584, "H100 80GB HBM3"),
    "h200": (*_HOPPER, 150754820096, "H200"),
}
_TARGET: Final = """\
gpu_device_info {{
  cuda_compute_capability {{ major: {0} minor: 0 }}
  core_count: {1} fpus_per_core: {2}
  shared_memory_per_core: {3} shared_memory_per_block_optin: {4}
  l2_cache_size: {5} clock_rate_ghz: {6}
  device_memory_size: {7} memory_bandwidth: {bandwidth}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" device_description_str: "NVIDIA {8}"
dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
"""
"""XLA's GpuTargetConfigProto as text: what its compiler asks about a GPU."""

_NAME: Final = re.compile(
    rf"({'|'.join(_GPUS)})x([1-9]\d*)|(v5e|v5p|v6e)(?:-([1-9]\d*)|:(\d+(?:x\d+){{1,2}}))"
)


def make_gpu_devices(name: str, target: str, shape: str) -> tuple[Any, ...]:
    """GPUs to compile for.

    Args:
        name: of the topology, for messages.
        target: of which kind, as XLA's GpuTargetConfigProto in text.
        shape: how many slices, hosts of each and GPUs of each, `"1x128x8"`.

    Raises:
        ImportError: if the compiler is not installed or does not start.
    """
    jax.devices()  # JAX chooses its devices without this compiler
    options = {"platform": "cuda", "target_config": target, "topology": shape}
    try:
        try:
            topology = topologies.get_topology_desc(**options)
        except NotImplementedError:
            # JAX's plugin looks for CUDA's libraries when JAX starts, and does not
            # register without them, though to compile takes none.
            newest = importlib.util.find_spec("jax_cuda13_plugin")
            cuda = "cuda12" if newest is None else "cuda13"
            plugin = importlib.import_module(f"jax_plugins.xla_{cuda}")
            with _set_variables(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
                plugin.initialize()
            topology = topologies.get_topology_desc(**options)
    except Exception as error:
        raise _make_compiler_error(name, "GPUs", error) from error
    return tuple(topology.devices)


def make_tpu_devices(name: str, kind: str, shape: Sequence[int]) -> tuple[Any, ...]:
    """TPU chips to compile for.

    Args:
        name: of the topology, for messages.
        kind: `"v5e"`.
        shape: of the slice, in chips.

    Raises:
        ImportError: if the compiler is not installed or does not start.
        ValueError: if it knows no such slice.
    """
    from jaxlib import xla_client

    jax.devices()  # as for GPUs
    written = "x".join(map(str, shape))
    # A host has 2x2 chips, if the slice has as many.
    is_small = math.prod(shape) < 4
    host = {"chips_per_host_bounds": (*shape, 1)[:3]} if is_small else {}
    try:
        # Read while the library starts. It would look for TPUs, ask Google's metadata
        # server, which answers on Google's machines only, write files of its log, and
        # lock out the library in other processes.
        with _set_variables(
            TPU_SKIP_MDS_QUERY="1",
            TPU_WORKER_HOSTNAMES="localhost",
            TPU_ACCELERATOR_TYPE="v5litepod-8",
            TPU_MIN_LOG_LEVEL="3",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        ):
            topology = topologies.get_topology_desc(
                f"{kind}:{written}", platform="tpu", **host
            )
    except Exception as error:
        is_there = xla_client.pjrt_plugin_loaded("tpu")
        if is_there and xla_client.pjrt_plugin_initialized("tpu"):
            raise ValueError(
                f"`topology`={name!r}: the TPU compiler knows no {kind} slice of shape"
                f" {written}: {_get_first_line(error)}"
            ) from error
        raise _make_compiler_error(name, "TPUs", error) from error
    return tuple(topology.devices)


@contextlib.contextmanager
def _set_variables(**variables: str) -> Iterator[None]:
    """Sets variables that the user has not set, within the context."""
    ours = {key: text for key, text in variables.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)


def _make_compiler_error(name: str, what: str, error: Exception) -> ImportError:
    """Returns the error of a compiler that is missing, or does not start."""
    return ImportError(
        f"`topology`={name!r} needs JAX's compiler for {what}, and no such device; it"
        f" does not start: {_get_first_line(error)} Run pip install --upgrade"
        f" 'jax[cuda12-local,tpu]=={jax.__version__}' 'nvidia-cuda-nvcc-cu12>=12.8'."
    )


def _get_first_line(error: Exception) -> str:
    """Returns the first line of an error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".") + "."
