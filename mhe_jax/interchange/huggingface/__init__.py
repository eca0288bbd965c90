"""Models of Hugging Face: our runs as files for transformers, and their models as our runs.

Nothing here imports transformers or torch, and nothing is executed: files are safetensors and JSON.

    tables.py    where the plain parameters of a run lie in a file
    fields.py    fields of a `config.json`               tokenizer.py    `tokenizer.json`, outwards
    gpt2.py  llama.py  bert.py  marian.py                an architecture each, both ways
    writing.py   a run as their model                    reading.py      their model as ours

An architecture is a module with, for both ways:

    FIELDS      of `config.json`, and ours
    table(model, model_type, task)     where parameters lie
    LAST_NORM   the norm before tied logits, if √M is in the tables (`plain.scaled`)

to be written:

    NAME, ROLE  its name, and the role whose attention the fields describe
    NEEDED      what it takes alone of a model; PLAIN, where it has it, options for `plain`
    write(config, tensors)             what tables do not say: tensors, and more fields

and to be read:

    model_of(fields)                   the model; refuses a field that ours lack
    IGNORED     what else a file may have
    named(fields, model, tensors)      where it has it: the tensors by the names of the table
"""
