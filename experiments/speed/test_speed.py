"""The programs run and write what they promise; how fast is not asked."""

import json
import types
from pathlib import Path

import pytest

from experiments import command_line, reports, timing
from experiments.speed import attention, decode, peers, steps, torch_layers, train_step
from mhe_jax.attention import KINDS
from mhe_jax.config import FORMS_OF_KINDS, AttentionConfig, Config, DataConfig, ModelConfig

SHAPE = ["--layers", "1", "--features", "12", "--heads", "3", "--mlp_features", "8"]
SHAPE += ["--vocabulary", "300", "--length", "6", "--rounds", "2"]


def result(command, capsys, tmp_path: Path, *arguments: str) -> dict:
    """The JSON of a run; its printed text is under 'text'."""
    file = tmp_path / "result.json"
    assert command.main([*arguments, "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    text = capsys.readouterr().out
    for needed in ("device", "versions", "dtype", "command", "date"):
        assert found["header"][needed]
    assert found["header"]["date"] in text
    for row in found["results"]:
        assert row["rounds"] == 2
        assert row["quartiles_ms"][0] <= row["median_ms"] <= row["quartiles_ms"][1]
    return {**found, "text": text}


def test_attention(capsys, tmp_path):
    arguments = ["--kinds", "mha", "mhe_add", "--forms", "shared", "--causal"]
    arguments += ["--lengths", "6", "--tokens", "12", "--heads", "3", "--head_features", "4"]
    found = result(attention, capsys, tmp_path, *arguments, "--rounds", "2")
    cases = {(row["run"], case) for row in found["results"] for case in row["cases"]}
    for run in ("forward", "with gradients"):
        for case in ("mha xla", "mhe_add shared xla", "plain XLA MHA", "jax.nn xla"):
            assert (run, case) in cases
    for row in found["results"]:
        assert row["memory_bytes"] is None or row["memory_bytes"] > 0
        assert row["flops"] > 0
        assert row["speed"] > 0
    left_out = [name for names in found["left_out"].values() for name in names]
    assert "jax.nn cudnn" in left_out


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


def test_train_step(capsys, tmp_path):
    arguments = ["--tasks", "translation", "--kinds", "mhe_add", "--forms", "shared", *SHAPE]
    found = result(train_step, capsys, tmp_path, *arguments, "--batch", "2")
    rows = {row["case"]: row for row in found["results"]}
    assert {steps.FLAX, "mhe_add shared"} <= set(rows), found["left_out"]
    assert {row["tokens"] for row in rows.values()} == {24}
    # Flax's attention has the parameters of ours of kind mha, in three sublayers.
    assert rows[steps.FLAX]["parameters"]["attention"] == 3 * 4 * 12**2
    assert "FLOPs of a step" in found["text"]


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


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_torch_layers(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch and transformers: see `make peers`")
    pytest.importorskip("transformers", reason="needs torch and transformers: see `make peers`")
    arguments = ["--lengths", "6", "--cached", "5", "--heads", "3", "--head_features", "4"]
    arguments += ["--threads", str(torch.get_num_threads()), "--rounds", "2"]
    file = tmp_path / "result.json"
    assert torch_layers.main([*arguments, "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert not found["left_out"]
    runs = [f"T = 6, {m}, {r}" for m in ("causal", "padded") for r in ("forward", "with gradients")]
    assert [row["case"] for row in found["results"]] == [*runs, "one token after 5"]
    for row in found["results"]:
        for layer in torch_layers.LAYERS:
            low, high = row[layer]["quartiles_ms"]
            assert 0 < low <= row[layer]["median_ms"] <= high


def test_decode(capsys, tmp_path):
    arguments = ["--kinds", "mha", "mhe_add", "--beams", "1", "2", *SHAPE]
    found = result(decode, capsys, tmp_path, *arguments, "--batch", "2")
    rows = {(row["case"], row["beams"]): row for row in found["results"]}
    assert set(rows) == {(case, beams) for case in ("mha", "mhe_add") for beams in (1, 2)}
    for (case, beams), row in rows.items():
        mha = rows["mha", beams]["cache_bytes"]
        # Two rows of 6 places, keys and values of 3 heads of 4 in float32.
        assert mha["self"] == beams * 2 * 6 * 2 * 3 * 4 * 4
        if case == "mhe_add":
            assert row["cache_bytes"] == {name: size // 3 for name, size in mha.items()}
        assert row["tokens_per_second"] > 0


def test_every_row_is_decoded_to_its_longest_length():
    """Also where two tokens alone could be in the place of an end."""
    args, config = decode.parse([*SHAPE, "--kinds", "mha", "--vocabulary", "7"])
    (case,) = decode.Decoding("mha", config, args).case(batch=16, beams=2)
    assert (case.call().lengths == 6).all()


def test_a_kind_that_fails_is_left_out_of_its_batch(capsys, tmp_path, monkeypatch):
    def case(self, batch, beams):
        if self.name == "mha" and batch > 2:
            raise MemoryError("out of memory")
        sizes = {"self": batch, "cross": batch}
        about = {"case": self.name, "search": "greedy", "batch": batch, "cache_bytes": sizes}
        return [timing.Case(about, lambda: None)]

    monkeypatch.setattr(decode.Decoding, "case", case)
    arguments = ["--kinds", "mha", "mhe_add", "--beams", "1", "--batch", "2", "4", *SHAPE]
    found = result(decode, capsys, tmp_path, *arguments)
    rows = [(row["case"], row["batch"]) for row in found["results"]]
    assert rows == [("mha", 2), ("mhe_add", 2), ("mhe_add", 4)]
    assert list(found["left_out"].values()) == [["mha, 4 rows"]]


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
