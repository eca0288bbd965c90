"""Functions of a trained run as StableHLO, by `jax.export`: they run without this code.

    encoders       encode(params, tokens, token_types where there are several) -> [b, t, M]
                   predict(params, ...) -> the task's logits; not of shuffle_random
    lm             start(params, tokens, positions) -> logits [b, t, V], cache
    translation    start(params, sources) -> cache
    both           step(params, cache, tokens [b, 1], positions [b, 1]) -> logits [b, 1, V], cache

Each is one file for CPU, CUDA and TPU, for any number of rows b and any length t up to
`model.max_length`. The parameters are arguments, by name, in `model.safetensors`. The form `shared`
and all engines but `xla` need the length when they are compiled, so they are not taken.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export as jax_export

from mhe_jax import tasks
from mhe_jax.attention.forms import AttentionInForms
from mhe_jax.attention.module import Call
from mhe_jax.config import Config, not_installed
from mhe_jax.config.data import PAD
from mhe_jax.config.fields import set_field
from mhe_jax.config.files import CONFIG, TOKENIZER
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange.card import Export
from mhe_jax.interchange.plain import abstract_of, require
from mhe_jax.model.layers import attention_module
from mhe_jax.training.checkpoint.tensors import WEIGHTS, by_name, write_tensors

PLATFORMS = ("cpu", "cuda", "tpu")
SUFFIX = "stablehlo"
FRAMES = "jax_traceback_in_locations_limit"

WHAT = """\
`*.stablehlo` are functions that `jax.export` has serialized, for {platforms}, and
`model.safetensors` their parameters by name. They take any number of rows b, and up to {length:,}
tokens t a row. Attention is computed as {forms}, by the engine `xla`. `config.json` has every
setting of the training, and the tokenizer makes the ids: 0 is padding, which stands at the end of a
row, 2 `<s>`, 3 `</s>`.

{signatures}"""
USE = """\
```python
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

params = load_file("DIRECTORY/model.safetensors")
{name} = jax.export.deserialize(Path("DIRECTORY/{name}.stablehlo").read_bytes())
{lines}
```"""
LINES = {
    "encode": """\
tokens = np.array([[2, 17, 29, 3]], np.int32)
print(encode.call(params, tokens{types}))""",
    "lm": """\
step = jax.export.deserialize(Path("DIRECTORY/step.stablehlo").read_bytes())
tokens = np.array([[2, 17, 29]], np.int32)
logits, cache = start.call(params, tokens, np.array([[0, 1, 2]], np.int32))
best = logits[:, -1:].argmax(-1).astype(np.int32)
logits, cache = step.call(params, cache, best, np.array([[3]], np.int32))
print(logits.argmax(-1))""",
    "translation": """\
step = jax.export.deserialize(Path("DIRECTORY/step.stablehlo").read_bytes())
cache, token = start.call(params, np.array([[17, 29, 3]], np.int32)), np.array([[2]], np.int32)
for position in range(10):
    logits, cache = step.call(params, cache, token, np.array([[position]], np.int32))
    token = logits.argmax(-1).astype(np.int32)
    print(token)""",
}


class Function(NamedTuple):
    """A function of parameters by name, and the shapes of its other arguments."""

    call: Callable[..., Any]
    arguments: Mapping[str, Any]  # a name: a shape, or a tree of them


def write(run: Run, directory: Path) -> Export:
    """Writes the functions of a run, with parameters, config, tokenizer and a card."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise not_installed("stablehlo needs flatbuffers", "export")
    require(run.config.model, "stablehlo", hashing=None)  # whose signatures mhe_jax alone computes
    config = at_any_length(run.config)
    found = functions(config)
    abstract = abstract_of(config, sep=".")
    frames = getattr(jax.config, FRAMES)
    jax.config.update(FRAMES, 0)  # frames name files of this machine
    try:
        for name, function in found.items():
            exported = jax_export.export(jax.jit(function.call), platforms=PLATFORMS)(
                abstract, *function.arguments.values()
            )
            (directory / f"{name}.{SUFFIX}").write_bytes(exported.serialize())
    finally:
        jax.config.update(FRAMES, frames)
    write_tensors(directory / WEIGHTS, by_name(run.params), {"steps": json.dumps(run.steps)})
    for name in (CONFIG, TOKENIZER):
        (directory / name).write_bytes((run.workdir / name).read_bytes())
    forms = {
        role: f"{kind} {config.model.attention_for(role).form or ''}".strip()
        for role, kind in config.kinds.items()
    }
    what = WHAT.format(
        platforms=", ".join(PLATFORMS),
        length=config.model.max_length,
        forms=", ".join(f"`{form}` ({role})" for role, form in forms.items()),
        signatures="\n".join(_signature(name, function) for name, function in found.items()),
    )
    first = next(iter(found))
    lines = LINES["encode" if first == "encode" else config.task]
    types = ", 0 * tokens" if "token_types" in found[first].arguments else ""
    use = USE.format(name=first, lines=lines.replace("{types}", types))
    return {"functions": list(found), "platforms": list(PLATFORMS), "form": forms}, what, use


