"""Every kind in a model of NNX, and the model of docs/your_model.md: it trains and decodes."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from attention_cases import B, T, every_kind, normal
from flax import nnx

PAGE = Path(__file__).parents[2] / "docs" / "your_model.md"


def test_the_model_of_the_page_trains_and_decodes():
    text = PAGE.read_text(encoding="utf-8").partition("## In an NNX model\n")[2]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    losses, tokens, found = names["losses"], names["tokens"], names["found"]
    assert losses[0] > 2
    assert losses[-1] < 0.05
    assert found == tokens[0].tolist()
    # The logits of a step over the cache are those of the whole sequence at once.
    whole = names["model"](jnp.array([found]))
    np.testing.assert_allclose(names["logits"][0, -1], whole[0, -1], atol=1e-5)


@every_kind
def test_a_kind_in_nnx_does_what_it_does_in_linen(case):
    module, x = case.module(), normal(1, B, T, case.width)
    bridge = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)
    params = nnx.to_pure_dict(nnx.state(bridge, nnx.Param))
    np.testing.assert_array_equal(bridge(x), module.apply({"params": params}, x))
