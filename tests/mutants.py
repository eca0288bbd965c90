"""Bugs that people make, put in one at a time: does the nearest test see each?

    python tests/mutants.py              all of them
    python tests/mutants.py mask cache   those of files or functions with one of these in their name

Prints a line for each; the exit status is 1 if a test did not see one. All of it happens in a copy
of the tree, after the tests passed there unchanged.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("mhe_jax")
SECONDS = 300


class Mutant(NamedTuple):
    """`old` becomes `new` in what is defined as `where` in `file`, and `tests` must see it.

    `where` is the qualified name of a function (`Mask.block`, `make.step` inside another) or of a
    constant of the module, in which `old` stands once. `tests` are names of test files without
    their folders, each whole or as `test_file.py::test_name`, with blanks between.
    """

    file: str
    where: str
    old: str
    new: str
    tests: str


# File, function and tests; what stands there; and the bug. `\n` is the end of a line.
TABLE = r"""
attention/mask.py: Mask.to_dense: test_mask.py::test_booleans_are_those_of_the_definition
- (key <= last[:, :, None])
+ (key <= last[:, :, None] + 1)
attention/mask.py: Mask.block: test_mask.py
- self.key_lengths - first_key
+ self.key_lengths
attention/cache.py: append: test_attention_cache.py::test_rows_at_places_of_their_own
- positions = index[:, None] +
+ positions = index[:1, None] +
attention/cache.py: positions: test_rotary.py::test_the_cache_counts_positions
- module.get_variable("cache", "cache_index")[:, None]
+ 0
attention/kinds/mhe.py: MHEMulAttention.fold_query: test_kinds.py::test_output_and_gradients
- (1 + e_q) * (1 + e_k)
+ (1 + e_q)
attention/kinds/mva.py: MultiValueAttention.score_bias: test_kinds.py::test_mva_without_its_key_bias_is_one_whose_bias_is_zero
- jnp.zeros_like(memory["value"][..., 0])
+ memory["value"][..., 0]
attention/kind.py: AttentionKind.memory: test_kinds.py::test_output_and_gradients
- self.kv_heads, self.scored_features(D))
+ self.kv_heads, D)
attention/kinds/mhe.py: MHEAddAttention.fold_output: test_kinds.py::test_output_and_gradients
- heads + weight_sum * e_v[None, None]
+ heads + e_v[None, None]
attention/kinds/mva.py: MultiValueAttention._over_heads: test_kinds.py::test_output_and_gradients
- jnp.repeat(x, self.num_heads // self.num_groups, 2)
+ jnp.tile(x, (1, 1, self.num_heads // self.num_groups, 1))
attention/engines/length.py: part_by_part.on: test_length.py::test_split_is_whole
- stop = min(start + size + after, keys)
+ stop = min(start + size - 1 + after, keys)
attention/engines/length.py: part_by_part.on: test_length.py::test_split_is_whole
- Mask.lengths(start + size + after)
+ Mask.lengths(start + after)
attention/engines/length.py: parts_of: test_length.py::test_all_devices_have_as_many_scores_under_a_causal_mask
- return even, last - even
+ return 2 * device, 2 * device + 1
attention/engines/splash.py: _kernel: test_length.py::test_split_is_whole
- positions.astype(np.int32).reshape(-1)
+ np.sort(positions.astype(np.int32), None)
attention/engines/shared/tpu.py: _gradient: test_tpu.py::test_gradients_of_many_keys
- max(first - sizes.after, 0)
+ max(first, 0)
attention/kinds/mla.py: MultiHeadLatentAttention.merge: test_rotary.py::test_every_kind
- heads[..., : self._latents(call.head_features)[1]]
+ heads[..., heads.shape[-1] - self._latents(call.head_features)[1] :]
attention/kinds/mlra.py: MultiHeadLowRankAttention.project_out: test_kinds.py::test_output_and_gradients
- b, self.num_heads, D).sum(2)
+ self.num_heads, b, D).sum(3)
attention/kinds/mlra.py: MultiHeadLowRankAttention.start: test_kinds.py::test_output_and_gradients
- jnp.tile(allowed, (1, self._branches, 1, 1))
+ jnp.repeat(allowed, self._branches, 1)
attention/kinds/ghla.py: GroupedHeadLatentAttention.merge: test_kinds.py::test_output_and_gradients
- jnp.tile(heads, made.shape[-1] // width)
+ jnp.repeat(heads, made.shape[-1] // width, -1)
attention/engines/xla.py: weigh: test_kinds.py::test_every_mask
- if allowed is not None and mask.may_empty_a_row:
+ if False:
attention/engines/xla.py: weigh: test_attention_dropout.py::test_dropout_equals_the_reference_with_the_same_mask
- checkpoint_name(kept, KEPT).astype(dtype) / jnp.asarray(keep, dtype)
+ checkpoint_name(kept, KEPT).astype(dtype)
attention/engines/blocked.py: _local.turn: test_blocked.py::test_every_mask
- i % turns[1] * heads * G
+ i % turns[1] * heads
attention/engines/shared/kernels.py: _scores: test_tpu.py::test_gradients_of_many_queries
- sizes.first + i * sizes
+ i * sizes
attention/engines/shared/hopper_forward.py: _program: test_hopper_forward.py::test_on_a_machine
- sums = [x * of_rows(shrink, x) for x in sums]
+ pass
attention/engines/shared/hopper_backward.py: _program: test_hopper_backward.py::test_on_a_machine
- kept_of(product(of_scores, of_values, nothing), words)
+ product(of_scores, of_values, nothing)
attention/engines/shared/mosaic.py: visible: test_mosaic.py::test_what_kernels_skip
- mask.key_lengths.astype(jnp.int32)[:, None] - 1
+ mask.key_lengths.astype(jnp.int32)[:, None]
attention/cost.py: forward_flops: test_cost.py
- keys * (scored + weighted)
+ keys * (scored + weighted) // 2
attention/nearest/__init__.py: shared_values: test_conversion.py::test_a_kind_that_has_room_takes_another_exactly
- scores.value_inverse @ (U / scale)
+ U / scale
model/layers.py: Layer.__call__: test_layers.py::test_equations
- c.norm_position == "pre"
+ c.norm_position == "post"
model/embeddings.py: Embeddings.attend: test_vocabulary.py::test_padding_changes_no_number
- jnp.where(exists[None, None], logits, -jnp.inf)
+ jnp.where(exists[None, None], logits, 0.0)
model/decoder.py: EncoderDecoder.__call__: test_packed.py::test_packed_is_unpacked
- seen = seen & Mask.segments(target_segments, source_segments)
+ seen = seen
shapeshifter/__init__.py: materialize: test_kronecker.py::test_both_ways_are_the_dense_product
- "kab,kce->acbe"
+ "kab,kce->caeb"
hashformers/__init__.py: MD.buckets: test_hashing.py::test_md_vectors
- (halves[:, 0] << 64) + halves[:, 1]
+ (halves[:, 1] << 64) + halves[:, 0]
tasks/sums.py: label_sums: test_objective.py::test_label_sums
- (1 - label_smoothing) * nats + label_smoothing * spread
+ label_smoothing * nats + (1 - label_smoothing) * spread
training/step.py: make_train_step.step: test_step.py::test_accumulation_is_the_big_batch
- jax.tree.map(lambda g: g / count, gradients)
+ jax.tree.map(lambda g: g / count / A, gradients)
training/optimizer.py: NO_DECAY: test_optimizer.py::test_no_decay_on_biases_norms_and_head_embeddings
- HEAD_EMBEDDING, 
+ 
training/state.py: make_initializer: test_sharding.py
- of_param if leaf.shape == param.shape else whole
+ whole
data/packing.py: Plan.row: test_packing.py::test_a_plan_has_each_example_once
- side="right"
+ side="left"
data/tokens.py: Tokens.__getitem__: test_tokens.py::test_tokens_of_a_text
- start, part = first + len(self._parts[part]), part + 1
+ start, part = stop, part + 1
data/rows.py: blocks.shift: test_batches.py::test_each_token_once_an_epoch
- [Draw.SHIFT, seed, epoch]
+ [Draw.SHIFT, seed]
data/batches.py: Batches._own: test_batches.py::test_training_rows_do_not_depend_on_processes
- numbers[self.process_index * own :][:own]
+ numbers[:own]
data/tokenizer_json.py: JsonTokenizer.offsets: test_tokenizer.py::test_the_tokens_of_a_word_lead_back_to_it
- others[np.searchsorted(others, ends)]
+ ends
tasks/labelled/windows.py: WindowRows.row: test_windows.py::test_windows_hold_the_context
- if start <= first and last < stop and first >= 0:
+ if start <= first and last <= stop and first >= 0:
tasks/metrics.py: translation_scores: test_metrics.py::test_a_translation_that_is_too_short_by_hand
- bleu.corpus_score(hypotheses, [references]).score,\n        "chrf"
+ bleu.corpus_score(references, [hypotheses]).score,\n        "chrf"
evaluation/decoding.py: beam_search.body: test_decoding.py::test_a_beam_that_loses_nothing_equals_brute_force
- cache = reorder_beams(cache, parents, batch_axis)
+ pass
evaluation/decoding.py: beam_search: test_decoding.py::test_a_beam_that_loses_nothing_equals_brute_force
- ((5.0 + np.arange(max_length + 1)) / 6.0)
+ ((6.0 + np.arange(max_length + 1)) / 6.0)
evaluation/generation.py: filter_logits: test_generation.py::test_of_equal_probabilities_the_lower_ids_stay
- (before < top_p)
+ (before <= top_p)
attention/nearest/__init__.py: Heads.widened: test_huggingface.py::test_out_and_in_is_the_same_function
- (width / self.query.shape[-1]) ** 0.5
+ 1.0
interchange/huggingface/llama.py: write: test_huggingface.py::test_out_and_in_is_the_same_function
- if model.rotary_pairs == "interleaved":
+ if False:
training/checkpoint/tensors.py: _digest: test_safetensors.py::test_a_bit_that_has_flipped
- found.update(array.tobytes())
+ pass
tasks/sums.py: criterion: test_objective.py::test_the_best_has_the_least_loss_or_the_highest_score
- else (numbers["loss"],)
+ else (-numbers["loss"],)
"""  # noqa: E501


def _read(table: str) -> Iterator[Mutant]:
    lines = table.replace("\\n", "\0").strip().splitlines()
    for head, old, new in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        file, where, tests = head.split(": ")
        old, new = (text[2:].replace("\0", "\n") for text in (old, new))
        yield Mutant(file, where, old, new, tests)


MUTANTS = tuple(_read(TABLE))


def span(text: str, where: str) -> tuple[int, int]:
    """The first line, from 0, and the line after the last of a definition.

    Raises:
      ValueError: there is none of this name.

    >>> span("A = 1\\nclass B:\\n    def c(self):\\n        pass\\n", "B.c")
    (2, 4)
    """
    scope: ast.AST = ast.parse(text)
    for name in where.split("."):
        found = [node for node in ast.walk(scope) if name_of(node) == name]
        if not found:
            raise ValueError(f"no {where}")
        scope = found[0]
    assert isinstance(scope, ast.stmt)
    return scope.lineno - 1, scope.end_lineno or -1


def name_of(node: ast.AST) -> str | None:
    """The name that a statement defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def mutated(mutant: Mutant, text: str) -> str:
    """The text of the file with the bug.

    Raises:
      ValueError: the piece is not there once; with the bug it is the same program, or none.
    """
    lines = text.splitlines(keepends=True)
    first, end = span(text, mutant.where)
    piece = "".join(lines[first:end])
    if piece.count(mutant.old) != 1:
        raise ValueError(f"{mutant.where} has {mutant.old!r} {piece.count(mutant.old)} times")
    after = "".join([*lines[:first], piece.replace(mutant.old, mutant.new), *lines[end:]])
    if ast.dump(ast.parse(after)) == ast.dump(ast.parse(text)):
        raise ValueError(f"{mutant.new!r} is the same program as {mutant.old!r}")
    return after


def paths(tests: str) -> list[str]:
    """`test_a.py::test_b test_c.py` as arguments of pytest.

    Raises:
      ValueError: there is not one file of that name, or no such test in it.
    """
    found = []
    for test in tests.split():
        name, _, function = test.partition("::")
        files = [*(ROOT / "tests").rglob(name)]
        if len(files) != 1:
            raise ValueError(f"{name} must be one file below tests, not {len(files)}")
        defined = rf"^def {re.escape(function.partition('[')[0])}\("
        if function and not re.search(defined, files[0].read_text(encoding="utf-8"), re.MULTILINE):
            raise ValueError(f"{name} has no {function}")
        found.append(str(files[0].relative_to(ROOT)) + test.removeprefix(name))
    return found


def copy_tree(target: Path) -> None:
    """All files of the tree that git would keep."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


def run(tests: list[str], tree: Path, seconds: float | None = None) -> tuple[int | None, str]:
    """Exit status of pytest, None when its time is over, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-rfE"]
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        # A file that changes twice a second would meet its old bytecode.
        "PYTHONDONTWRITEBYTECODE": "1",
        # What a mutant leaves as it is need not be compiled again.
        "JAX_COMPILATION_CACHE_DIR": str(tree.with_name("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command += ["-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def survives(mutant: Mutant, tree: Path) -> bool:
    """Runs the tests of a mutant in a tree that has it, prints who saw it, and puts all back."""
    file, began = tree / PACKAGE / mutant.file, time.monotonic()
    before = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutated(mutant, before), encoding="utf-8")
        status, printed = run(paths(mutant.tests), tree, SECONDS)
    finally:
        file.write_text(before, encoding="utf-8")
    if status is not None and status > 1:
        raise SystemExit(f"pytest ends with {status}:\n{printed[-4000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+)", printed, re.MULTILINE)
    seen_by = failed[1] if failed else "the clock" if status is None else f"signal {status}"
    outcome = "SURVIVED" if status == 0 else f"killed by {seen_by}"
    seconds = time.monotonic() - began
    print(f"{seconds:4.0f} s  {mutant.file}: {mutant.where}: {outcome}", flush=True)
    return status == 0


def main(words: list[str]) -> int:
    chosen = [
        m for m in MUTANTS if not words or any(word in f"{m.file}: {m.where}" for word in words)
    ]
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        copy_tree(tree)
        status, printed = run(sorted({path for m in chosen for path in paths(m.tests)}), tree)
        if status != 0:
            raise SystemExit(f"without a mutant, pytest ends with {status}:\n{printed[-4000:]}")
        survivors = [m for m in chosen if survives(m, tree)]
    for m in survivors:
        print(f"\n{m.tests} did not see, in {m.file}: {m.where}\n  - {m.old}\n  + {m.new}")
    print(f"\n{len(chosen)} mutants, {len(survivors)} survived")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
