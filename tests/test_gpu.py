"""`benchmarks/gpu.py`: what it runs again, when it stops, that it sees a wrong engine; bytes."""

import fcntl
import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import gpu, gpu_check, timing
from benchmarks.traffic import traffic
from mhe_jax.analysis.hlo import Program
from mhe_jax.attention import Mask
from mhe_jax.attention.engines import blocked

ABOUT = {"device": "one", "versions": {"jax": "1"}, "smoke": True}


@pytest.fixture
def log(tmp_path):
    return gpu.Log(tmp_path / "part.jsonl", ABOUT)


def again(log):
    """The log as the next call finds it."""
    return gpu.Log(log.path, ABOUT)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where a test says so."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def cases(ran, *names, then=lambda: None):
    def run(name):
        ran.append(name)
        then()
        return {"found": name}

    return {name: lambda name=name: run(name) for name in names}


def test_what_is_done_is_not_run_again(log):
    ran = []
    assert gpu.go_on(cases(ran, "a", "b"), log, float("inf")) == 0
    assert gpu.go_on(cases(ran, "a", "b", "c"), again(log), float("inf")) == 0
    assert ran == ["a", "b", "c"]
    assert [row["found"] for row in again(log).done()] == ["a", "b", "c"]
    assert again(log).failed() == []


def test_a_case_whose_line_was_cut_off_is_run_again(log):
    ran = []
    gpu.go_on(cases(ran, "a", "b"), log, float("inf"))
    text = log.path.read_text()
    log.path.write_text(text[:-5])
    gpu.go_on(cases(ran, "a", "b"), again(log), float("inf"))
    assert ran == ["a", "b", "b"]
    assert [row["case"] for row in again(log).done()] == ["a", "b"]


def test_a_part_ends_before_its_time(log, clock):
    """None begins that would end too late if it took as long as the longest."""
    ran = []

    def ten_seconds():
        clock.now += 10

    assert gpu.go_on(cases(ran, *"abcd", then=ten_seconds), log, 25.0) == 2
    assert ran == ["a", "b"]
    assert clock.now <= 25
    # The next call knows from the first one how long a case takes.
    assert gpu.go_on(cases(ran, *"abcd", then=ten_seconds), again(log), clock.now + 9) == 2
    assert gpu.go_on(cases(ran, *"abcd", then=ten_seconds), again(log), clock.now + 60) == 0
    assert ran == ["a", "b", "c", "d"]


def test_a_case_that_ends_the_process_twice_is_left(log):
    def killed():
        raise KeyboardInterrupt

    ran = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            gpu.go_on(cases(ran, "a", "b", then=killed), again(log), float("inf"))
    assert gpu.go_on(cases(ran, "a", "b"), again(log), float("inf")) == 0
    assert ran == ["a", "a", "b"]
    assert again(log).failed() == ["a: the process ended in it twice"]


def test_a_case_that_fails_is_named_and_the_others_run(log, monkeypatch):
    def fail():
        raise RuntimeError("no\nroom")

    ran = []
    both = cases(ran, "a", then=fail) | cases(ran, "b")
    assert gpu.go_on(both, log, float("inf")) == 0
    assert ran == ["a", "b"]
    assert log.failed() == ["a: RuntimeError: no room"]
    # Where nothing runs any more it says nothing about the case.
    monkeypatch.setattr(gpu_check, "device_is_lost", lambda: True)
    with pytest.raises(RuntimeError):
        gpu.go_on(cases(ran, "c", then=fail), log, float("inf"))
    assert [row["case"] for row in again(log).done()] == ["a", "b"]


