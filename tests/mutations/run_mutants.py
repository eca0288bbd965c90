"""Bugs of a run around its steps: what may change, locks, sweeps, the command line, reports."""

from mutations.mutant import Mutant

RUN = (
    # What a run may change, and whose files are whose.
    Mutant(
        "a test may not be given later", "MAY_CHANGE", "|test)", ")", "test_resume.py test_loop.py"
    ),
    Mutant(
        "init_from may change",
        "MAY_CHANGE",
        "seed|init_from",
        "seed",
        "test_resume.py test_loop.py test_warm_start.py test_labelled_run.py",
    ),
    Mutant(
        "an average may begin",
        "changed_fields",
        "None not in (old[name], value)",
        "True",
        "test_resume.py test_loop.py",
    ),
    Mutant(
        "a run without its tokenizer goes on",
        "check_files",
        "not tokenizer.exists() and config",
        "tokenizer.exists() and config",
        "test_loop.py test_resume.py test_bad_runs.py",
    ),
    Mutant(
        "a picture of somebody else is written over",
        "check_files",
        "PICTURE, RESULT",
        "RESULT",
        "test_loop.py test_resume.py",
    ),
    Mutant(
        "another tokenizer in the way is taken",
        "check_files",
        "tokenizer.read_bytes() != data.read_tokenizer(config, given).model",
        "False",
        "test_loop.py test_resume.py test_faults.py",
    ),
    Mutant(
        "a draft is left behind",
        "drop_draft",
        ".unlink(missing_ok=True)",
        "",
        "test_loop.py test_faults.py",
    ),
    Mutant(
        "a longer epoch goes by",
        "check_text",
        "rel_tol=1e-6",
        "rel_tol=1e-1",
        "test_changed_text.py",
    ),
    Mutant(
        "a shorter run goes by",
        "check_length",
        "done > config",
        "done > 1 + config",
        "test_loop.py",
    ),
    # Locks.
    Mutant(
        "a lock is not renewed",
        "Lock._renew",
        "                _write(self._path, self._owner)\n",
        "",
        "test_lock.py",
    ),
    Mutant(
        "a renewal does not count",
        "Lock._renew",
        "self._owner.renewals + 1",
        "self._owner.renewals",
        "test_lock.py",
    ),
    Mutant(
        "a long pause is not noticed",
        "Lock.check",
        "> LEASE / 2",
        "> LEASE * 2",
        "test_lock.py::test_a_write_after_a_long_pause_looks_first",
    ),
    Mutant(
        "a foreign lock passes for ours",
        "Lock._look",
        "found.token != self._owner.token",
        "found.token == self._owner.token",
        "test_lock.py",
    ),
    # Optimizer.
    Mutant(
        "warmup ends a step late",
        "make_schedule.schedule",
        "n <= W,",
        "n <= W + 1,",
        "test_optimizer.py",
    ),
    Mutant(
        "decay ends a step early",
        "make_schedule.schedule",
        "max(N - W, 1)",
        "max(N - W - 1, 1)",
        "test_optimizer.py",
    ),
    Mutant(
        "inverse root without warmup",
        "make_schedule",
        "jnp.sqrt(max(W, 1) / n)",
        "jnp.sqrt(W / n)",
        "test_optimizer.py",
    ),
    # Sweeps.
    Mutant(
        "a hang-up is passed on as it is",
        "_Signals._catch",
        "signal.SIGTERM if number == signal.SIGHUP else number",
        "number",
        "test_sweep.py",
    ),
    Mutant(
        "a later signal counts",
        "_Signals._catch",
        "self.received or signal.Signals(number)",
        "signal.Signals(number)",
        "test_sweep.py",
    ),
    Mutant(
        "a signal before the process is lost",
        "_Signals._catch",
        "            self._waiting.append(number)\n",
        "            pass\n",
        "test_sweep.py",
    ),
    Mutant(
        "a tokenizer of other text is shared",
        "_share_tokenizer",
        "there.exists() and _of_tokenizer(other.config) == _of_tokenizer(run.config)",
        "there.exists()",
        "test_sweep.py",
    ),
    Mutant(
        "a failure is not counted",
        "run",
        '"failed": statuses.count("failed")',
        '"failed": 0',
        "test_sweep.py",
    ),
    Mutant(
        "a status is no failure", "_train", 'or f"exit status {status}"', "or None", "test_sweep.py"
    ),
    # Command line.
    Mutant(
        "both actions at once",
        "parse",
        "if len(given) > 1:",
        "if False:",
        "test_command_line.py test_translate.py",
    ),
    Mutant(
        "what the user names needs trust",
        "parse",
        '"sources" in map(name_of, options_of(rest))',
        "False",
        "test_bad_strangers.py test_command_line.py",
    ),
    Mutant(
        "a mark at the beginning of every line",
        "input_lines",
        "        if number == 1:\n            part = part",
        "        if True:\n            part = part",
        "test_command_line.py test_translate.py",
    ),
    Mutant(
        "a place in a long line counts from its part",
        "input_lines",
        "place = before + error.start + 1",
        "place = error.start + 1",
        "test_command_line.py test_translate.py test_bad_texts.py",
    ),
    Mutant(
        "a carriage return stays",
        "input_lines",
        '.removesuffix("\\r")',
        "",
        "test_command_line.py test_translate.py",
    ),
    # Reports.
    Mutant(
        "a base of another number of heads",
        "Section.base",
        "rest(other, True) == rest(group, True)] or same",
        "True] or same",
        "test_report.py",
    ),
    Mutant(
        "seeds that not all have are averaged",
        "_chosen",
        "set.intersection(*(",
        "set.union(*(",
        "test_report.py",
    ),
    Mutant(
        "the worst validation loss is chosen",
        "_chosen",
        "best.append(min(members",
        "best.append(max(members",
        "test_report.py",
    ),
    Mutant(
        "runs by directory count as another text",
        "_text",
        "Path(run.config.data.directory).name",
        "run.config.data.directory",
        "test_report.py",
    ),
    Mutant(
        "lower is better for all",
        "lower_is_better",
        "word in LOWER_IS_BETTER",
        "word",
        "test_metrics.py test_report.py",
    ),
    Mutant(
        "a match needs the same spaces",
        "translation_scores",
        "h.strip() == r.strip()",
        "h == r",
        "test_metrics.py",
    ),
    # Tasks.
    Mutant(
        "padding counts as tokens of a step",
        "Task.sums.sums",
        "batch[name] != PAD",
        "batch[name] != -1",
        "test_objective.py test_step.py test_meter.py",
    ),
    Mutant(
        "a model scores with dropout",
        "Task.sums.sums",
        "deterministic=dropout_key is None",
        "deterministic=False",
        "test_objective.py test_step.py",
    ),
    Mutant(
        "a training split opens as another",
        "Task.check_split",
        'split == "train"',
        'split != "train"',
        "test_bad_texts.py test_sources.py",
    ),
)
