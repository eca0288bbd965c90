"""Config files that fail, and values of a wrong type or size in good ones."""

import pytest

ENTRIES = {
    "train": "train.py bad.py",
    "resume": "train.py bad.py --workdir runs/lm",
    "compile": "train.py bad.py --compile_only --topology v5e:2x2",
    "sweep": "train.py bad.py --seeds 2 --workdir runs/new",
}
HEAD = "from mhe_jax.config import *\n"
FILES = {
    "syntax": ("x = 1\ny = = 2\n", ":2: invalid syntax$"),
    "open bracket": ("def get_config(:\n", ":1: "),
    "indentation": ("def get_config():\nreturn 1\n", ":2: expected an indented block"),
    "a zero byte": ("x = 1\n\0", ".*null byte"),
    "not UTF-8": (b"x = 'caf\xe9'\n", ".*utf-8"),
    "nothing": ("", r": has no function get_config\(variant\)$"),
    "not a function": ("get_config = 3\n", r": has no function get_config\(variant\)$"),
    "returns a dictionary": (
        "def get_config():\n    return {}\n",
        r": get_config\(\) returned dict, not a Config$",
    ),
    "returns nothing": (
        "def get_config():\n    pass\n",
        r": get_config\(\) returned NoneType, not",
    ),
    "fails": ("def get_config():\n    return 1 / 0\n", ":2: ZeroDivisionError: division by zero$"),
    "fails in two lines": (
        "def get_config():\n    raise ValueError('one\\ntwo')\n",
        ":2: ValueError: one two$",
    ),
    "imports nothing": ("import no_such_module\n", ":1: ModuleNotFoundError: No module named"),
    "wants an argument": ("def get_config(a, b):\n    pass\n", ": TypeError: .*missing 2 required"),
    "recursion": ("def get_config():\n    return get_config()\n", ":2: RecursionError: "),
    "leaves": ("import sys\nsys.exit('no\\nway')\n", ":2: SystemExit: no way$"),
    "unknown field": (HEAD + "def get_config():\n    return Config(tsk='lm')\n", ":3: TypeError: "),
    "hint of nothing": ("def get_config(variant: Nothing):\n    pass\n", ":1: NameError: "),
}


def write(place, text):
    (place / "bad.py").write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("fault", FILES)
def test_a_file(place, refused, fault, entry):
    text, says = FILES[fault]
    write(place, text)
    refused(ENTRIES[entry], rf"bad\.py({says})")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "tiny.py:big",
            r"tiny\.py: no variant 'big': one of lm, mlm, translation, labels, span, or",
        ),
        ("tiny.py", r"tiny\.py: no variant '': one of lm, "),
        ("tyni.py", r"no config file tyni\.py; did you mean tiny\.py\?$"),
        ("tiny", r"no config file tiny; did you mean tiny\.py\?$"),
        ("runs", r"no config file runs"),
        ("nowhere/x.py", r"no config file nowhere/x\.py: there is no directory nowhere$"),
        ("a" * 300 + ".py", r"a+\.py: File name too long$"),
        ("--seed", r"the config comes before --seed; usage: train\.py CONFIG"),
    ],
)
@pytest.mark.parametrize("entry", ["train", "compile"])
def test_a_name(refused, name, says, entry):
    refused(ENTRIES[entry].replace("bad.py", name), says)


VALUES = {
    "data.train is 'a.txt': takes any number of strings": "data=DataConfig(train='a.txt')",
    "data.batch_size is '8': takes a whole number": "data=DataConfig(batch_size='8')",
    "data.batch_size is 8.0: takes a whole number": "data=DataConfig(batch_size=8.0)",
    "train.num_steps is True: takes a whole number": "train=TrainConfig(num_steps=True)",
    "train.num_steps is None: takes a whole number": "train=TrainConfig(num_steps=None)",
    "train.seed is -1: takes 0 or more": "train=TrainConfig(seed=-1)",
    "optimizer.learning_rate is '1e-3': takes a number": "optimizer=OptimizerConfig("
    "learning_rate='1e-3')",
    "optimizer.learning_rate is nan: takes a finite float32 number": "optimizer=OptimizerConfig("
    "learning_rate=float('nan'))",
    "optimizer.name is 'adam': takes one of adamw, adafactor": "optimizer=OptimizerConfig("
    "name='adam')",
    "model.attention is None: takes a dictionary": "model=ModelConfig(attention=None)",
    "model is 3: takes a dictionary of its fields": "model=3",
    "model.attention.kind is 'mhx': takes one of mha, sha": "model=ModelConfig("
    "attention=AttentionConfig(kind='mhx'))",
    "model.dropout_rate is '0': takes a number": "model=ModelConfig(dropout_rate='0')",
    "mesh.data is [2]: takes a whole number": "mesh=MeshConfig(data=[2])",
    "workdir is None: takes a string": "workdir=None",
    "workdir is PosixPath('runs'): takes a string": "workdir=__import__('pathlib').Path('runs')",
    "task is 'speech': takes one of mlm, lm": "task='speech'",
    "evaluation.split is 'train': takes one of": "evaluation=EvaluationConfig(split='train')",
    "data.train_weights is ('1',): takes any number of numbers": "data=DataConfig("
    "train_weights=('1',))",
    "data.train is ('a\\x00b',): takes any number of strings": "data=DataConfig(train=('a\\0b',))",
}


@pytest.mark.parametrize("entry", ["train", "sweep"])
@pytest.mark.parametrize("says", VALUES)
def test_a_value(place, refused, said, says, entry):
    write(place, f"{HEAD}def get_config():\n    return Config({VALUES[says]})\n")
    refused(ENTRIES[entry], said("", says, or_file=True))