def at_any_length(config: Config) -> Config:
    """The config with forms and an engine that need not know lengths, and layers unrolled.

    The form is the first that neither refuses a call of one query nor is slower for it, but for
    `shared`.
    """
    config = set_field(set_field(config, "model.scan_layers", False), "model.remat", False)
    for role in config.facts.roles:
        module, form = attention_module(config.model, role, decode=role != "encoder"), None
        if isinstance(module, AttentionInForms):
            width = (module.qkv_features or config.model.features) // module.num_heads
            one = Call(width, config.model.features, queries=1)
            form = next(
                form
                for form in module.forms
                if form != "shared" and not module.refusal_of(form, one)
                if not module.is_slower(form, one)
            )
        for field, value in (("form", form), ("engine", "xla")):
            config = set_field(config, f"model.attention_by_role.{role}.{field}", value)
    return config


def functions(config: Config) -> dict[str, Function]:
    """The functions of a run's task by their names."""
    task, length = tasks.of(config), config.model.max_length
    model: Any = task.model(config.model)
    b, t, p = jax_export.symbolic_shape("b, t, p", constraints=[f"t <= {length}"])
    rows = jax.ShapeDtypeStruct((b, t), jnp.int32)

    def apply(params: Any, *args: Any, cache: Any = None, **named: Any) -> Any:
        variables = {"params": unflatten_dict(params, sep=".")}
        if cache is not None:
            variables["cache"] = unflatten_dict(cache, sep=".")
        return model.apply(variables, *args, **named)

    def with_cache(params: Any, *args: Any, **named: Any) -> Any:
        found, state = apply(params, *args, mutable=["cache"], **named)
        return found, flatten_dict(state["cache"], sep=".")  # pyright: ignore

    def step(params: Any, cache: Any, tokens: jax.Array, positions: jax.Array) -> Any:
        return with_cache(params, tokens, positions, method="decode_step", cache=cache)

    if config.task == "lm":

        def of_prompt(params: Any, tokens: jax.Array, positions: jax.Array) -> Any:
            _, cache = with_cache(params, tokens.shape[0], method="start_cache")
            logits, cache = step(params, cache, tokens, positions)
            # Rows stand where their prompts end; what they write next replaces the padding.
            lengths = jnp.sum(tokens != PAD, axis=1)
            return logits, {
                name: lengths if name.endswith("cache_index") else leaf
                for name, leaf in cache.items()
            }

        start, given = of_prompt, {"tokens": rows, "positions": rows}
        # The cache holds `max_length` tokens, however many there are: only b stays symbolic.
        (b,) = jax_export.symbolic_shape("b")
    elif config.task == "translation":

        def of_sources(params: Any, sources: jax.Array) -> Any:
            return with_cache(params, sources, method="start_cache")[1]

        start, given = of_sources, {"sources": rows}
    else:
        types = {"token_types": rows} if config.model.num_token_types > 1 else {}

        def encode(params: Any, tokens: jax.Array, *token_types: jax.Array) -> Any:
            return apply(params, tokens, *token_types, method="encode")

        found = {"encode": Function(encode, {"tokens": rows, **types})}
        if config.facts.labelled:
            names = ("tokens", "token_types", "marks")
            found["predict"] = Function(apply, dict.fromkeys(names, rows))
        elif config.task == "mlm":
            places = {"masked_positions": jax.ShapeDtypeStruct((b, p), jnp.int32)}
            found["predict"] = Function(apply, {"tokens": rows, **places, **types})
        return found
    one = jax.ShapeDtypeStruct((b, 1), jnp.int32)
    if config.task == "lm":
        cache = jax.eval_shape(start, abstract_of(config, sep="."), one, one)[1]
    else:
        cache = jax.eval_shape(start, abstract_of(config, sep="."), rows)
    return {
        "start": Function(start, given),
        "step": Function(step, {"cache": cache, "tokens": one, "positions": one}),
    }


def _signature(name: str, function: Function) -> str:
    arguments = (
        "cache"
        if isinstance(value, Mapping)
        else f"{argument} [{', '.join(map(str, value.shape))}]"
        for argument, value in function.arguments.items()
    )
    return f"- `{name}(params, {', '.join(arguments)})`, of int32"
