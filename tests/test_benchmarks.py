"""The benchmark commands run and write what they promise; how fast is not asked."""

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import (
    attention,
    command_line,
    cycles,
    decode,
    decode_bytes,
    fit,
    gpu,
    memory,
    peers,
    reports,
    schedule,
    steps,
    timing,
    train_step,
)
from mhe_jax.attention import KINDS
from mhe_jax.config import FORMS_OF_KINDS, AttentionConfig, Config, DataConfig, ModelConfig
from mhe_jax.tasks import TASKS

pytestmark = pytest.mark.whole_run

SHAPE = ["--layers", "1", "--features", "12", "--heads", "3", "--mlp_features", "8"]
SHAPE += ["--vocabulary", "300", "--length", "6", "--rounds", "2"]
ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "benchmarks" / "records").glob("*.json"))
COMMANDS = (attention, train_step, decode, memory)
CYCLES = ("v5e", "v5e_wide", "v6e", "v6e_wide", "v5e_causal", "v6e_causal")


def result(command, capsys, tmp_path: Path, *arguments: str) -> dict:
    """The JSON of a run; its printed text is under 'text'."""
    file = tmp_path / "result.json"
    assert command.main([*arguments, "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    text = capsys.readouterr().out
    for needed in ("device", "versions", "dtype", "command", "date"):
        assert found["header"][needed]
    assert found["header"]["date"] in text
    assert "another model than mhe_add" in text
    for row in found["results"]:
        assert row["rounds"] == 2
        assert row["quartiles_ms"][0] <= row["median_ms"] <= row["quartiles_ms"][1]
    return {**found, "text": text}


def test_attention(capsys, tmp_path):
    arguments = ["--kinds", "mha", "mhe_add", "--forms", "shared", "--causal", "--plot"]
    arguments += ["--lengths", "6", "--tokens", "12", "--heads", "3", "--head_features", "4"]
    found = result(attention, capsys, tmp_path, *arguments, "--rounds", "2")
    cases = {(row["part"], row["run"], case) for row in found["results"] for case in row["cases"]}
    for run in ("forward", "with gradients"):
        for case in ("mha xla", "mhe_add shared xla", "plain XLA MHA", "jax.nn xla"):
            assert ("core", run, case) in cases
        for case in ("mha xla", "mhe_add shared xla", "flax MultiHeadDotProductAttention"):
            assert ("layer", run, case) in cases
    for row in found["results"]:
        assert row["memory_bytes"] is None or row["memory_bytes"] > 0
        assert row["flops"] > 0
        assert row["speed"] > 0
    left_out = [name for names in found["left_out"].values() for name in names]
    assert "Pallas flash, TPU" in left_out
    assert tmp_path.joinpath("result.png").stat().st_size > 0


def test_every_kind_and_form_is_measured():
    found = command_line.variants(KINDS, command_line.FORMS, 12)
    assert {fields["kind"] for fields in found.values()} == set(KINDS)
    assert [name for name in found if name.startswith("mhe_add")] == [
        f"mhe_add {form}" for form in command_line.FORMS if form in FORMS_OF_KINDS["mhe_add"]
    ]
    assert found["gqa num_kv_heads=4"] == {"kind": "gqa", "num_kv_heads": 4}
    assert "mva folded" not in found
    assert list(command_line.variants(["mhe_add"], ["auto"], 12)) == ["mhe_add"]


def test_peaks_are_no_rows():
    """Each of the fastest call; shares are of that of XLA."""
    ms = {timing.PEAK: [4.0, 2.0], timing.TORCH_PEAK: [2.0, 1.0], "mha": [8.0, 4.0]}
    measured = [
        {"case": case, "flops": 6e6, "fastest_ms": fast, "flops_per_second": 6e9 / median}
        for case, (median, fast) in ms.items()
    ]
    peak, (mha,) = reports.split_peak(measured)
    assert (mha["case"], mha["of_peak"]) == ("mha", 0.25)
    assert reports.peak_line(peak) == "peak 3 GFLOP/s, of PyTorch 6"


def test_attention_counts_operations():
    B, T, H, D = 2, 5, 3, 7
    heads, one = (B, T, H, D), (B, T, 1, D)
    mha = peers.core_flops({"query": heads, "key": heads, "value": heads}, causal=False)
    assert mha == 4 * B * T * T * H * D
    shared = {"query": one, "key": one, "value": one, "key_bias": (B, T, H)}
    assert peers.core_flops(shared, causal=False) == 2 * B * T * T * (D + H * D + H)
    assert peers.core_flops(shared, causal=True) == B * T * (T + 1) * (D + H * D + H)


MEMORY = ["--lengths", "6", "64", "--heads", "3", "--head_features", "4"]


def test_memory(capsys, tmp_path):
    """Both runs at both lengths, and what share of mha's it is."""
    file = tmp_path / "memory.json"
    arguments = ["--kinds", "mha", "mhe_add", "--forms", "auto", "folded", "--causal", *MEMORY]
    assert memory.main([*arguments, "--plot", "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["left_out"] == {}
    rows = {(r["case"], r["run"], r["length"]): r for r in found["results"]}
    assert len(rows) == 3 * 2 * 2
    for (case, run, length), row in rows.items():
        mha = rows["mha", run, length]
        assert row["of_mha"] == row["memory_bytes"] / mha["memory_bytes"]
        # At least the output, float32.
        assert row["memory_bytes"] >= 4 * length * 12
        if run == "with gradients":
            assert row["memory_bytes"] > rows[case, "forward", length]["memory_bytes"]
    # Few queries are folded.
    assert rows["mhe_add", "forward", 6]["runs_as"] == "folded on xla"
    assert rows["mhe_add", "forward", 64]["runs_as"] == "shared on xla"
    assert rows["mhe_add folded", "forward", 6]["runs_as"] == "folded on xla"
    text = capsys.readouterr().out
    assert "| mhe_add (folded on xla or shared on xla) |" in text
    assert "memory is compared here, not quality" in text
    assert found["header"]["date"] in text
    assert file.with_suffix(".png").stat().st_size > 0


@pytest.mark.libtpu
def test_memory_of_a_chip_that_is_not_here(tmp_path):
    """In a process of its own: libtpu reads the environment once."""
    file = tmp_path / "memory.json"
    arguments = ["--kinds", "mha", "mhe_add", "--forms", "auto", "--lengths", "256"]
    arguments += ["--heads", "2", "--head_features", "64", "--dtype", "bfloat16"]
    done = subprocess.run(
        [sys.executable, "benchmarks/memory.py", *arguments, "--topology", "v5e:2x2"]
        + ["--out", str(file)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert found["header"]["backend"] == "tpu"
    assert "one chip of v5e:2x2, ahead of time" in done.stdout
    (shared,) = {r["runs_as"] for r in found["results"] if r["kind"] == "mhe_add"}
    assert shared == "shared on pallas"
    assert len(found["results"]) == 4


def test_train_step(capsys, tmp_path):
    arguments = ["--kinds", "mhe_add", "--forms", "shared", "--batch", "2", *SHAPE]
    found = result(train_step, capsys, tmp_path, *arguments, "--attention_dropout", "0.1")
    cases = {(row["task"], row["case"]) for row in found["results"]}
    flax = "flax MultiHeadDotProductAttention"
    for task, sublayers, tokens in (("mlm", 1, 12), ("translation", 3, 24)):
        assert {(task, flax), (task, "mhe_add shared")} <= cases, found["left_out"]
        rows = [row for row in found["results"] if row["task"] == task]
        assert {row["tokens"] for row in rows} == {tokens}
        # Flax's attention has the parameters of ours of kind mha.
        (peer,) = (row for row in rows if row["case"] == flax)
        assert peer["parameters"]["attention"] == 4 * 12**2 * sublayers
    assert "FLOPs of a step" in found["text"]
    for task in ("mlm", "translation"):  # whose models may be of other widths
        assert f"\n{task}: MHA, ours and any peer's, is another model than mhe_add" in found["text"]


def test_cycles_of_a_length_of_which_nothing_compiles(tmp_path, monkeypatch):
    """Do not take the rows of another length with them."""
    device = types.SimpleNamespace(device_kind="a chip")
    monkeypatch.setattr(cycles, "describe_devices", lambda topology: [device])

    def measure(args, case, length, blocks):
        count = {"mha splash": None, "mha tokamax": 600, "sha splash": 300}.get(case, 200)
        count = None if length == 512 else count
        row = {"case": case, "length": length, "blocks": blocks, "matrix_units": []}
        return row | dict.fromkeys(("forward", "backward", "rest", "cycles"), count)

    monkeypatch.setattr(reports, "version_of", lambda library: "1")
    monkeypatch.setattr(cycles, "measure", measure)
    file = tmp_path / "cycles.json"
    assert cycles.main(["--lengths", "256", "512", "--out", str(file)]) == 0
    found = json.loads(file.read_text())["results"]
    assert [row["fewer"] for row in found] == [None, 1, 2, 3, *[None] * 4]


def test_cycles_are_compared_with_the_better_peer_by_its_best_blocks(tmp_path, monkeypatch):
    device = types.SimpleNamespace(device_kind="a chip")
    monkeypatch.setattr(cycles, "describe_devices", lambda topology: [device])

    def measure(args, case, length, blocks):
        count = {"mha splash": 9000, "mha tokamax": 8096, "sha splash": 6000}.get(case, 1000)
        count = None if blocks[:1] == (512,) else count - sum(blocks[1:2])
        row = {"case": case, "length": length, "blocks": blocks, "matrix_units": []}
        return row | dict.fromkeys(("forward", "backward", "rest", "cycles"), count)

    monkeypatch.setattr(reports, "version_of", lambda library: "1")
    monkeypatch.setattr(cycles, "measure", measure)
    file = tmp_path / "cycles.json"
    assert cycles.main(["--lengths", "4096", "--out", str(file)]) == 0
    found = {row["case"]: row for row in json.loads(file.read_text())["results"]}
    assert found["mha splash"]["blocks"] == [1024, 4096, 1024]
    assert found["mhe_add shared"]["fewer"] == 4


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(cycles, "TOKAMAX", False)
    args = types.SimpleNamespace(batch=2, heads=3, head_features=8, causal=False)
    row = cycles.measure(args, "mha tokamax", 512, (512, 512, 512)) | {"fewer": None}
    assert cycles.COLUMNS["times fewer"](row) == "not installed: needs Python 3.12 and tokamax"
    assert cycles.COLUMNS["all"](row) == "-"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4)])
def test_blocks_that_a_mask_leaves_whole_or_cuts(causal, sizes):
    queries, keys = sizes
    seen = np.tril(np.ones((16, 16), bool)) | (not causal)
    parts = seen.reshape(16 // queries, queries, 16 // keys, keys).swapaxes(1, 2)
    whole, some = parts.all((2, 3)).sum(), parts.any((2, 3)).sum()
    for by_keys, rows in ((False, 16 // queries), (True, 16 // keys)):
        found = schedule.blocks_of(3, 16, sizes, causal, by_keys=by_keys)
        assert found == (3 * whole, 3 * (some - whole), 3 * rows)


def test_cycles_of_a_kernel():
    """What all steps have, what blocks have that are not hidden, and what ends a row of them."""
    blocks = schedule.Blocks(whole=7, cut=5, rows=4)
    kernel = schedule.Kernel("k", 18, 10, blocks=(), ends=100, matrix_units=0.5)
    assert kernel.cycles(blocks) == 180 + 400
    assert kernel._replace(blocks=(1000,)).cycles(blocks) == 180 + 400 + 12_000
    assert kernel._replace(blocks=(1000, 2000)).cycles(blocks) == 180 + 400 + 17_000
    assert kernel._replace(steps=None).cycles(blocks) == 120 + 400


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_the_head_of_hugging_face_works_at_masked_tokens_alone():
    torch = pytest.importorskip("torch", reason="needs torch and transformers: see `make peers`")
    pytest.importorskip("transformers", reason="needs torch and transformers: see `make peers`")
    model = ModelConfig(
        vocabulary_size=50,
        features=12,
        mlp_features=20,
        num_layers=1,
        attention=AttentionConfig(num_heads=3),
    )
    config = Config(task="mlm", model=model, data=DataConfig(sequence_length=8, mask_rate=0.4))
    made, logits_of, inputs, labels = steps.bert(config, steps.random_batch(config, 2))
    inputs = {name: torch.from_numpy(x).long() for name, x in inputs.items()}
    with torch.no_grad():
        some = logits_of(made.eval(), **inputs)
        all_of_them = made(inputs["tokens"]).logits
    assert some.shape == (*labels.shape, 50)
    for row, places in enumerate(inputs["positions"]):
        torch.testing.assert_close(some[row], all_of_them[row, places])


def test_decode(capsys, tmp_path):
    arguments = ["--kinds", "mha", "mhe_add", "--beams", "1", "2", *SHAPE]
    found = result(decode, capsys, tmp_path, *arguments, "--min_batch", "2", "--max_batch", "2")
    rows = {(row["case"], row["beams"]): row for row in found["results"]}
    assert set(rows) == {(case, beams) for case in ("mha", "mhe_add") for beams in (1, 2)}
    for (case, beams), row in rows.items():
        mha = rows["mha", beams]["cache_bytes"]
        # Two rows of 6 places, keys and values of 3 heads of 4 in float32.
        assert mha["self"] == beams * 2 * 6 * 2 * 3 * 4 * 4
        if case == "mhe_add":
            assert row["cache_bytes"] == {name: size // 3 for name, size in mha.items()}
        assert row["tokens_per_second"] > 0


def test_bytes_of_a_decoding_step(tmp_path, monkeypatch):
    """Compiled for a device that is here: it reads all caches and parameters, at each batch."""
    monkeypatch.setattr(decode_bytes, "describe_devices", lambda topology: jax.devices()[:1])
    monkeypatch.setattr(reports, "version_of", lambda library: "1")
    file = tmp_path / "bytes.json"
    arguments = ["--kinds", "mha", "mhe_add", "--rows", "2", "4", "--out", str(file)]
    assert decode_bytes.main([*arguments, *SHAPE[:-2]]) == 0
    found = json.loads(file.read_text())["results"]
    assert [row["runs_as"] for row in found] == ["xla", "folded on xla"] * 2
    for row, twice in zip(found[:2], found[2:], strict=True):
        assert row["bytes"] > row["cache_bytes"] + row["parameter_bytes"]
        assert twice["cache_bytes"] == 2 * row["cache_bytes"]
        assert row["bytes"] < twice["bytes"] < 2 * row["bytes"]


def test_decode_doubles_the_batch_until_a_kind_fails(capsys, tmp_path, monkeypatch):
    def case(self, batch, beams):
        if self.name == "mha" and batch > 2:
            raise MemoryError("out of memory")
        sizes = {"self": batch, "cross": batch}
        about = {"case": self.name, "search": "greedy", "batch": batch, "cache_bytes": sizes}
        return timing.Case(about, lambda: None)

    monkeypatch.setattr(decode.Decoding, "case", case)
    arguments = ["--kinds", "mha", "mhe_add", "--beams", "1", "--max_batch", "9", *SHAPE]
    found = result(decode, capsys, tmp_path, *arguments)
    assert found["largest_batch"] == {"greedy, mha": 2, "greedy, mhe_add": 8}
    assert found["left_out"] == {"MemoryError: out of memory": ["mha, 4 rows"]}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
@pytest.mark.parametrize(
    "arguments", [["--kind", "mha"], ["--kinds", "no"], ["--heads", "0"]], ids=" ".join
)
def test_a_wrong_flag_is_one_line(command, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "arguments", "named"),
    [
        (attention, ["--tokens", "10", "--lengths", "4"], "--tokens"),
        (attention, ["--plot"], "--out"),
        (train_step, ["--features", "10", "--heads", "3"], "num_heads"),
        (decode, ["--min_batch", "4", "--max_batch", "2"], "--max_batch"),
    ],
)
def test_flags_that_do_not_go_together(command, arguments, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_page_has_the_tables_of_a_record(record: Path):
    """What is printed of a measurement is what was measured, and the command stands beside it."""
    found = json.loads(record.read_text(encoding="utf-8"))
    pages = [
        (ROOT / page).read_text(encoding="utf-8")
        for page in ("benchmarks/RESULTS.md", "docs/fit.md")
    ]
    command = found["header"]["command"]
    assert command.endswith(f"--out benchmarks/records/{record.name}")
    (page,) = [page for page in pages if command in page]
    program = Path(command.split()[1]).stem
    if program == "memory":
        lengths = sorted({row["length"] for row in found["results"]})
        for run in memory.RUNS:
            assert memory.table(found["results"], run, lengths) in page
        return
    columns = importlib.import_module(f"benchmarks.{program}").COLUMNS
    for table in reports.tables(found["results"]):
        assert reports.table(columns, table) in page


def test_a_page_has_the_tables_of_what_fits():
    """A file for each cell, of one command that goes on where it stopped."""
    cells = [json.loads(p.read_text()) for p in (ROOT / "benchmarks/records/fit").glob("*.json")]
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    found = [part for part in fit.tables(cells) if part.startswith("| ")]
    assert found
    for table in found:
        assert table in page
    for cell in cells:
        assert f"jax {cell['jax']}, libtpu {cell['libtpu']}, {cell['date']}" in page


def test_no_model_is_traced_while_the_layers_are_those_of_flax(monkeypatch):
    """Nor are its FLOPs counted, which make its attention again."""
    seen = []

    class Task:
        def __getattr__(self, name):
            seen.append((name, steps.TRACING.locked()))
            return getattr(TASKS["mlm"], name)

    monkeypatch.setattr(steps, "TASKS", {"mlm": Task()})
    shape = ["--length", "6", "--batch", "2", "--layers", "1", "--features", "12", "--heads", "3"]
    args, configs = train_step.parse(
        ["--tasks", "mlm", *shape, "--mlp_features", "8", "--vocabulary", "300"]
    )
    steps.our_step("mha", configs["mlm"], args.batch)
    assert {"model", "initializer", "sums", "step_flops"} == {name for name, _ in seen}
    assert all(locked for _, locked in seen)


@pytest.mark.parametrize("name", ["check", "cores", "steps", "decode"])
def test_a_page_has_the_tables_of_a_gpu(name):
    found = json.loads((ROOT / f"benchmarks/records/gpu/{name}.json").read_text())
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert {row["case"] for row in found["results"] if row.get("wrong")} == set()
    about, (_, tables) = found["header"], gpu.PARTS[name]
    assert about["device"] in page
    assert about["date"].split()[0] in page
    written = [part for part in tables(found["results"]) if part.startswith("| ")]
    # That of the fastest engines says again what the others say.
    for table in written[name == "cores" :]:
        assert table in page
    for row in found["results"]:
        if "content" in row:
            assert row["content"]["header"]["command"] in page
            for why, names in row["content"]["left_out"].items():
                assert f"Left out: {', '.join(names)}: {why}." in page


def read(name: str) -> list[dict]:
    """The results of a record."""
    return json.loads((ROOT / f"benchmarks/records/{name}.json").read_text())["results"]


def page(name: str) -> str:
    """Its words, however the lines break."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def core_ratios(record: str) -> dict[tuple[int, str], list[str]]:
    """By length and run, times of others over that of `mhe_add`, and PyTorch's over `mha`'s."""
    ratios = {}
    for length, run in itertools.product((512, 1024), ("forward", "with gradients")):
        times = {
            case: row["median_ms"]
            for row in read(record)
            if (row["length"], row["run"]) == (length, run)
            for case in row["cases"]
        }
        shared = times["mhe_add shared xla"]
        mha, sha = (
            min(times[f"{kind} {e}"] for e in ("blocked", "xla")) for kind in ("mha", "sha")
        )
        peers = [times[name] for name in ("PyTorch SDPA", "plain XLA MHA", "jax.nn xla")]
        found = [time / shared for time in (mha, *peers, sha)] + [peers[0] / mha]
        ratios[length, run] = [f"{x:.2f}" for x in found]
    return ratios


def test_pages_have_the_ratios_of_the_records():
    """What is said of two rows of a table is their quotient."""
    ratios, on_xeon = core_ratios("core_cpu"), core_ratios("core_cpu_xeon")
    for found in (ratios, on_xeon):
        rows = [f"| T = {T}, {run} | {' | '.join(row)} |" for (T, run), row in found.items()]
        assert " ".join(rows) in page("benchmarks/RESULTS.md")
    xeon = " and ".join(on_xeon[1024, run][1] for run in ("forward", "with gradients"))
    for name in ("README.md", "docs/kinds.md"):
        for run, says in (
            ("forward", "times as long as"),
            ("with gradients", "times as long with"),
        ):
            assert f"{ratios[1024, run][1]} {says}" in page(name)
        assert f"PyTorch takes {xeon} times as long" in page(name)
    sha = " and ".join(ratios[1024, run][4] for run in ("forward", "with gradients"))
    assert f"{sha} of it" in page("README.md")
    assert f"{sha} of it" in page("docs/kinds.md")

    still = []
    for record in CYCLES:
        for _, own in itertools.groupby(read(f"cycles_{record}"), key=lambda row: row["length"]):
            fewer = {row["case"]: row["fewer"] for row in own}
            still.append(fewer["sha splash"] / fewer["mhe_add shared"])
    said = f"`sha` takes {min(still):.1f} to {max(still):.1f} times fewer cycles still"
    assert said in page("docs/fit.md")

    rows, peers, own, shas = [], {512: [], 1024: []}, [], []
    for name, length, layers in (
        ("512", 512, "scanned"),
        ("1024", 1024, "scanned"),
        ("512_unrolled", 512, "unrolled"),
        ("1024_unrolled", 1024, "unrolled"),
    ):
        times = {r["case"]: r["median_ms"] for r in read(f"train_step_cpu_{name}")}
        others = ("mha", steps.FLAX, "Hugging Face BERT, SDPA", "sha")
        found = [times[other] / times["mhe_add"] for other in others]
        rows.append(f"| T = {length}, layers {layers} | {' | '.join(f'{x:.2f}' for x in found)} |")
        peers[length] += [times[other] for other in others[1:3]]
        own.append((length, times["mhe_add"]))
        shas.append(f"{found[3]:.2f}")
    assert " ".join(rows) in page("benchmarks/RESULTS.md")
    # The fastest peer of a length, whichever way its layers are run.
    best = [f"{min(peers[length]) / time:.2f}" for length, time in own]
    said = "reaches {0} scanned and {2} unrolled at T = 512, and {1} and {3} at T = 1024"
    assert said.format(*best) in page("benchmarks/RESULTS.md")
    said = (
        "was {0} to {2} times as fast as that of the fastest peer at T = 512 and {1} to {3} times"
    )
    assert said.format(*best) in page("docs/kinds.md")
    assert f"`sha` took {min(shas)} to {max(shas)} of its time" in page("docs/kinds.md")

    int8, *_, ours = sorted(read("serving_cpu"), key=lambda row: row["median_ms"])
    assert f"{int8['speed']:.2f} times as many in int8" in page("docs/export.md")
    assert f"with {ours['bleu'] - int8['bleu']:.2f} less" in page("docs/export.md")


# As docs/fit.md calls those of benchmarks/fit.py.
SHAPES = {
    "bert-base": "BERT-base",
    "bert-large": "BERT-large",
    "transformer-big": "Transformer-big",
}


def test_pages_have_the_bytes_and_cycles_of_the_records():
    """Tables and sentences that tell a part of what a record has."""
    found = {}
    for path in (ROOT / "benchmarks/records/fit").glob("search-*.json"):
        cell = json.loads(path.read_text())
        rows, engine = cell["batch"]["rows_per_chip"], *cell["attention"].values()
        rates = found.setdefault((SHAPES[cell["shape"]], cell["kind"]), {})
        rates[cell["attention_dropout"]] = f"{rows} ({engine})"
    for (shape, kind), rates in found.items():
        row = [rates.get(rate, "not measured") for rate in fit.RATES]
        assert f"| {shape} | `{kind}` | {' | '.join(row)} |" in page("docs/fit.md")
    rows = {
        (shape, kind, rate): int(cell.split()[0])
        for (shape, kind), rates in found.items()
        for rate, cell in rates.items()
    }
    for kind, rate in itertools.product(("mhe_add", "sha"), fit.RATES):
        more = [rows[shape, kind, rate] / rows[shape, "mha", rate] for shape in SHAPES.values()]
        assert "{:.2f}, {:.2f} and {:.2f}".format(*more) in page("docs/fit.md")

    cpu, chip = (
        {row["case"]: row["memory_bytes"] / 1e6 for row in rows}
        for rows in (
            [r for r in read(name) if (r["length"], r["run"]) == (length, "with gradients")]
            for name, length in (("memory_cpu", 2048), ("memory_v5e", 4096))
        )
    )
    for kind, size in chip.items():
        assert f"| `{kind}` | {cpu[kind]:.1f} | {size:.1f} |" in page("docs/which_kind.md")

    fewer, busy = {}, {}
    for record in CYCLES:
        for row in read(f"cycles_{record}"):
            fewer.setdefault((record, row["case"]), []).append(row["fewer"])
            if row["case"] == "mhe_add shared":
                busy[record] = [f"{100 * share:.0f} %" for share in row["matrix_units"]]
    for text in (
        "{:.2f} and {:.2f} times fewer cycles".format(*fewer["v5e", "mhe_add shared"]),
        "{:.2f} times fewer under a causal mask".format(*fewer["v5e_causal", "mhe_add shared"]),
        "{:.2f} times fewer with 8 heads of 128".format(*fewer["v5e_wide", "mhe_add shared"]),
        "`sha`, the control, takes {:.1f} and {:.1f}, and {:.1f} times fewer".format(
            *fewer["v5e", "sha splash"], *fewer["v5e_wide", "sha splash"]
        ),
    ):
        assert text in page("docs/kinds.md")
    for text in (
        "{} of the forward kernel's cycles and {} of the backward one's on v5e".format(
            *busy["v5e"]
        ),
        "on v6e for {} and {}, and for {} and {} with 8 heads of 128".format(
            *busy["v6e"], *busy["v6e_wide"]
        ),
    ):
        assert text in page("docs/fit.md")
