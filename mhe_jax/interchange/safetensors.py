"""A run as parameters by name: `model.safetensors`, config, tokenizer and a card.

The result is a run without an optimizer: `eval.py`, `--train.init_from` and all that reads a run's
parameters take it, whatever the mesh and whether or not layers are scanned. The parameters are bit
for bit those of the run.
"""

import json
from pathlib import Path

from mhe_jax.config.files import CONFIG, TOKENIZER
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange.card import Export
from mhe_jax.training.checkpoint.tensors import WEIGHTS, by_name, write_tensors

WHAT = """\
`model.safetensors` has the parameters by name, in float32, layers unrolled; `config.json` every
setting of the training. `tokenizer.model`, if there is one, is a model of sentencepiece, or a
`tokenizer.json` of the library `tokenizers`."""
USE = """\
```
python eval.py DIRECTORY --checkpoint last
python train.py CONFIG --train.init_from DIRECTORY
```"""


def write(run: Run, directory: Path) -> Export:
    """Writes the files of the run; the result has the numbers of `tensors` and `parameters`."""
    tensors = by_name(run.params)
    metadata = {"steps": json.dumps(run.steps), "tokenizer": run.tokenizer.key}
    write_tensors(directory / WEIGHTS, tensors, metadata)
    (directory / CONFIG).write_bytes((run.workdir / CONFIG).read_bytes())
    if run.config.model.has_pieces:
        (directory / TOKENIZER).write_bytes((run.workdir / TOKENIZER).read_bytes())
    count = sum(array.size for array in tensors.values())
    return {"tensors": len(tensors), "parameters": count}, WHAT, USE