def test_results_of_another_device_are_not_gone_on_with(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "check", (lambda *_: {}, lambda done: []))
    arguments = ["check", "--smoke", "--out", str(tmp_path)]
    assert gpu.main(arguments) == 0
    path = tmp_path / "check.jsonl"
    header = json.loads(path.read_text())["header"]
    path.write_text(json.dumps({"header": header | {"device": "another"}}) + "\n")
    with pytest.raises(SystemExit) as stopped:
        gpu.main(arguments)
    assert stopped.value.code == 2
    assert "another --out" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["check", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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


def test_a_sample_is_long_enough(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)

    def call():
        clock.now += 0.001

    case = timing.Case({"case": "a"}, call)
    assert timing.enough_calls(case) == 8
    (row,) = timing.measure([case], 3, timing.LeftOut())
    assert row["calls"] == 8
    assert row["median_ms"] == pytest.approx(1.0)
    (row,) = timing.measure([case], 3, timing.LeftOut(), calls=2)
    assert row["calls"] == 2


def test_none_measures_while_another_works(tmp_path):
    path = tmp_path / "turns"
    tried = []

    def call():
        with pytest.raises(BlockingIOError):
            fcntl.flock(mine, fcntl.LOCK_SH | fcntl.LOCK_NB)
        tried.append(1)

    timing.take_turns(path)
    with path.open("a") as mine, timing._turns[0]:
        timing.measure([timing.Case({"case": "a"}, call)], 1, timing.LeftOut(), calls=1)
        fcntl.flock(mine, fcntl.LOCK_SH | fcntl.LOCK_NB)
    timing._turns.clear()
    assert tried


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0", "1/-2"])
def test_a_share_is_told(text, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["check", "--smoke", "--out", str(tmp_path), "--share", text])
    assert stopped.value.code == 2
    assert f"is '{text}', takes I/N" in capsys.readouterr().err


@pytest.mark.parametrize("part", gpu.PARTS)
def test_shares_have_each_case_once(part):
    cases = gpu.PARTS[part][0]
    all_of = list(cases(True, None, slice(None)))
    shares = [name for i in (1, 2) for name in cases(True, None, gpu.share(f"{i}/2"))]
    assert sorted(shares) == sorted(all_of)


def test_of_some_engines_only_what_has_them():
    names = gpu_check.cases(True, ["mosaic"])
    assert {name.split(",")[0] for name in names} == {"mhe_add-shared"}


@pytest.mark.whole_run
def test_check_sees_an_engine_that_is_wrong(tmp_path, capsys, monkeypatch):
    """One that knows no masks: it is named for those, and for no others; then all is right."""
    arguments = ["check", "--smoke", "--out"]
    real = blocked.attend

    def attend(query, key, value, key_bias, mask, options, *, scale):
        return real(query, key, value, key_bias, Mask(), options, scale=scale)

    with monkeypatch.context() as patch:
        patch.setattr(blocked, "attend", attend)
        assert gpu.main([*arguments, str(tmp_path / "wrong")]) == 1
        failed = capsys.readouterr().out.partition("0 are left\n")[2].splitlines()
        about = {line.split(": ")[0] for line in failed}
        assert about == {f"mha, causal offset, {dtype}" for dtype in ("bfloat16", "float16")}
        assert {line.split(": ")[1] for line in failed} == {"blocked"}
    # What was found stays found.
    assert gpu.main([*arguments, str(tmp_path / "wrong")]) == 1
    assert gpu.main([*arguments, str(tmp_path / "right")]) == 0
    text = capsys.readouterr().out
    assert "8 cases are done, 0 are left" in text
    assert "xla: float16 lacks the range" in text
    assert "cudnn: needs an NVIDIA GPU" in text or jax.default_backend() == "gpu"


@pytest.mark.whole_run
@pytest.mark.parametrize("part", ["cores", "steps", "decode"])
def test_a_part_is_measured(part, tmp_path, capsys):
    arguments = [part, "--smoke", "--out", str(tmp_path)]
    assert gpu.main([*arguments, "--minutes", "0"]) == 0
    assert "0 cases are done" in capsys.readouterr().out
    assert gpu.main(arguments) == 0
    found = json.loads((tmp_path / f"{part}.json").read_text())
    page = (tmp_path / f"{part}.md").read_text()
    names = list(gpu.PARTS[part][0](True, None, slice(None)))
    assert [row["case"] for row in found["results"]] == names
    for row in found["results"]:
        assert row["content"]["results"]
        assert f"`{row['content']['header']['command']}`" in page
        assert "mhe_add" in json.dumps(row["content"]["results"])
    assert "| median ms |" in page
    before = (tmp_path / f"{part}.jsonl").read_text()
    assert gpu.main(arguments) == 0
    assert (tmp_path / f"{part}.jsonl").read_text() == before


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
    assert traffic(Program(KERNELS)) == 4 * (sliced + gemm + in_place) + once
