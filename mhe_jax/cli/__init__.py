"""The command line: arguments in, one call, one line out.

commands.py  `mhe-jax COMMAND`       arguments.py  parses command lines
process.py   how a command ends      sweep.py      many runs of one config
train.py  evaluate.py  configs.py  data.py  export.py  convert.py  factorize.py  demo.py
                                     a command each; report.py has compare and paper

Only `train.py`, `eval.py` and `mhe_jax/__main__.py` import this package. Arguments are parsed
before jax is loaded.
"""
