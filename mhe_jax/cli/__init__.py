"""The command line: arguments in, one call, one line out.

commands.py   every command by its name, and the short ones      arguments.py  parses options
evaluate.py  sweep.py  transform.py  the longer ones             process.py    how a command ends

A command is a function of its places (what stands before the first option) and its options. Its
docstring is what `--help` prints. Arguments are parsed before jax is loaded.
"""
