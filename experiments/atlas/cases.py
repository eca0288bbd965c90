"""The models of each regime of protocol.md, and the order in which they are measured."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from experiments.atlas import sizes
from experiments.atlas.sizes import Fields, changed
from experiments.paper.paper import MULTI30K, TRANSLATION
from experiments.runs import ROOT
from mhe_jax.config import Config
from mhe_jax.config.loading import load_config

# What decides the bar.
TASKS = ("lm", "translation")
# For a GPU.
LARGE = "lm_large"
# The language model by two optimizers.
MUON = "lm_muon"
# What Muon does not move has the rate that AdamW's search finds in the small language model.
MUON_FIELDS: Fields = {"optimizer.name": "muon", "optimizer.adam_rate": 8e-3}
# With rotary positions, by the better one.
ROTARY = "lm_rotary"
# One pass over a large text, for a GPU: `linux_text.py` makes it.
PASS = "lm_pass"


class Source(NamedTuple):
    """A file of configs/, a directory of the data, and a score on the test set."""

    config: str
    data: str
    score: str


SOURCES = {
    "lm": Source("wikitext2_lm.py", "wikitext-2", "perplexity_per_token"),
    "translation": Source(*MULTI30K, "bleu"),
    LARGE: Source("wikitext2_lm.py:large", "wikitext-2", "perplexity_per_token"),
    MUON: Source("wikitext2_lm.py", "wikitext-2", "perplexity_per_token"),
}
# Tasks of protocol.md, "Controls": by stage and regime the cases, the most important first. Their
# rates are tried with all steps, and no others beside them; their seeds are new.
_FIRST = {"shape": ("mha",), "width": ("mva-narrow", "mha-thin-narrow")}
_CONTROLS = (
    _FIRST,
    {"width": ("mva-narrow-no-bias", "mha-narrow-2-heads")},
    {"width": ("gqa", "mqa")},
    {"width": ("mva", "mva-no-bias", "mha-thin")},
)
PLANS: dict[str, tuple[dict[str, tuple[str, ...]], ...]] = {
    "lm_controls": _CONTROLS,
    "translation_controls": _CONTROLS,
    ROTARY: (
        _FIRST,
        {"width": ("mha-narrow-2-heads",)},
        {"shape": ("mha-2-heads",)},
        {"width": ("mha-narrow",)},
        {"width": ("mva", "gqa")},
    ),
    # A stage for each case: all seeds of one before the next.
    PASS: (
        {"shape": ("mha",)},
        {"width": ("mva-narrow",)},
        {"width": ("mha-thin-narrow",)},
        {"shape": ("mha-4-heads",)},
        {"width": ("mva",)},
        {"width": ("mha-narrow",)},
        {"width": ("gqa",)},
        {"width": ("sha",)},
    ),
}
SOURCES |= {
    "lm_controls": SOURCES["lm"],
    "translation_controls": SOURCES["translation"],
    ROTARY: Source("llama_lm.py", "wikitext-2", "perplexity_per_token"),
    PASS: Source("llama_lm.py:large", "linux", "perplexity_per_token"),
}
CONTROLS = ("mha", "sha")
# Kinds with at most half of MHA's cache, in the order in which they are measured.
HALF_CACHE = ("sha", "mhe_mul", "mhe_add-2-groups", "gqa", "mqa", "mla", "gta")
# These have at most half of MHA's cache only while no layer is added, so they are not in `depth`.
NARROW = ("mva-narrow", "mha-narrow")
# As `mva` may win by wide scores alone. With one head and without its key bias it is the first of
# these, if its scores are as wide as the model.
WIDE = {f"mha, {n} head{'s' if n > 1 else ''}": n for n in (1, 2, 4)}
RIVALS = ("mla", "gta", "collaborative", "mfa", "tpa")


class Case(NamedTuple):
    """A model: a regime and a name in it."""

    regime: str
    name: str


class Stage(NamedTuple):
    cases: list[Case]
    # How many of those that are no control have fresh seeds: the best by the choosing seed.
    best: int


def attention(base: Config, name: str) -> Fields:
    """The kind `name` as it is compared, its widths in proportion to those of the model."""
    m = base.model
    M, D = m.features, m.features // m.attention.num_heads
    kinds = TRANSLATION | {
        "mva": {"kind": "mva", "score_features": M // 2},
        "mha-2-heads": {"kind": "mha", "num_heads": 2},
        "mha-4-heads": {"kind": "mha", "num_heads": 4},
        "mha-narrow": {"kind": "mha", "qkv_features": M // 2},
        "mha-narrow-2-heads": {"kind": "mha", "num_heads": 2, "qkv_features": M // 2},
        "mha-thin": {"kind": "mha", "score_features": M // 2},
        "mha-thin-narrow": {"kind": "mha", "score_features": 3 * M // 8, "qkv_features": M // 2},
        "mva-narrow": {"kind": "mva", "score_features": 3 * M // 8, "qkv_features": M // 2},
        "collaborative": {"kind": "collaborative", "score_features": M // 2},
        "mla": {"kind": "mla", "latent_features": 4 * D},
        "mfa": {"kind": "mfa", "query_rank": 4 * D},
        "gta": {"kind": "gta", "num_kv_heads": 2},
        "tpa": {"kind": "tpa", "query_rank": 6, "key_rank": 2, "value_rank": 2},
    }
    # `mva` and `mva-narrow` without the key bias.
    fields: Fields = kinds[name.removesuffix("-no-bias")]
    if name.endswith("-no-bias"):
        fields = fields | {"use_key_bias": False}
    if m.attention.num_kv_heads is not None:  # of the config's own kind
        fields = {"num_kv_heads": None} | fields
    return {
        f"model.attention.{field}": int(value) if str(value).isdecimal() else value
        for field, value in fields.items()
    }


def of_size(base: Config, name: str, size: Callable[[Config, int], Fields]) -> Fields:
    """The kind in a model of as many parameters as `base` has with `mha`."""
    wanted = sizes.parameters(changed(base, attention(base, "mha")))
    fields = attention(base, name)
    return fields | size(changed(base, fields), wanted)


@functools.cache
def models(task: str) -> dict[str, dict[str, Fields]]:
    """By regime, the fields of each case that lie over the task's config."""
    base = base_of(task)
    if task in PLANS:
        make = {"shape": attention, "width": functools.partial(of_size, size=sizes.wider)}
        extra = MUON_FIELDS if task == ROTARY else {}
        found: dict[str, dict[str, Fields]] = {regime: {} for regime in make}
        for regime, name in (case for stage in stages(task) for case in stage.cases):
            found[regime][name] = make[regime](base, name) | extra
        return found
    if task == MUON:
        kinds = {name: attention(base, name) for name in ("mha", "mva")}
        return {"adamw": kinds, "muon": {name: MUON_FIELDS | kinds[name] for name in kinds}}
    shape = dict.fromkeys(("mha", *HALF_CACHE, *RIVALS, "mhe_add", "mhe_add-2-score-groups", "mva"))
    mha = attention(base, "mha")
    return {
        "shape": {name: attention(base, name) for name in shape},
        "depth": {name: of_size(base, name, sizes.deeper) for name in ("mha", *HALF_CACHE)},
        "width": {name: of_size(base, name, sizes.wider) for name in (*HALF_CACHE, *NARROW)},
        "limits": {name: mha | {"model.attention.num_heads": n} for name, n in WIDE.items()},
    }


