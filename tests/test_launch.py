"""The launch scripts of docs/launch do what they say, with programs that stand for the cluster's.

`gcloud`, `srun` and the others are scripts that note how they were called and run what they are
given, here. That shows order, quoting and arguments, not that a cluster takes them.
"""

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.training.distributed import take_flags

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "docs" / "launch"
SCRIPTS = [*LAUNCH.glob("*.sh"), *(ROOT / "tests").glob("*.sh"), ROOT / ".ci" / "run"]

NOTE = 'printf "%s\\n" "$(basename "$0") $(printf "%q " "$@")" >> "$CALLS"\n'
PYTHON = (
    NOTE + 'echo "$TFDS_DATA_DIR" >> "$CALLS.environment"\n'
    'case "$1" in *train.py) exit "${TRAIN_STATUS:-0}";; esac\n'
)
PROGRAMS = {
    "git": NOTE + 'tar -czf "$3" -T /dev/null\n',
    "gcloud": NOTE
    + 'cd "$HOSTS"; case "$4" in scp) cp "$5" .;; ssh) bash -c "${!#}";; *) exit 9;; esac\n',
    "sudo": NOTE,
    "mountpoint": "exit 1\n",
    "python3.11": NOTE + 'mkdir -p "$3/bin"; cp "$CLUSTER/venv-python" "$3/bin/python"\n',
    "venv-python": PYTHON.replace("basename", "echo python; :"),
    "sbatch": NOTE + 'SLURM_JOB_ID=7 bash "$@"\n',
    "srun": NOTE + '[ "$1" = --cpus-per-task ] || exit 9; shift 2; "$@"\n',
    "scontrol": NOTE,
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Programs that note their calls; gives a clone of nothing but `train.py`."""
    programs, clone, hosts = (tmp_path / name for name in ("programs", "clone", "hosts"))
    for place in (programs, clone, hosts):
        place.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
        (programs / name).chmod(0o755)
    (clone / "train.py").touch()
    for name, value in {"CALLS": "calls", "HOSTS": "hosts", "CLUSTER": "programs"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TFDS_DATA_DIR", "")
    for name in ("CONFIG", "DATA", "PYTHON", "WORKDIR"):  # `make test PYTHON=...` sets one
        monkeypatch.delenv(name, raising=False)
    return clone


def launch(script: str, *arguments: str, clone: Path, **environment: str):
    return subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        cwd=clone,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(clone: Path, wanted: str = "") -> list[str]:
    """What was called, in order; waits for one that begins with `wanted`, as it may be detached."""
    path = clone.parent / "calls"
    for _ in range(200):
        found = path.read_text(encoding="utf-8").splitlines()
        if any(line.startswith(wanted) for line in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing called {wanted}: {found}")


def config_of(call: str):
    """The config of a noted command, and what it says of the other processes."""
    words = shlex.split(call)
    return parsed(words[[Path(word).name for word in words].index("train.py") + 1 :])


def parsed(arguments: list[str]):
    processes, rest = take_flags(arguments)
    return parse_train_arguments(rest), processes


def order(found: list[str], *wanted: str) -> bool:
    """Whether calls with these words come in this order."""
    lines = iter(found)
    return all(any(word in line for line in lines) for word in wanted)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


FIELDS = ("--data.directory", "my data", "--train.seed", "3")


def trains(found: list[str], workdir: str):
    """Whether the one call of train.py trains one of several processes with `FIELDS`."""
    (train,) = [line for line in found if line.startswith("python train.py")]
    config, processes = config_of(train)
    assert processes is not None
    assert (config.workdir, config.data.directory) == (workdir, "my data")
    assert config.train.seed == 3
    return config


def test_a_pod_installs_prepares_and_starts_in_this_order(cluster, here, tmp_path):
    (drafts := tmp_path / "drafts").mkdir()
    where = {"SHARE": "10.0.0.2:/a share", "TMPDIR": str(drafts)}
    done = launch("tpu_pod.sh", "pod", "zone-a", *FIELDS, clone=cluster, **where)
    assert done.returncode == 0, done.stderr
    assert not [*drafts.iterdir()]  # the archive is on the hosts
    found = calls(cluster, "python train.py")
    assert order(
        found, "scp", "--worker all", "pip install", "mount -t nfs", "chmod a+rwxt /mnt/share",
        "--worker 0", "mhe_jax data", "--worker all",
    )  # fmt: skip
    assert "10.0.0.2:/a\\ share /mnt/share" in "\n".join(found)
    assert trains(found, "/mnt/share/bert").mesh.fsdp == 8
    pids = (cluster.parent / "hosts" / "mhe_jax" / "train.pid").read_text()
    assert pids.strip().isdecimal()
    assert directory_of_tfds(cluster) == "/mnt/share/tensorflow_datasets"


def test_a_pod_that_trains_is_left_alone(cluster):
    """Else the log of the job that runs is gone, and the number by which it is stopped."""
    log, pid = (cluster.parent / "hosts" / "mhe_jax" / name for name in ("train.log", "train.pid"))
    log.parent.mkdir()
    log.write_text("step 1", encoding="utf-8")
    with subprocess.Popen(["bash", "-c", "read", "train.py"], stdin=subprocess.PIPE) as training:
        pid.write_text(f"{training.pid}\n", encoding="utf-8")
        done = launch("tpu_pod.sh", "pod", "zone-a", clone=cluster, SHARE="10.0.0.2:/share")
        training.communicate(b"\n")
    assert done.returncode == 1
    assert done.stderr.endswith(": it trains already\n")
    (only,) = calls(cluster)
    assert "pgrep" in only
    assert log.read_text(encoding="utf-8") == "step 1"


@pytest.mark.parametrize(("status", "again"), [(143, True), (0, False), (1, False)])
def test_slurm_queues_again_what_was_stopped_in_time(cluster, here, status, again):
    done = launch("slurm.sh", *FIELDS, clone=cluster, TRAIN_STATUS=str(status))
    assert done.returncode == status, done.stderr
    found = calls(cluster)
    assert order(found, "-m venv", "pip install", "mhe_jax data", "sbatch", "srun", "train.py")
    assert any(line.startswith("scontrol requeue 7") for line in found) == again
    trains(found, "runs/bert")
    assert directory_of_tfds(cluster) == f"{cluster}/data/tensorflow_datasets"


@pytest.mark.parametrize("script", ["slurm.sh", "tpu_pod.sh"])
def test_a_script_that_cannot_start_calls_nothing(cluster, script):
    (cluster / "train.py").unlink()
    done = launch(script, "pod", "zone-a", clone=cluster, SHARE="10.0.0.2:/share")
    assert done.returncode == 2
    assert "start it at the top of the clone" in done.stderr
    assert not (cluster.parent / "calls").exists()


def test_the_manifest_of_gke_fits_together(here):
    share, service, data, train = yaml.safe_load_all((LAUNCH / "gke.yaml").read_text())
    pod, spec = train["spec"]["template"]["spec"], train["spec"]
    (container,) = pod["containers"]
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert spec["completions"] == spec["parallelism"] == int(rows) * int(columns) / chips
    assert container["resources"]["requests"]["google.com/tpu"] == chips
    # The pods have names of the service.
    assert service["metadata"]["name"] == pod["subdomain"]
    label = service["spec"]["selector"]["batch.kubernetes.io/job-name"]
    assert label == train["metadata"]["name"]
    # The text is prepared by one job and awaited by the other.
    (maker,) = data["spec"]["template"]["spec"]["containers"]
    (waiting,) = pod["initContainers"]
    assert maker["args"][0].rpartition("touch ")[2] in waiting["args"][0]
    for each in (data["spec"]["template"]["spec"], pod):
        (volume,) = each["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == share["metadata"]["name"]
    assert container["args"][0] == "train"
    config, processes = parsed(container["args"][1:])
    assert processes is not None
    assert config.mesh.fsdp == 8
    assert f"tfds:{maker['args'][0].split()[2]}:train" in config.data.train


def directory_of_tfds(clone: Path) -> str:
    """TFDS_DATA_DIR of the last call of Python in an environment."""
    return (clone.parent / "calls.environment").read_text(encoding="utf-8").splitlines()[-1]
