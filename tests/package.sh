#!/usr/bin/env bash
# Builds sdist and wheel, and uses them as somebody without the clone: in an empty environment and
# directory. Arguments: the Python that builds (it has `build`), and the directory for both files.
set -euo pipefail
trap 'echo "tests/package.sh: line $LINENO failed" >&2' ERR
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1 dist=$2
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

rm -f "$dist"/mhe_jax-*
"$python" -m build --outdir "$dist" "$root" > "$place/build.log" 2>&1 || { cat "$place/build.log"; exit 1; }
wheel=$(ls "$dist"/mhe_jax-*.whl) sdist=$(ls "$dist"/mhe_jax-*.tar.gz)
# They need the records of experiments/: who runs them has the clone.
if tar -tzf "$sdist" | grep '/tests/'; then exit 1; fi

"$python" -m venv "$place/venv"
bin=$place/venv/bin
"$bin/python" -m pip install --quiet "$wheel" -c "$root/constraints.txt"
cd "$place"
"$bin/mhe-jax" configs | grep '^multi30k .*Multi30k' > /dev/null
"$bin/mhe-jax" configs show demo > mine.py
"$bin/mhe-jax" train mine.py --workdir run --train.num_steps 4
"$bin/mhe-jax" eval run --beam_size 1 | grep '"bleu"' > /dev/null
echo "about twenty-five to nine in the evening" | "$bin/mhe-jax" eval run --translate
if "$bin/mhe-jax" train demo --workdir other --train.tensorboard True 2> "$place/said"; then exit 1; fi
grep -qF "the wheel of mhe_jax with [report]" "$place/said"

# A type checker sees the types of what a user's project imports.
cat > project.py <<'PY'
from mhe_jax.attention import Attention, make_attention

attention: Attention = make_attention("mhe_mul", num_heads=12)
heads: str = attention.num_heads  # an error that only who knows the types can see
PY
cat > pyrightconfig.json <<'JSON'
{"include": ["project.py"], "reportUnknownMemberType": "error"}
JSON
checked=$("$(dirname "$python")/pyright" --pythonpath "$bin/python" project.py || true)
grep -q '"int" is not assignable to "str"' <<< "$checked" || { echo "$checked"; exit 1; }
grep -q '1 error' <<< "$checked" || { echo "$checked"; exit 1; }

"$bin/python" -m pip install --quiet --no-deps --force-reinstall "$sdist"
"$bin/mhe-jax" configs | grep '^multi30k .*Multi30k' > /dev/null
echo "wheel and sdist work in an empty environment: $dist"
