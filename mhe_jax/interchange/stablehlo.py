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
from pathlib import Path
from typing import Any

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
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange import Export, write_parameters
from mhe_jax.interchange.plain import abstract_of, require
from mhe_jax.model.layers import attention_module

PLATFORMS = ("cpu", "cuda", "tpu")
FRAMES = "jax_traceback_in_locations_limit"

WHAT = """\
`*.stablehlo` are functions that `jax.export` has serialized, for {platforms}, and
`model.safetensors` their parameters by name. They take any number of rows, and up to {length:,}
tokens a row. Attention is computed as {forms}, by the engine `xla`. `config.json` has every setting
of the training, and the tokenizer makes the ids: 0 is padding, which stands at the end of a row, 2
`<s>`, 3 `</s>`.

{signatures}"""
USE = """\
```python
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

params = load_file("DIRECTORY/model.safetensors")
[{functions}] = (
    jax.export.deserialize(Path(f"DIRECTORY/{{name}}.stablehlo").read_bytes()).call
    for name in {names}
)
tokens = np.array([[2, 17, 29, 3]], np.int32)
{lines}
```"""
STEP = """
logits, cache = step(params, cache, tokens[:, -1:], np.array([[{position}]], np.int32))
print(logits.argmax(-1))"""
LINES = {
    "encode": "print(encode(params, tokens{types}))",
    "lm": "logits, cache = start(params, tokens, np.arange(4, dtype=np.int32)[None])"
    + STEP.format(position=4),
    "translation": "cache = start(params, tokens)" + STEP.format(position=0),
}


def write(run: Run, directory: Path) -> Export:
    """Writes the functions of a run, with parameters, config and tokenizer."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise not_installed("stablehlo needs flatbuffers", "export")
    require(run.config.model, "stablehlo", hashing=None)  # whose signatures mhe_jax alone computes
    config = at_any_length(run.config)
    found, abstract = functions(config), abstract_of(config, sep=".")
    frames = getattr(jax.config, FRAMES)
    jax.config.update(FRAMES, 0)  # frames name files of this machine
    try:
        for name, (function, arguments) in found.items():
            exported = jax_export.export(jax.jit(function), platforms=PLATFORMS)(
                abstract, *arguments.values()
            )
            (directory / f"{name}.stablehlo").write_bytes(exported.serialize())
    finally:
        jax.config.update(FRAMES, frames)
    write_parameters(run, directory)
    forms = {
        role: f"{kind} {config.model.attention_for(role).form or ''}".strip()
        for role, kind in config.kinds.items()
    }
    what = WHAT.format(
        platforms=", ".join(PLATFORMS),
        length=config.model.max_length,
        forms=", ".join(f"`{form}` ({role})" for role, form in forms.items()),
        signatures="\n".join(
            f"- `{name}(params, {', '.join(arguments)})`, of int32"
            for name, (_, arguments) in found.items()
        ),
    )
    types = ", 0 * tokens" if config.model.num_token_types > 1 else ""
    use = USE.format(
        functions=", ".join(found),
        names=[*found],
        lines=LINES["encode" if "encode" in found else config.task].replace("{types}", types),
    )
    return {"functions": list(found), "platforms": list(PLATFORMS), "form": forms}, what, use


def at_any_length(config: Config) -> Config:
    """The config with forms and an engine that need not know lengths, and layers unrolled."""
    config = set_field(set_field(config, "model.scan_layers", False), "model.remat", False)
    config = set_field(config, "model.kronecker.apply", "factored")  # `auto` compares lengths
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


def functions(config: Config) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The functions of a run's task by their names, and their arguments after the parameters."""
    task, types = tasks.of(config), config.model.num_token_types > 1
    model: Any = task.model(config.model)
    b, t, p = jax_export.symbolic_shape("b, t, p", constraints=[f"t <= {config.model.max_length}"])
    rows, places = (jax.ShapeDtypeStruct((b, length), jnp.int32) for length in (t, p))

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

    def encode(params: Any, *tokens: jax.Array) -> Any:
        return apply(params, *tokens, method="encode")

    def of_sources(params: Any, sources: jax.Array) -> Any:
        return with_cache(params, sources, method="start_cache")[1]

    def of_prompt(params: Any, tokens: jax.Array, positions: jax.Array) -> Any:
        _, cache = with_cache(params, tokens.shape[0], method="start_cache")
        logits, cache = step(params, cache, tokens, positions)
        # Rows stand where their prompts end; what they write next replaces the padding.
        lengths = jnp.sum(tokens != PAD, axis=1)
        return logits, {
            name: lengths if name.endswith("cache_index") else leaf for name, leaf in cache.items()
        }

    if config.facts.is_encoder:
        of_types = {"token_types": rows} if types else {}
        found = {"encode": (encode, {"tokens": rows, **of_types})}
        if config.facts.labelled:
            found["predict"] = apply, dict.fromkeys(("tokens", "token_types", "marks"), rows)
        elif config.task == "mlm":
            found["predict"] = apply, {"tokens": rows, "masked_positions": places, **of_types}
        return found
    params = abstract_of(config, sep=".")
    if config.task == "lm":
        start, given = of_prompt, {"tokens": rows, "positions": rows}
        # The cache holds `max_length` tokens, however many there are: only b stays symbolic.
        (b,) = jax_export.symbolic_shape("b")
        one = jax.ShapeDtypeStruct((b, 1), jnp.int32)
        cache = jax.eval_shape(start, params, one, one)[1]
    else:
        start, given = of_sources, {"sources": rows}
        one = jax.ShapeDtypeStruct((b, 1), jnp.int32)
        cache = jax.eval_shape(start, params, rows)
    return {
        "start": (start, given),
        "step": (step, {"cache": cache, "tokens": one, "positions": one}),
    }
