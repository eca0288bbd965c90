"""The command line: arguments in, one call, one line out.

commands.py  `mhe-jax COMMAND`       arguments.py  parses command lines
process.py   how a command ends      sweep/        many runs of one config
train.py  evaluate.py  compare.py  paper.py  configs.py  data.py    a command each
export.py  convert.py  factorize.py  demo.py                        likewise

Only `train.py`, `eval.py` and `mhe_jax/__main__.py` import this package. Arguments are parsed
before jax is loaded.
"""
