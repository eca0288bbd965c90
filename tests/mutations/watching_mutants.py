"""Bugs of what is watched while a run trains: writers of metrics, the picture, the bar."""

from mutations.mutant import Mutant

WATCHING = (
    Mutant(
        "another run of wandb at each start",
        "WeightsAndBiases.__init__",
        "if not file.exists():",
        "if True:",
        "test_metric_writers.py",
    ),
    Mutant(
        "a writer that is missing is found too late",
        "_train",
        "    check_writers(config)\n",
        "",
        "test_metric_writers.py",
    ),
    Mutant(
        "the picture has the loss with smoothing",
        "TRAIN_LOSS",
        '("unsmoothed_loss", "loss")',
        '("loss", "unsmoothed_loss")',
        "test_curve.py",
    ),
    Mutant(
        "the unsmoothed loss is smoothed",
        "label_sums",
        '"unsmoothed_loss": found["nats"]',
        '"unsmoothed_loss": found["loss"]',
        "test_objective.py",
    ),
    Mutant(
        "a logarithm of what is not above 0",
        "spread_out",
        "low <= 0 or ",
        "",
        "test_curve.py",
    ),
    Mutant(
        "the sample is of parameters, not their average",
        "Stepper._validate",
        "self.measure(params)",
        "self.measure(state.params)",
        "test_translated_sample.py::test_it_is_what_eval_translates_with_these_parameters",
    ),
    Mutant(
        "the sample compiles each time",
        "Programs.with_params",
        "other._compiled = self._compiled",
        "other._compiled = {}",
        "test_translated_sample.py::test_more_than_there_is_takes_all_and_compiles_once",
    ),
    Mutant(
        "the sample is translated by a beam",
        "TranslatedSample.__init__",
        "beam_size=1",
        "beam_size=2",
        "test_translated_sample.py::test_it_is_what_eval_translates_with_these_parameters",
    ),
    Mutant(
        "compiling is said of every step",
        "Meter.run",
        'self.tracker.doing("compiling")',
        'pass\n        self.tracker.doing("compiling")',
        "test_meter.py",
    ),
    Mutant(
        "the demo begins with what comes first",
        "examples",
        "number in wrong)\n    more",
        "0)\n    more",
        "test_demo.py",
    ),
    Mutant(
        "a bar that is wider than the terminal",
        "Tracker._fitting",
        "names.pop()",
        "break",
        "test_tracking.py",
    ),
    Mutant(
        "published marks beside any translation",
        "benchmark_of",
        "return WMT14 if",
        "return WMT14 if True or",
        "test_report.py",
    ),
    Mutant(
        "published scores beside losses",
        "published_for",
        " or lower_is_better(section.metric)",
        "",
        "test_report.py",
    ),
    Mutant(
        "one writer gets the metrics of all",
        "Tracker.log",
        "for writer in self._writers:",
        "for writer in self._writers[:1]:",
        "test_metric_writers.py",
    ),
)