@functools.cache
def base_of(task: str) -> Config:
    return load_config(str(ROOT / "configs" / SOURCES[task].config))


def stages(task: str) -> list[Stage]:
    """What is measured, the most important first."""

    def cases(regime: str, *names: str) -> list[Case]:
        return [Case(regime, name) for name in names]

    if task in PLANS:
        every = [
            [c for regime in plan for c in cases(regime, *plan[regime])] for plan in PLANS[task]
        ]
        return [Stage(each, len(each)) for each in every]
    if task == MUON:
        return [Stage([*cases("adamw", "mha", "mva"), *cases("muon", "mha", "mva")], 2)]
    if task == LARGE:
        return [
            Stage([*cases("shape", "mha", "mva"), *cases("width", *NARROW)], 3),
            Stage(cases("limits", *WIDE), len(WIDE)),
            Stage(cases("shape", "sha", "gqa", "mhe_mul", "mhe_add"), 3),
        ]
    # What tells most: whether some kind meets the bar, and whether `mva` needs narrow heads to win.
    first = [
        *(Case(regime, "mha") for regime in ("shape", "depth")),
        *cases("width", *NARROW),
        *cases("limits", *WIDE),
    ]
    return [
        Stage(first, len((*NARROW, *WIDE))),
        Stage(cases("depth", *HALF_CACHE), 4),
        Stage(cases("shape", "sha", "mhe_mul", "mhe_add"), 2),
        Stage(cases("shape", "mva", "mhe_add-2-groups", "mhe_add-2-score-groups"), 3),
        Stage(cases("shape", "gqa", "mqa"), 2),
        Stage(cases("shape", *RIVALS), 2),
        Stage(cases("width", *HALF_CACHE), 4),
    ]
