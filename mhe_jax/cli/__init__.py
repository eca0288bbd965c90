"""The command line: arguments in, one call, one line out.

commands.py  `python -m mhe_jax COMMAND`    arguments.py  parses command lines
process.py   how a command ends             sweep/        many runs of one config
train.py  evaluate.py  compare.py  paper.py  factorize.py  export.py   a command each

Nothing imports this room but `train.py`, `eval.py` and `mhe_jax/__main__.py`. Arguments are parsed
before jax is loaded.
"""
