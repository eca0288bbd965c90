"""Kinds that can be computed in several forms: the same function of the same parameters."""

import dataclasses
from typing import ClassVar

import jax

from mhe_jax.attention import engines
from mhe_jax.attention.module import Attention, Call
from mhe_jax.config import FORMS_OF_KINDS, InputError


class AttentionInForms(Attention):
    """Attention whose heads share projections, so that there are several ways to compute it.

    Attributes beyond `Attention`:
      form: 'auto' takes the first of `forms` that neither refuses the call nor is slower for it; a
        form given by name runs or raises. 'auto' takes 'shared' for mva, and for mhe_add from 32
        queries on, unless cuDNN runs 'folded' with no mask, a causal one or lengths of keys and no
        mesh splits the heads. Of 'shared' with several queries `jax.jvp`, `jax.jacfwd` and
        `jax.linearize` raise TypeError; `jax.grad` works, and every mode on a gradient.

    Raises:
      ValueError: a form that the kind does not have or that refuses the call.
    """

    form: str = "auto"

    # Calls with fewer queries are slower as 'shared', which makes its columns in each call.
    shared_queries: ClassVar[int] = 1
    # Whether `normalize_qk` is a norm of the keys of heads, which other forms do not make.
    norms_heads: ClassVar[bool] = True

    @property
    def forms(self) -> tuple[str, ...]:
        """Its forms from fast to slow; the last takes every call."""
        return FORMS_OF_KINDS[self.kind]

    def check(self, head_features: int, features: int) -> None:
        super().check(head_features, features)
        if self.form not in ("auto", *self.forms):
            raise InputError(f"form={self.form!r} is not one of auto, {', '.join(self.forms)}")
        if self.form != "auto":
            self.resolve(Call(head_features, features))

    def refusal_of(self, form: str, call: Call) -> str | None:
        """Why `form` cannot compute `call`, or None."""
        if form != "materialized" and self.normalize_qk and self.norms_heads:
            return "normalize_qk is not possible: keys are not made; use 'materialized' or 'auto'"
        if form == "shared":
            return engines.shared_refusal(call.dtype, call.mask, call.options)
        return None

    def is_slower(self, form: str, call: Call) -> bool:
        """Whether 'auto' leaves a `call` that `form` can do to a later form."""
        # An engine that only 'shared' has gives its own reason where it cannot do the call.
        if form != "shared" or self.engine not in ("auto", *engines.LADDER):
            return False
        # It takes longest to compile.
        if call.queries < self.shared_queries or call.initializing:
            return True
        if self.engine != "auto" or "folded" not in self.forms:
            return False
        # 'folded' by cuDNN was faster: see experiments/kernels_gpu.
        shape = call.queries, call.head_features
        return engines.cudnn.runs_by_itself(call.dtype, *shape, call.mask, call.options)

    def start(self, call: Call) -> Call:
        return dataclasses.replace(call, form=self.resolve(call))

    def resolve(self, call: Call) -> str:
        """The form that computes `call`."""
        if self.form != "auto":
            if reason := self.refusal_of(self.form, call):
                raise InputError(f"form={self.form!r} cannot do this call: {reason}")
            return self.form
        for form in self.forms[:-1]:
            own = engines.OF_FORMS.get(form)
            elsewhere = own is not None and self.engine not in ("auto", *own)
            passed = elsewhere or self.is_slower(form, call)
            if not passed and self.refusal_of(form, call) is None:
                return form
        return self.forms[-1]


class AttentionInGroups(AttentionInForms):
    """Attention of groups of heads, each group with one query and key projection.

    Attributes beyond `AttentionInForms`:
      num_groups: G shared query and key projections, each for H/G heads; 1 is one for all heads.

    Raises:
      ValueError: a number of groups that does not divide the heads.
    """

    num_groups: int = 1

    def project_groups(self, name: str, x: jax.Array, width: int) -> jax.Array:
        """`x W` with a kernel [M, width], or [M, G, width] for several groups: [B, T, G, width]."""
        projection = self._projection(name)
        if self.num_groups == 1:
            return projection(x, (width,), ("embed", "head_features"))[:, :, None]
        return projection(x, (self.num_groups, width), ("embed", "groups", "head_features"))


class AttentionOverCache(AttentionInForms):
    """Attention with a form, the first of `forms`, that makes no keys and values of heads.

    That form takes more operations for each pair of query and key, and none for a key alone, so
    'auto' takes it for few queries over a cache.

    Raises:
      ValueError: that form with `normalize_qk`, whose LayerNorm is over the keys of heads.
    """

    def core_of(self, form: str, head_features: int) -> tuple[int, int, int]:
        """Multiply-adds for a query's scores of a key, for its sums over the value, and to make the
        key's heads."""
        raise NotImplementedError

    def core(self, head_features: int) -> tuple[int, int, int]:
        scored, weighted, _ = self.core_of(self.form_of_one, head_features)
        return scored, weighted, 0

    def is_slower(self, form: str, call: Call) -> bool:
        if form == "materialized":
            return False
        *of_query, _ = self.core_of(form, call.head_features)
        *of_heads, made = self.core_of("materialized", call.head_features)
        # For so many keys that the cost of each query by itself is negligible.
        return not self.decode or call.queries * (sum(of_query) - sum(of_heads)) >= made

    @property
    def form_of_one(self) -> str:
        """The form that computes a call of one query."""
        if self.form != "auto":
            return self.form
        return self.forms[0] if self.decode and not self.normalize_qk else "materialized"
