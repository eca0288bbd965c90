"""The kernels' evidence: every step on a CPU; what hangs, fails or is wrong; calls; bytes."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import reports
from experiments.kernels_gpu import decode_bytes, gpu_check, gpu_kernels, gpu_programs, log
from experiments.kernels_gpu.gpu_kernels import Step
from experiments.kernels_gpu.gpu_programs import Comparison, Program
from experiments.kernels_gpu.traffic import traffic
from mhe_jax.analysis import hlo
from mhe_jax.attention import Mask
from mhe_jax.attention.engines import blocked

SHAPE = [jax.ShapeDtypeStruct((3, 5), jnp.float32)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_step_runs_without_a_gpu_and_once(tmp_path, capsys):
    arguments = ["--smoke", "--minutes", "25", "--out", str(tmp_path)]
    assert gpu_kernels.main(arguments) == 0
    found = json.loads((tmp_path / "kernels.json").read_text())["results"]
    assert not [row for row in found if row.get("wrong")]
    assert {row["case"].partition(":")[0] for row in found} == set(gpu_kernels.STEPS)
    for row in found:  # what needs a GPU says so
        assert {"left_out", "runs", "engines", "content"} & set(row)
    text = capsys.readouterr().out
    assert "mha cudnn, mqa cudnn: needs a GPU" in text
    assert "kernels | not measured |" in text
    assert "| random, calls | 4 calls, 0 of 2 cases wrong |" in text
    before = (tmp_path / "kernels.jsonl").read_text()
    assert gpu_kernels.main(arguments) == 0
    assert (tmp_path / "kernels.jsonl").read_text() == before


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """Stands in for steps: what their processes do, and the call that runs them all."""
    path, programs = tmp_path / "kernels.jsonl", {}
    write = "import json, sys, time; file = open(sys.argv[1], 'a')\n"
    write += "def line(**row): file.write(json.dumps(row) + '\\n'); file.flush()\n"
    write += "def done(case): line(begun=case); line(case=case, seconds=1.0)\n"
    write += "known = open(sys.argv[1]).read()\n"

    def child(name, args):
        return [sys.executable, "-c", write + programs[name], str(path)]

    monkeypatch.setattr(gpu_kernels, "child", child)
    monkeypatch.setattr(gpu_kernels, "clocks", lambda: None)

    def run(minutes="1", **given):
        programs.update(given)
        monkeypatch.setattr(
            gpu_kernels, "STEPS", {name: Step(1, lambda smoke: {}) for name in programs}
        )
        status = gpu_kernels.main(["--smoke", "--minutes", minutes, "--out", str(tmp_path)])
        return status, [json.loads(line) for line in path.read_text().splitlines()[1:]]

    return run


HANGS = "line(begun='a: x'); time.sleep(60)"


def test_a_step_that_hangs_is_killed_and_told_and_goes_on_without_the_case(steps, capsys):
    once = f"if 'a: x' in known: done('a: y')\nelse: {HANGS}"
    status, rows = steps(a=once, b="done('b: x')")
    assert status == 1
    ended = [(row["ended"], row["how"]) for row in rows if "ended" in row]
    assert ended == [("a", "hung, or was not done in 3 s"), ("b", "done"), ("a", "done")]
    cases = {row["case"]: row.get("wrong") for row in rows if "seconds" in row}
    assert cases == {"a: x": ["hung, or was not done in 3 s"], "b: x": None, "a: y": None}
    assert "a: x: hung, or was not done in 3 s" in capsys.readouterr().out


@pytest.mark.parametrize(("program", "how"), [(HANGS, "hung, "), ("sys.exit(3)", "died with ")])
def test_a_step_that_never_ends_well_is_tried_twice(program, how, steps):
    for _ in range(2):
        status, rows = steps(a=program)
        assert status == 1
        assert [row["how"][: len(how)] for row in rows if "ended" in row] == [how] * 2


def test_a_step_without_time_is_left_for_the_next_call(steps, capsys):
    assert steps(minutes="0", a="done('a: x')") == (0, [])
    assert "steps left: a" in capsys.readouterr().out
    status, rows = steps(a="done('a: x')")
    assert (status, rows[-1]) == (0, {"ended": "a", "how": "done"})


def test_all_calls_of_a_chain_are_made():
    """None is left out, nor shared with another, though only a number of the last is read."""
    calls = []

    def count(x):
        calls.append(1)
        return np.float32(x)

    def function(x, y):
        return jax.pure_callback(count, y, y), x

    sets = [(jnp.ones((2, 3)), jnp.ones(5)) for _ in range(3)]
    jax.block_until_ready(jax.jit(lambda s: gpu_programs.chained(function, 7, s))(sets))
    assert len(calls) == 21


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, False), (1.2, True), (float("nan"), True)])
def test_a_program_that_differs_from_the_truth_is_named(factor, wrong):
    programs = [
        Program("one", jnp.sin, SHAPE, 7.0, run, lambda x: factor * jnp.sin(x))
        for run in (gpu_programs.FORWARD, gpu_programs.GRADIENTS)
    ]
    comparison = Comparison(True, programs)
    with ThreadPoolExecutor() as pool:
        comparison.begin(pool)
    found = comparison()
    assert [row["flops"] for row in found["results"]] == [7.0, 21.0]
    assert len(found["wrong"]) == (2 if wrong else 0)


# The log of cases.


@pytest.fixture
def again(tmp_path):
    """The log as each call finds it."""
    return lambda: log.Log(tmp_path / "part.jsonl", {})


def cases(ran, *names, then=lambda: None):
    def run(name):
        ran.append(name)
        then()
        return {"found": name}

    return {name: lambda name=name: run(name) for name in names}


def test_what_is_done_is_not_run_again(again):
    ran = []
    log.go_on(cases(ran, "a", "b"), again())
    log.go_on(cases(ran, "a", "b", "c"), again())
    assert ran == ["a", "b", "c"]
    # A line that was cut off as the process was killed.
    path = again().path
    path.write_text(path.read_text()[:-5])
    log.go_on(cases(ran, "a", "b", "c"), again())
    assert ran == ["a", "b", "c", "c"]
    assert [row["found"] for row in again().done()] == ["a", "b", "c"]
    assert again().failed() == []


def test_a_case_that_ends_the_process_twice_is_left(again):
    def killed():
        raise KeyboardInterrupt

    ran = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            log.go_on(cases(ran, "a", "b", then=killed), again())
    log.go_on(cases(ran, "a", "b"), again())
    assert ran == ["a", "a", "b"]
    assert again().failed() == ["a: the process ended in it twice"]


def test_a_case_that_fails_is_named_and_the_others_run(again, monkeypatch):
    def fail():
        raise RuntimeError("no\nroom")

    ran = []
    log.go_on(cases(ran, "a", then=fail) | cases(ran, "b"), again())
    assert ran == ["a", "b"]
    assert again().failed() == ["a: RuntimeError: no room"]
    # Where nothing runs any more it says nothing about the case.
    monkeypatch.setattr(log, "device_is_lost", lambda: True)
    with pytest.raises(RuntimeError):
        log.go_on(cases(ran, "c", then=fail), again())
    assert [row["case"] for row in again().done()] == ["a", "b"]


@pytest.mark.parametrize("program", [gpu_check, gpu_kernels], ids=lambda p: p.__name__)
def test_results_of_another_device_are_not_gone_on_with(tmp_path, capsys, monkeypatch, program):
    monkeypatch.setattr(gpu_check, "cases", lambda *_: {})
    monkeypatch.setattr(gpu_kernels, "STEPS", {})
    arguments = ["--smoke", "--out", str(tmp_path)]
    assert program.main(arguments) == 0
    (path,) = tmp_path.glob("*.jsonl")
    header = json.loads(path.read_text())["header"]
    path.write_text(json.dumps({"header": header | {"device": "another"}}) + "\n")
    with pytest.raises(SystemExit) as stopped:
        program.main(arguments)
    assert stopped.value.code == 2
    assert "another --out" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit) as stopped:
        gpu_kernels.main(["--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# Whether engines are right.


@pytest.mark.parametrize(
    ("found", "ratio"),
    [(1.001, 0.5), (1.0019, 0.95), (1.003, 1.5), (float("nan"), float("inf"))],
    ids=str,
)
def test_errors_are_judged_beside_those_of_the_ordinary_softmax(found, ratio):
    """The ordinary one errs by 0.001, and half a rounding more is allowed; one gradient is 0."""
    truth = {"output": np.full((3, 5), 7.0), "vanishes": np.full(7, 1e-20)}
    ordinary = {"output": truth["output"] * 1.001, "vanishes": np.zeros(7)}
    result = {"output": truth["output"] * found, "vanishes": np.full(7, 1e-6)}
    got, reasons = gpu_check.judged(result, ordinary, truth, "float32")
    assert got == pytest.approx(ratio, rel=1e-3)
    assert [reason.split()[0] for reason in reasons] == (["['output']"] if ratio > 1 else [])
    result["vanishes"] = np.full(7, 0.5)
    _, reasons = gpu_check.judged(result, ordinary, truth, "float32")
    assert "['vanishes']" in {reason.split()[0] for reason in reasons}


def test_the_ordinary_softmax_itself_may_be_wrong():
    truth, wrong = [np.ones(3)], [np.full(3, 1.2)]
    assert gpu_check.judged(wrong, wrong, truth, "bfloat16")[1]


def test_check_sees_an_engine_that_is_wrong(tmp_path, capsys, monkeypatch):
    """One that knows no masks: it is named for those, and for no others; then all is right."""
    arguments = ["--smoke", "--out"]
    real = blocked.attend

    def attend(query, key, value, key_bias, mask, options, *, scale):
        return real(query, key, value, key_bias, Mask(), options, scale=scale)

    with monkeypatch.context() as patch:
        patch.setattr(blocked, "attend", attend)
        assert gpu_check.main([*arguments, str(tmp_path / "wrong")]) == 1
        failed = [line for line in capsys.readouterr().out.splitlines() if "errs by" in line]
        about = {line.split(": ")[0] for line in failed}
        assert about == {f"mha, causal offset, {dtype}" for dtype in ("bfloat16", "float16")}
        assert {line.split(": ")[1] for line in failed} == {"blocked"}
    # What was found stays found.
    assert gpu_check.main([*arguments, str(tmp_path / "wrong")]) == 1
    assert gpu_check.main([*arguments, str(tmp_path / "right")]) == 0
    text = capsys.readouterr().out
    assert "float16 lacks the range" in text
    names = gpu_check.cases(True, ["mosaic"])
    assert {name.split(",")[0] for name in names} == {"mhe_add-shared"}


# Bytes.


KERNELS = """HloModule kernels

