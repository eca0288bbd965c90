"""Errors that a user can fix."""


class InputError(ValueError):
    """The user gave something wrong; the message is one line: what, and what is allowed."""


def not_installed(what: str, extra: str) -> InputError:
    """The error: `what` is missing, and which extra of the package has it."""
    how = f"in the clone, pip install -e '.[{extra}]' -c constraints.txt"
    return InputError(f"{what}: {how}; or the wheel of mhe_jax with [{extra}]")
