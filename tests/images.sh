#!/usr/bin/env bash
# Runs the steps of a Dockerfile without Docker: COPY of what git knows and RUN, in an empty
# environment and directory; then what the image would start. Arguments: Python, Dockerfiles.
set -euo pipefail
trap 'echo "tests/images.sh: line $LINENO failed" >&2' ERR
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1
shift
place=
trap '[ -z "$place" ] || rm -rf "$place"' EXIT
for file in "$@"; do
    place=$(mktemp -d)
    "$python" -m venv "$place/venv"
    mkdir -p "$place/work"
    while read -r instruction rest; do
        case $instruction in
            FROM | WORKDIR | "#"* | "") ;;
            COPY)
                read -r from to <<< "$rest"
                [ "$from" = . ]
                mkdir -p "$place$to"
                git -C "$root" ls-files -z | (cd "$root" && xargs -0 cp --parents -t "$place$to")
                ;;
            RUN) (cd "$place" && PATH="$place/venv/bin:$PATH" bash -euc "${rest//\/opt\//$place/opt/}") ;;
            ENTRYPOINT) entrypoint=$(tr -d '[]"' <<< "$rest") ;;
            *) echo "$file: $instruction is not known here" >&2; exit 1 ;;
        esac
    done < "$file"
    cd "$place/work"
    "$place/venv/bin/$entrypoint" configs | grep '^multi30k ' > /dev/null
    JAX_PLATFORMS=cpu "$place/venv/bin/$entrypoint" train demo --workdir run \
        --train.num_steps 2 > /dev/null
    echo "$file: its steps run, and $entrypoint starts"
    rm -rf "$place"
done
