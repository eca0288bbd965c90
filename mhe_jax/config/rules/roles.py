"""What each task is made of."""

from mhe_jax.config import LABELLED, Role, Task

ROLES: dict[Task, tuple[Role, ...]] = {
    "mlm": ("encoder",),
    "shuffle_random": ("encoder",),
    "lm": ("decoder",),
    "translation": ("encoder", "decoder", "cross"),
    **dict.fromkeys(LABELLED, ("encoder",)),
}