%sliced (p: f32[8,5], i: s32[]) -> f32[2,5] {
  %p = f32[8,5]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %view = f32[8,5]{1,0} bitcast(%p)
  %cut = f32[2,5]{1,0} dynamic-slice(%view, %i, %i), dynamic_slice_sizes={2,5}
  ROOT %twice = f32[2,5]{1,0} add(%cut, %cut)
}

%in_place (old: f32[8,5], new: f32[2,5], j: s32[]) -> f32[8,5] {
  %old = f32[8,5]{1,0} parameter(0)
  %new = f32[2,5]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %put = f32[8,5]{1,0} dynamic-update-slice(%old, %new, %j, %j)
}

%chosen (s: f32[], t: f32[]) -> f32[] {
  %s = f32[] parameter(0)
  ROOT %t = f32[] parameter(1)
}

%scattered (kept: f32[8,5], rows: f32[3,5], places: s32[3,1]) -> f32[8,5] {
  %kept = f32[8,5]{1,0} parameter(0)
  %rows = f32[3,5]{1,0} parameter(1)
  %places = s32[3,1]{1,0} parameter(2)
  ROOT %set = f32[8,5]{1,0} scatter(%kept, %places, %rows), update_window_dims={1}, to_apply=%chosen
}

%body (c: (s32[], f32[8,5], bf16[5,7])) -> (s32[], f32[8,5], bf16[5,7]) {
  %c = (s32[], f32[8,5]{1,0}, bf16[5,7]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %x = f32[8,5]{1,0} get-tuple-element(%c), index=1
  %k = bf16[5,7]{1,0} get-tuple-element(%c), index=2
  %part = f32[2,5]{1,0} fusion(%x, %n), kind=kLoop, calls=%sliced
  %gemm = (f32[2,7]{1,0}, s8[4096]{0}) custom-call(%part, %k), custom_call_target="__cublas$gemm"
  %next = f32[8,5]{1,0} fusion(%x, %part, %n), kind=kLoop, calls=%in_place
  ROOT %r = (s32[], f32[8,5]{1,0}, bf16[5,7]{1,0}) tuple(%n, %next, %k)
}

%condition (d: (s32[], f32[8,5], bf16[5,7])) -> pred[] {
  %d = (s32[], f32[8,5]{1,0}, bf16[5,7]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[8,5], b: bf16[5,7], e: f32[3,5], f: s32[3,1]) -> f32[8,5] {
  %a = f32[8,5]{1,0} parameter(0)
  %b = bf16[5,7]{1,0} parameter(1)
  %e = f32[3,5]{1,0} parameter(2)
  %f = s32[3,1]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,5]{1,0}, bf16[5,7]{1,0}) tuple(%zero, %a, %b)
  %loop = (s32[], f32[8,5]{1,0}, bf16[5,7]{1,0}) while(%start), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %last = f32[8,5]{1,0} get-tuple-element(%loop), index=1
  %written = f32[8,5]{1,0} fusion(%last, %e, %f), kind=kInput, calls=%scattered
  ROOT %out = f32[8,5]{1,0} copy(%written)
}
"""


def test_bytes_of_kernels():
    """Slices and updates in place count as such; what a cuBLAS call works in does not."""
    part, index = 4 * 2 * 5, 4
    sliced = part + index + part
    gemm = part + 2 * 5 * 7 + 4 * 2 * 7
    in_place = part + index + part
    scattered = 2 * 4 * 3 * 5 + 4 * 3
    once = scattered + 2 * 4 * 8 * 5
    assert traffic(hlo.Program(KERNELS)) == 4 * (sliced + gemm + in_place) + once


TINY = ["--layers", "1", "--features", "12", "--heads", "3", "--mlp_features", "8"]
TINY += ["--vocabulary", "300", "--length", "6"]


def test_bytes_of_a_decoding_step(tmp_path, monkeypatch):
    """Compiled for a device that is here: it reads all caches and parameters, at each batch."""
    monkeypatch.setattr(reports, "describe_devices", lambda topology: jax.devices()[:1])
    monkeypatch.setattr(reports, "version_of", lambda library: "1")
    file = tmp_path / "bytes.json"
    arguments = ["--kinds", "mha", "mhe_add", "--rows", "2", "4", "--out", str(file)]
    assert decode_bytes.main([*arguments, *TINY]) == 0
    found = json.loads(file.read_text())["results"]
    assert [row["runs_as"] for row in found] == ["xla", "folded on xla"] * 2
    for row, twice in zip(found[:2], found[2:], strict=True):
        assert row["bytes"] > row["cache_bytes"] + row["parameter_bytes"]
        assert twice["cache_bytes"] == 2 * row["cache_bytes"]
        assert row["bytes"] < twice["bytes"] < 2 * row["bytes"]
