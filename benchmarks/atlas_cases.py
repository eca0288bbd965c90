"""The models of each regime of docs/atlas.md, and the order in which they are measured."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import experiments, sizes
from benchmarks.sizes import Fields, changed
from benchmarks.workplace import ROOT
from mhe_jax.config import Config
from mhe_jax.config.loading import load_config

# What decides the bar.
TASKS = ("lm", "translation")
# For a GPU.
LARGE = "lm_large"


class Source(NamedTuple):
    """A file of configs/, a directory of the data, and a score on the test set."""

    config: str
    data: str
    score: str


SOURCES = {
    "lm": Source("wikitext2_lm.py", "wikitext-2", "perplexity_per_token"),
    "translation": Source(*experiments.MULTI30K, "bleu"),
    LARGE: Source("wikitext2_lm.py:large", "wikitext-2", "perplexity_per_token"),
}
CONTROLS = ("mha", "sha")
# Kinds with at most half of MHA's cache, in the order in which they are measured.
HALF_CACHE = ("sha", "mhe_mul", "mhe_add-2-groups", "gqa", "mqa", "mla", "gta")
# These have at most half of MHA's cache only while no layer is added, so they are not in `depth`.
NARROW = ("mva-narrow", "mha-narrow")
# As `mva` may win by wide scores alone. With one head and without its key bias it is the first of
# these, if its scores are as wide as the model.
WIDE = ("mha, 1 head", "mha, 2 heads", "mha, 4 heads")
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
    D = m.features // m.attention.num_heads
    kinds = experiments.TRANSLATION | {
        "mva": {"kind": "mva", "score_features": m.features // 2},
        "mha-narrow": {"kind": "mha", "qkv_features": m.features // 2},
        "mva-narrow": {
            "kind": "mva",
            "score_features": 3 * m.features // 8,
            "qkv_features": m.features // 2,
        },
        "collaborative": {"kind": "collaborative", "score_features": m.features // 2},
        "mla": {"kind": "mla", "latent_features": 4 * D},
        "mfa": {"kind": "mfa", "query_rank": 4 * D},
        "gta": {"kind": "gta", "num_kv_heads": 2},
        "tpa": {"kind": "tpa", "query_rank": 6, "key_rank": 2, "value_rank": 2},
    }
    fields = kinds[name]
    return {
        f"model.attention.{field}": int(value) if str(value).isdecimal() else value
        for field, value in fields.items()
    }


def of_size(base: Config, name: str, size: Callable[[Config, int], Fields]) -> Fields:
    """The kind in a model of as many parameters as `base` has with `mha`."""
    wanted = sizes.parameters(changed(base, attention(base, "mha")))
    fields = attention(base, name)
    return fields | size(changed(base, fields), wanted)


def of_cost(base: Config, name: str) -> Fields:
    """As many steps as spend the FLOPs of the config with `mha`."""
    mha, own = (sizes.flops(changed(base, attention(base, kind))) for kind in ("mha", name))
    return attention(base, name) | {"train.num_steps": round(base.train.num_steps * mha / own)}


def heads(base: Config) -> dict[str, Fields]:
    """Other numbers of heads, at the same width of all together and at the same width of each."""
    D = base.model.features // base.model.attention.num_heads
    found = {}
    for name in ("sha", "mhe_mul", "mhe_add"):
        for count in (4, 16):
            fields = attention(base, name) | {"model.attention.num_heads": count}
            found[f"{name}, {count} heads"] = fields
            width = {"model.attention.qkv_features": count * D}
            found[f"{name}, {count} heads of {D}"] = fields | width
    return found


def starts(base: Config) -> dict[str, Fields]:
    """Standard deviations of the first head embeddings, and rates of their own.

    Beside 0.02 (mhe_add) and 0.5 (mhe_mul), and the rate of all else.
    """
    found = {}
    for name, default in {"mhe_mul": 0.5, "mhe_add": 0.02}.items():
        fields = attention(base, name)
        for start in sorted({0.0, 0.02, 0.1, 0.5, 1.0} - {default}):
            own = {"model.attention.head_embedding_stddev": start}
            found[f"{name}, start {start:g}"] = fields | own
        for times in (3, 10):
            rate = {"optimizer.head_embedding_rate": float(times)}
            found[f"{name}, {times} times the rate"] = fields | rate
    return found


def limits(base: Config) -> dict[str, Fields]:
    """Settings in which `mva` may lose to `mha`, for both; scores of `mva` stay as they are."""
    m = base.model
    settings: dict[str, Fields] = {
        "1 head": {"model.attention.num_heads": 1},
        "2 heads": {"model.attention.num_heads": 2},
        "4 heads": {"model.attention.num_heads": 4},
        "16 heads": {"model.attention.num_heads": 16},
        "2 layers": {"model.num_layers": 2},
        "6 layers": {"model.num_layers": 6},
        "8 layers": {"model.num_layers": 8},
    }
    if base.task == "lm":
        settings["length 512"] = {"data.sequence_length": 512, "model.max_length": 512}
        settings["length 512"]["data.batch_size"] = base.data.batch_size // 4
    for width in (128, 256, 512):
        fields = {
            "model.features": width,
            "model.mlp_features": width * m.mlp_features // m.features,
        }
        settings[f"width {width}"] = fields
    found = {}
    for setting, fields in settings.items():
        if (wide := changed(base, fields)) == base:
            continue
        for name in ("mha", "mva"):
            found[f"{name}, {setting}"] = attention(wide, name) | fields
    for width in (m.features // 4, m.features):
        score = {"model.attention.score_features": width}
        found[f"mva, scores {width} wide"] = attention(base, "mva") | score
    if base.task == "translation":
        for role in base.facts.roles:
            own = {
                field.replace("attention", f"attention_by_role.{role}"): value
                for field, value in attention(base, "mva").items()
            }
            found[f"mva, {role} only"] = attention(base, "mha") | own
    return found


@functools.cache
def models(task: str) -> dict[str, dict[str, Fields]]:
    """By regime, the fields of each case that lie over the task's config."""
    base = base_of(task)
    shape = dict.fromkeys(("mha", *HALF_CACHE, *RIVALS, "mhe_add", "mhe_add-2-score-groups", "mva"))
    return {
        "shape": {name: attention(base, name) for name in shape},
        "depth": {name: of_size(base, name, sizes.deeper) for name in ("mha", *HALF_CACHE)},
        "width": {name: of_size(base, name, sizes.wider) for name in (*HALF_CACHE, *NARROW)},
        "heads": heads(base),
        "starts": starts(base),
        "limits": limits(base),
        "flops": {name: of_cost(base, name) for name in (*HALF_CACHE, "mva")},
    }


