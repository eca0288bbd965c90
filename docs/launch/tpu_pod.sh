#!/usr/bin/env bash
# Trains on every host of a TPU pod slice, from bare machines. Run it at the top of a clone on your
# own machine, where gcloud is logged in and has a project:
#
#     gcloud compute tpus tpu-vm create NAME --zone ZONE --accelerator-type v5litepod-64 \
#         --version v2-alpha-tpuv5-lite
#     SHARE=10.0.0.2:/share docs/launch/tpu_pod.sh NAME ZONE --train.seed 1
#
# SHARE is an NFS share that all hosts reach, such as one of Filestore: text and run lie there. Where
# both lie in a bucket it is not needed (WORKDIR=gs://..., DATA= and --data.directory gs://...). What
# follows ZONE are fields of the config. For another config and text, set CONFIG=configs/NAME.py DATA=
# and --data.directory /mnt/share/text.
#
# The script copies what is committed to all hosts, installs it, mounts the share, has host 0 prepare
# the text (wiki40b/en; configs/bert_base.py says what it takes), and starts training, which goes on
# when this terminal is closed. While it trains, a second call is refused. Later, the same call
# continues from the newest checkpoint.
set -euo pipefail

usage="usage: SHARE=HOST:/PATH $0 NAME ZONE [--FIELD VALUE ...]"
[ $# -ge 2 ] || { echo "$usage" >&2; exit 2; }
[ -f train.py ] || { echo "$0: start it at the top of the clone" >&2; exit 2; }
name=$1 zone=$2
shift 2
data=${DATA-wiki40b/en}           # what `python -m mhe_jax data` prepares; empty: nothing
config=${CONFIG:-configs/bert_base.py}
workdir=${WORKDIR:-/mnt/share/bert}
share=${SHARE:-}
if [ -z "$share" ] && { [ -n "$data" ] || [[ $workdir != gs://* ]]; }; then
    echo "$usage; without SHARE: WORKDIR=gs://BUCKET/RUN DATA= before it" >&2
    exit 2
fi

on() { # WORKERS COMMAND
    gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker "$1" --command "$2"
}

on all "! pgrep -F mhe_jax/train.pid -f train.py > /dev/null 2>&1 ||
    { echo \"\$(hostname): it trains already\" >&2; exit 1; }"

archive=$(mktemp -d)/mhe_jax.tar.gz
trap 'rm -r "${archive%/*}"' EXIT
git archive --output "$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" "$name:" --zone "$zone" --worker all

on all "set -eu
mkdir -p mhe_jax
tar -xzf mhe_jax.tar.gz -C mhe_jax
cd mhe_jax
# A machine that has just started may be upgrading itself, and holds the lock.
sudo apt-get -qq -o DPkg::Lock::Timeout=600 update
sudo apt-get -qq -o DPkg::Lock::Timeout=600 install -y python3.11-venv nfs-common
[ -x .venv/bin/python ] || python3.11 -m venv .venv
.venv/bin/python -m pip install --quiet -e '.[tpu,cloud]' -c constraints.txt
share=$(printf %q "$share")
[ -n \"\$share\" ] || exit 0
sudo mkdir -p /mnt/share
mountpoint -q /mnt/share || sudo mount -t nfs \"\$share\" /mnt/share
# A new share is for root alone to write.
[ -w /mnt/share ] || sudo chmod a+rwxt /mnt/share"

[ -z "$data" ] || on 0 "cd mhe_jax
TFDS_DATA_DIR=/mnt/share/tensorflow_datasets .venv/bin/python -m mhe_jax data $(printf %q "$data")"

# A session of its own: the end of ssh ends nothing.
on all "cd mhe_jax
export TFDS_DATA_DIR=/mnt/share/tensorflow_datasets
setsid .venv/bin/python train.py $(printf '%q ' "$config" --workdir "$workdir" --mesh.fsdp 8 "$@") \
    --distributed auto > train.log 2>&1 < /dev/null &
echo \$! > train.pid"

cat << END
It trains. To watch it, and to save and stop it:
    gcloud compute tpus tpu-vm ssh $name --zone $zone --worker 0 --command 'tail -f mhe_jax/train.log'
    gcloud compute tpus tpu-vm ssh $name --zone $zone --worker 0 --command 'kill \$(cat mhe_jax/train.pid)'
END
