"""The command line: arguments in, one call, one line out.

commands.py   every command by its name, and the short ones
runs.py  sweep.py    on one run, and on many
arguments.py  options     process.py  how a command ends

A command is a function of its places (what stands before the first option) and its options. Its
docstring is what `--help` prints. Arguments are parsed before jax is loaded.
"""
