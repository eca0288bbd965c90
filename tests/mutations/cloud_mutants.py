"""Bugs of places in buckets."""

from mutations.mutant import Mutant

CLOUD = (
    Mutant(
        "an object that has changed is not fetched again",
        "local_copy",
        "copies / key_of(*version)",
        'copies / key_of("one")',
        "test_buckets.py",
    ),
    Mutant(
        "a lock is written over another",
        "Bucket.create",
        ', mode="create"',
        "",
        "test_bucket_runs.py::test_of_two_that_make_the_lock_one_does",
    ),
    Mutant(
        "a step that was never whole counts",
        "has_steps",
        '"/commit_success.txt" if isinstance(place, Bucket) else ""',
        '""',
        "test_bucket_runs.py::test_a_step_that_was_never_whole_is_none",
    ),
    Mutant(
        "the log of a bucket is not uploaded",
        "Tracker.upload",
        "self._file is not None and",
        "self._file is None and",
        "test_bucket_runs.py::test_the_log_is_there_before_the_checkpoint",
    ),
    Mutant(
        "what goes wrong counts as nothing there",
        "Bucket._info",
        "except FileNotFoundError:",
        "except OSError:",
        "test_buckets.py",
    ),
    Mutant(
        "objects of one name take each other's place",
        "local_copy",
        '"fetched" / key_of(str(path))',
        '"fetched" / key_of(path.name)',
        "test_buckets.py::test_objects_of_one_name_in_two_places_are_kept_both",
    ),
    Mutant(
        "a copy that is cut is kept",
        "local_copy",
        "if not path.is_copied_by(sum_of(draft)):",
        "if False:",
        "test_buckets.py",
    ),
    Mutant(
        "what another process fetches is deleted",
        "local_copy",
        ' and other.suffix != ".tmp"',
        "",
        "test_buckets.py::test_it_is_fetched_once_and_anew_when_it_has_changed",
    ),
    Mutant(
        "a name goes up at its end",
        "check_scheme",
        '".." in name.split("/")',
        '"/../" in name',
        "test_places.py::test_a_url_does_not_go_up",
    ),
)
