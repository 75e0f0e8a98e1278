"""The files of `examples/cluster/` run, as far as one machine can run them."""

import csv
import os
import pathlib
import re
import shlex
import stat
import subprocess
import sys

import pytest
from toys import free_port

ROOT = pathlib.Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
PYTHON = shlex.quote(sys.executable)

# Two tasks of a step, of which one is killed as soon as there is a checkpoint, unless
# the job was started again; then the other is ended, as --kill-on-bad-exit has it.
SRUN = f"""#!{sys.executable}
import os, pathlib, subprocess, sys, time
command = [sys.executable, *sys.argv[sys.argv.index("python") + 1:]]
tasks = [
    subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": str(task)}})
    for task in range(2)
]
if "SLURM_RESTART_COUNT" not in os.environ:
    saved = pathlib.Path("runs/cluster/checkpoints")
    while not [path for path in saved.glob("*") if path.name.isdigit()]:
        time.sleep(0.01)
    tasks[1].kill()
    tasks[1].wait()
    tasks[0].kill()
sys.exit(max(abs(task.wait()) for task in tasks))
"""


def yaml_of(name):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((CLUSTER / name).read_text())


def environment(**others):
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "SLURM"))}
    return own | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | others


def program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_all(commands, environments, folder):
    """Runs processes beside each other; what they print."""
    running = [
        subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, env in zip(commands, environments, strict=True)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), outputs
    return outputs


def epochs_in(folder):
    with open(folder / "metrics.csv") as file:
        return [row["epoch"] for row in csv.DictReader(file) if row.get("val_loss")]


@pytest.mark.parametrize("path", sorted(CLUSTER.iterdir()), ids=lambda path: path.name)
def test_a_file_says_how_it_is_started_and_is_short(path):
    if path.is_dir() or path.suffix == ".md":
        return
    text = path.read_text()
    head = text[: text.index("\n\n", 200) if path.suffix == ".py" else 1000]
    assert f"examples/cluster/{path.name}" in head
    assert len(text.splitlines()) <= 60
    if path.suffix != ".py":
        assert re.search(r"A machine (goes|is taken away)", head)
        assert "See it:" in head
        assert "examples/cluster/train.py" in text.replace(", ", " ")


@pytest.mark.parametrize("name", ["train.sbatch", "ray.sh"])
def test_bash_can_read_it(name):
    subprocess.run(["bash", "-n", CLUSTER / name], check=True)


def test_a_jobset_names_its_first_pod():
    jobset = yaml_of("jobset.yaml")
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {entry["name"]: entry for entry in container["env"]}

    name = jobset["metadata"]["name"]
    host, _, port = variables["JAX_COORDINATOR_ADDRESS"]["value"].partition(":")
    assert host == f"{name}-{workers['name']}-0-0.{name}" and port.isdigit()
    assert int(variables["JAX_NUM_PROCESSES"]["value"]) == job["completions"]
    assert job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert (ROOT / container["command"][1]).is_file()
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in job["template"]["spec"]["volumes"]}


def test_skypilot_takes_it():
    task = yaml_of("skypilot.yaml")
    assert task["num_nodes"] == 2 and task["resources"]["use_spot"]
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml(str(CLUSTER / "skypilot.yaml")).num_nodes == 2


@pytest.mark.slow
def test_slurm_starts_a_job_again_which_goes_on(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    program(tools, "srun", SRUN)
    program(tools, "scontrol", '#!/bin/bash\necho "$@" >> requeued.txt\n')
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    job = environment(
        PATH=f"{tools}:{os.environ['PATH']}",
        SLURM_JOB_ID="77",
        SLURM_NTASKS="2",
        SLURM_LOCALID="0",
        SLURM_STEP_NODELIST="localhost",
        SLURM_JOB_NUM_NODES="1",
        JAX_COORDINATOR_PORT=str(free_port()),
    )

    def start(**others):
        script = ["bash", CLUSTER / "train.sbatch"]
        options = {"capture_output": True, "text": True, "timeout": 300}
        return subprocess.run(script, env=job | others, cwd=tmp_path, **options)

    first = start()
    assert first.returncode != 0, first.stdout
    requeued = tmp_path / "requeued.txt"
    assert requeued.read_text() == f"requeue {job['SLURM_JOB_ID']}\n"

    second = start(SLURM_RESTART_COUNT="1")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "nothing to resume" not in second.stderr
    assert "resum" in second.stderr
    assert len(requeued.read_text().splitlines()) == 1
    rows = epochs_in(tmp_path / "runs" / "cluster")
    assert rows == list(map(str, range(50)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jobset.yaml", "skypilot.yaml"])
def test_two_machines_train_together(tmp_path, name):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    described, port = yaml_of(name), str(free_port())
    if name == "skypilot.yaml":
        run = described["run"].replace("1234", port).replace("/runs", f"{tmp_path}")
        run = run.replace("python ", f"{PYTHON} ")
        commands = [["bash", "-ec", run]] * 2
        environments = [
            environment(
                SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2",
                SKYPILOT_NUM_NODES="2",
                SKYPILOT_NODE_RANK=str(rank),
            )
            for rank in range(2)
        ]
    else:
        (workers,) = described["spec"]["replicatedJobs"]
        (container,) = workers["template"]["spec"]["template"]["spec"]["containers"]
        _, *arguments = container["command"]
        arguments[-1] = str(tmp_path / "cluster")
        commands = [[sys.executable, *arguments]] * 2
        given = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        given["JAX_COORDINATOR_ADDRESS"] = f"localhost:{port}"
        environments = [
            environment(**given, JAX_PROCESS_ID=str(rank)) for rank in range(2)
        ]
    outputs = run_all(commands, environments, tmp_path)
    assert epochs_in(tmp_path / "cluster") == list(map(str, range(50)))
    assert "epoch 49/49" in outputs[0] and "epoch" not in outputs[1]
