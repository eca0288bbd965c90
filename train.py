"""Train: `python train.py configs/demo.py --workdir runs/demo`; `--help` explains every field.

With `--compile_only --topology v5e:16x16` it compiles for devices that need not be there instead;
`--sweep model.attention.kind=mha,sha --seeds 3` trains every combination, one after the other.
The last line on standard output is one JSON object with the result; all else is on standard error.
"""

import json
import signal
import sys


def main() -> None:
    from mhe_jax.cli import sweep
    from mhe_jax.cli.arguments import output, parse_target, parse_train_arguments
    from mhe_jax.training.cluster.distributed import joined, take_flags

    if sweep.is_sweep(sys.argv[1:]):
        found = sweep.run(sweep.parse(sys.argv[1:]), __file__)
        print(sweep.table(found["runs"]), file=sys.stderr)
        output(json.dumps(found) + "\n")
        sys.exit(1 if found["failed"] else 0)
    # jax starts after the arguments are right.
    target, arguments = parse_target(sys.argv[1:])
    if target is not None:
        config = parse_train_arguments(arguments)
        from mhe_jax.analysis.ahead import compile_ahead

        output(json.dumps(compile_ahead(config, target)) + "\n")
        return
    processes, arguments = take_flags(arguments)
    config = parse_train_arguments(arguments)
    with joined(processes) as writes:
        from mhe_jax.training.loop import train

        result = train(config)
        if writes:
            output(json.dumps(result) + "\n")


if __name__ == "__main__":
    # Ctrl-C while modules load ends without a traceback; run_entry_point takes it back.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mhe_jax.cli.arguments import run_entry_point

    run_entry_point(main)
