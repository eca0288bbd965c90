"""How processes are told of each other."""

import pytest

from mhe_jax.config import InputError
from mhe_jax.training.distributed import ProcessFlags, take_flags

EXPLICIT = ["--coordinator", "host:1234", "--num_processes", "4", "--process_id", "3"]


def test_flags_are_taken_out_of_the_command_line():
    rest = ["config.py", "--data.train", "a", "b", "--workdir", "runs/a"]
    assert take_flags(rest) == (None, rest)
    assert take_flags([*rest, "--distributed", "auto"]) == (ProcessFlags(), rest)
    assert take_flags([*EXPLICIT, *rest]) == (ProcessFlags("host:1234", 4, 3), rest)
    timeout = [*EXPLICIT[:4], "--process-timeout=9", *EXPLICIT[4:]]
    assert take_flags([*rest, *timeout]) == (ProcessFlags("host:1234", 4, 3, 9), rest)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--distributed", "slurm"], "--distributed.*'slurm'.*auto"),
        (["--distributed", "auto", "--process_id", "1"], "--process_id"),
        (EXPLICIT[2:], "--coordinator"),
        (EXPLICIT[:4], "--process_id"),
        (["--process_timeout", "9"], "--coordinator"),
        ([*EXPLICIT[:5], "4"], "--process_id is 4.*3"),
        ([*EXPLICIT[:5], "x"], "--process_id.*'x'"),
        ([*EXPLICIT, "--process_timeout", "0"], "--process_timeout is 0.*1 or more"),
        (["--coordinator", "host", *EXPLICIT[2:]], "--coordinator is 'host'.*HOST:PORT"),
    ],
)
def test_wrong_flags_are_one_line(flags, named):
    with pytest.raises(InputError, match=named) as error:
        take_flags(["config.py", *flags])
    assert "\n" not in str(error.value)