@functools.cache
def base_of(task: str) -> Config:
    return load_config(str(ROOT / "configs" / SOURCES[task].config))


def stages(task: str) -> list[Stage]:
    """What is measured, the most important first."""
    every = models(task)

    def cases(regime: str, *names: str) -> list[Case]:
        return [Case(regime, name) for name in names or every[regime]]

    if task == LARGE:
        return [
            Stage([*cases("shape", "mha", "mva"), *cases("width", *NARROW)], 3),
            Stage(cases("limits", *WIDE), len(WIDE)),
            Stage(cases("shape", "sha", "gqa", "mhe_mul", "mhe_add"), 3),
        ]

    # What tells most: whether some kind meets the bar, and whether `mva` needs narrow heads to win.
    first = [
        *cases("shape", "mha"),
        *cases("depth", "mha"),
        *cases("width", *NARROW),
        *cases("limits", *WIDE),
    ]

    def rest(regime: str) -> list[Case]:
        return [case for case in cases(regime) if case not in first]

    return [
        Stage(first, len((*NARROW, *WIDE))),
        Stage(rest("depth"), 4),
        Stage(cases("shape", "sha", "mhe_mul", "mhe_add"), 2),
        Stage(cases("shape", "mva", "mhe_add-2-groups", "mhe_add-2-score-groups"), 3),
        Stage(cases("shape", "gqa", "mqa"), 2),
        Stage(cases("shape", *RIVALS), 2),
        Stage(cases("heads"), len(every["heads"])),
        Stage(cases("starts"), 2),
        Stage(rest("limits"), len(rest("limits"))),
        Stage(rest("width"), 4),
        Stage(cases("flops"), 4),
    ]
