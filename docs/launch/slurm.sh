#!/usr/bin/env bash
#SBATCH --job-name bert
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 8
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 8
#SBATCH --signal TERM@90
#SBATCH --requeue
#SBATCH --open-mode append
# Trains by Slurm, one process a GPU, from a bare account. Run it on a login node, at the top of a
# clone that lies in a file system all nodes share:
#
#     docs/launch/slurm.sh --train.seed 1
#
# It installs into .venv, prepares the text (wiki40b/en, in data/; configs/bert_base.py says what it
# takes), and submits itself as a job; what follows its name are fields of the config. CONFIG=,
# WORKDIR= and DATA= before it choose another config, place and text; an empty DATA= prepares
# nothing. The variables of sbatch, such as SBATCH_TIMELIMIT, go before it too. SIGTERM comes 90 s
# before the time limit: the run saves, and the job is queued again and goes on.
set -euo pipefail

data=${DATA-wiki40b/en}           # what `python -m mhe_jax data` prepares; empty: nothing
config=${CONFIG:-configs/bert_base.py}
workdir=${WORKDIR:-runs/bert}
export TFDS_DATA_DIR=$PWD/data/tensorflow_datasets

if [ -z "${SLURM_JOB_ID:-}" ]; then
    [ -f train.py ] || { echo "$0: start it at the top of the clone" >&2; exit 2; }
    [ -x .venv/bin/python ] || "${PYTHON:-python3.11}" -m venv .venv
    .venv/bin/python -m pip install --quiet -e '.[cuda,cloud]' -c constraints.txt
    [ -z "$data" ] || .venv/bin/python -m mhe_jax data "$data"
    exec sbatch "$0" "$@"
fi

status=0
# srun does not take the number of CPUs from the job.
srun --cpus-per-task "${SLURM_CPUS_PER_TASK:-1}" .venv/bin/python train.py "$config" \
    --workdir "$workdir" --mesh.fsdp 8 "$@" --distributed auto || status=$?
if [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
