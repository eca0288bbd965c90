"""Models of Hugging Face: our runs as files for transformers, and their models as our runs.

Nothing here imports transformers or torch, and nothing is executed: files are safetensors and JSON.

    tables.py    where the plain parameters of a run lie in a file
    fields.py    fields of a `config.json`               tokenizer.py    `tokenizer.json`, outwards
    gpt2.py  llama.py  bert.py  marian.py                an architecture each, both ways
    writing.py   a run as their model                    reading.py      their model as ours
"""

from mhe_jax.interchange.huggingface.reading import read
from mhe_jax.interchange.huggingface.writing import write

__all__ = ["read", "write"]
