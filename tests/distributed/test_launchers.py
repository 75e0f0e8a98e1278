"""Which process this is: arguments, variables of the user, torchrun, what JAX finds."""

import json
import multiprocessing
import os

import jax
import pytest
from toys import run_python

import jaxdp
from jaxdp.distributed.launchers import RankInfo, choose_bind_host, detect_rank

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "2045444096.0;tcp://192.0.2.2,10.0.0.2:53329",
}
OPEN_MPI_5 = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_COORDINATOR_ADDRESS": "train-0.train:1234",
}


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Sets variables, of which there are none before."""
    for name in os.environ:
        if name.startswith(("JAX_NUM", "JAX_COORD", "JAX_PROC", "SLURM", "TORCHELA")):
            monkeypatch.delenv(name)

    def set_them(environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return set_them


@pytest.mark.parametrize("environ, index, count, host, devices", [
    (TORCHRUN, 3, 4, "node7", [1]),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 3, 4, "127.0.0.1", [1]),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, 3, 4, "node7", None),
    (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "6"}, 3, 4, "node7", None),
    (SLURM, 5, 8, "node003", [1]),
    (OPEN_MPI_4, 2, 4, "192.0.2.2", [0]),
    (KUBERNETES, 1, 2, "train-0.train", None),
    (TORCHRUN | {"JAX_COORDINATOR_ADDRESS": "[fd00::2]:77"}, 3, 4, "fd00::2", [1]),
    (TORCHRUN | {"JAX_PROCESS_ID": "0"}, 0, 4, "node7", None),
])  # fmt: skip
def test_launchers_say_which_process_this_is(
    variables, environ, index, count, host, devices
):
    variables(environ)
    rank = detect_rank()
    assert rank is not None
    assert (rank.index, rank.count, rank.host) == (index, count, host)
    assert rank.devices == devices and 77 <= rank.port < 65536


EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
UUIDS = ",".join(f"MIG-{number}aa-77/3/0" for number in range(4))
PER_NODE = "SLURM_STEP_TASKS_PER_NODE"


@pytest.mark.parametrize("environ, others, devices", [
    (TORCHRUN, EIGHT, [4, 5, 6, 7]),
    (TORCHRUN, EIGHT | {"LOCAL_RANK": "0"}, [0, 1, 2, 3]),
    (TORCHRUN, EIGHT | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
    *((TORCHRUN, {"CUDA_VISIBLE_DEVICES": visible}, devices) for visible, devices in (
        ("5,6,7", [1]), ("", None), ("-1", None), (UUIDS, [2, 3]), ("GPU-8f6b-1", None),
    )),
    (SLURM, EIGHT | {PER_NODE: "4(x2)"}, [2, 3]),
    (SLURM, EIGHT | {PER_NODE: "4(x2),2"}, [1]),
    (SLURM, EIGHT, [1]),
    (OPEN_MPI_4, EIGHT | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, [0, 1, 2, 3]),
    (KUBERNETES, EIGHT, None),
])  # fmt: skip
def test_processes_share_the_gpus_of_their_machine(variables, environ, others, devices):
    variables(environ | others)
    assert detect_rank().devices == devices


def test_arguments_come_first(variables):
    variables(TORCHRUN)
    rank = detect_rank("here:77", process_id=2)
    assert rank is not None and rank[:4] == (2, 4, "here", 77)
    variables({"WORLD_SIZE": "x"})
    assert detect_rank(num_processes=1) is None


@pytest.mark.parametrize("environ", [
    {},
    TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    {k: v for k, v in SLURM.items() if k == "SLURM_JOB_ID"},  # sbatch
    {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
])  # fmt: skip
def test_a_process_alone_is_alone(variables, environ):
    variables(environ)
    assert detect_rank() is None


@pytest.mark.parametrize("environ, text", [
    ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"},
     "`coordinator_address` is not known"),
    (TORCHRUN | {"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x', but must be an integer"),
    (TORCHRUN | {"JAX_COORDINATOR_ADDRESS": "node7"}, "must be 'host:port'"),
    ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
     "`coordinator_address` is not known"),
    (OPEN_MPI_5, "`coordinator_address`, `num_processes`, `process_id` is not"),
])  # fmt: skip
def test_a_wrong_variable_is_named(variables, environ, text):
    variables(environ)
    with pytest.raises(ValueError, match=text):
        detect_rank()


@pytest.mark.parametrize("arguments, options, match", [
    ((), {"num_processes": 2}, "`coordinator_address`, `process_id` is not known"),
    (("here", 2, 0), {}, "`coordinator_address`.* must be 'host:port'"),
    (("here:77", 2, 2), {}, "`process_id` must be from 0 to 1.*got 2"),
    ((), {"heartbeat_timeout": 0}, "`heartbeat_timeout` must be more than 0"),
])  # fmt: skip
def test_wrong_arguments_are_named(arguments, options, match):
    with pytest.raises(ValueError, match=match):
        jaxdp.distributed.initialize(*arguments, **options)


def test_where_all_are_on_one_machine_others_are_not_listened_to():
    assert [choose_bind_host(h) for h in ("localhost", "::1")] == ["127.0.0.1", "::1"]
    assert choose_bind_host("node7") in ("::", "0.0.0.0")
    assert RankInfo(0, 2, "fd00::2", 77).address == "[fd00::2]:77"


def test_a_spawned_worker_that_imports_the_script_joins_nobody(variables, monkeypatch):
    jaxdp.distributed.initialize(num_processes=1)
    variables(TORCHRUN)
    worker = multiprocessing.current_process()
    monkeypatch.setattr(worker, "_inheriting", True, raising=False)
    jaxdp.distributed.initialize()
    assert not jax.distributed.is_initialized()


FORGOTTEN = """
import json, os, sys, warnings
import equinox as eqx, jax, jaxdp

def warnings_of_a_trainer():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxdp.Trainer(eqx.nn.Linear(1, 1, key=jax.random.key(0)), loss="mse")
    return [str(warning.message) for warning in caught]

for environ in json.loads(sys.argv[1]):
    os.environ.update(environ)
    print(*warnings_of_a_trainer())
    for name in environ:
        del os.environ[name]
os.environ.update(environ)
jaxdp.distributed.initialize(num_processes=1)
print("then", warnings_of_a_trainer())
"""


def test_a_trainer_warns_of_a_start_that_was_forgotten():
    launchers = json.dumps([TORCHRUN, SLURM, OPEN_MPI_5])
    *told, last = run_python(FORGOTTEN, launchers).stdout.splitlines()
    for line, who in zip(told, ("torchrun", "srun", "mpirun"), strict=True):
        count = 8 if who == "srun" else 4
        text = f"{who} started {count} processes, and this one trains alone"
        assert line.startswith(text)
    assert last == "then []"
