"""Errors that a user can mend."""


class InputError(ValueError):
    """The user gave something wrong; the message is one line: what, and what is allowed."""


def not_installed(what: str, extra: str) -> InputError:
    """That `what` is missing, and how a clone gets it: no package index has mhe_jax."""
    return InputError(f"{what}: in the clone, pip install -e '.[{extra}]' -c constraints.txt")
