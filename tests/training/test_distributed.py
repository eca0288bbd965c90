"""How processes are told of each other."""

import pytest

from mhe_jax.cli.arguments import PROCESSES
from mhe_jax.config import InputError
from mhe_jax.training.cluster.distributed import ProcessFlags, take_flags

EXPLICIT = ["--coordinator", "host:1234", "--num_processes", "4", "--process_id", "3"]


def test_flags_are_taken_out_of_the_command_line():
    rest = ["config.py", "--data.train", "a", "b", "--workdir", "runs/a"]
    assert take_flags(rest) == (None, rest)
    assert take_flags([*rest, "--distributed", "auto"]) == (ProcessFlags(), rest)
    assert take_flags([*EXPLICIT, *rest]) == (ProcessFlags("host:1234", 4, 3), rest)
    timeout = [*EXPLICIT[:4], "--process-timeout=9", *EXPLICIT[4:]]
    assert take_flags([*rest, *timeout]) == (ProcessFlags("host:1234", 4, 3, 9), rest)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distributed", "slurm"], "--distributed is 'slurm': takes auto"),
        (["--distributed"], "--distributed has no value"),
        (["--distributed", "auto", "--process_id", "1"], "--process_id: not with --distributed"),
        (EXPLICIT[2:], "--coordinator is missing"),
        (EXPLICIT[:4], "--process_id is missing"),
        (["--process_timeout", "9"], "--coordinator is missing"),
        ([*EXPLICIT[:5], "4"], "--process_id is 4: takes 0 to 3"),
        ([*EXPLICIT[:3], "9" * 5000, *EXPLICIT[4:]], f"--num_processes is '{'9' * 99}': takes a"),
        ([*EXPLICIT[:5], "x"], "--process_id is 'x': takes a whole number from 0 to 999,999"),
        ([*EXPLICIT, "--process_timeout", "0"], "--process_timeout is '0': .* from 1 to"),
        (["--coordinator", "host", *EXPLICIT[2:]], "--coordinator is 'host': takes HOST:PORT"),
        (["--coordinator", "host:99999", *EXPLICIT[2:]], "takes HOST:PORT"),
    ],
)
def test_wrong_flags_are_one_line(flags, message):
    with pytest.raises(InputError, match=message) as error:
        take_flags(["config.py", *flags])
    assert "\n" not in str(error.value)


def test_help_names_every_flag():
    for flag in ["--distributed", *EXPLICIT[::2], "--process_timeout"]:
        assert flag in PROCESSES
