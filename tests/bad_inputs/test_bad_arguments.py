"""Command lines of every entry that ask for what there is not."""

import pytest

TRAIN = "train.py tiny.py:lm --workdir runs/new"
COMPILE = "train.py tiny.py:lm --compile_only --topology v5e:2x2"
SWEEP = "train.py tiny.py:lm --workdir runs/new --sweep"
SCORE = "eval.py runs/lm"
# The same wrong field wherever it can stand.
ENTRIES = {
    "train": TRAIN,
    "resume": "train.py tiny.py:lm --workdir runs/lm",
    "init_from": "train.py tiny.py:labels --workdir runs/new --train.init_from runs/mlm",
    "compile": COMPILE,
    "sweep": f"{TRAIN} --seeds 2",
}
FIELDS = {
    "--model.attention.kin mha": r"unknown field --model\.attention\.kin; did you mean --model\.",
    "--lr 1": r"unknown field --lr; did you mean --optimizer\.learning_rate\?$",
    "--model.attention.kind mhx": r"--model\.attention\.kind is 'mhx': takes one of mha, sha, mqa",
    "--data.batch_size 1.5": r"--data\.batch_size is '1\.5': takes a whole number$",
    "--data.batch_size": r"--data\.batch_size has no value: takes a whole number$",
    "--data.batch_size -8": r"data\.batch_size is -8: takes 1 or more$",
    "--optimizer.learning_rate nan": r"optimizer\.learning_rate is nan: takes a finite float32",
    "--optimizer.learning_rate 1e39": r"optimizer\.learning_rate is 1e\+39: takes a finite float32",
    "--optimizer.learning_rate inf": r"optimizer\.learning_rate is inf: takes a finite float32",
    "--model.remat yes": r"--model\.remat is 'yes': takes True or False$",
    "--model.rotary_base 5e5": r"model\.rotary_base is 500000\.0: model\.positions rotary only",
    "--model.positions rotary --model.rotary_scaling 0": r"model\.rotary_scaling is 0\.0: takes",
    "--model.mlp gate": r"--model\.mlp is 'gate': takes one of plain, gated; did you mean gated\?$",
    "--model.norm rmsnorm": r"--model\.norm is 'rmsnorm': takes one of layer, rms$",
    "--model.attention.num_heads 3": r"model\.attention\.num_heads is 3: must divide model\.fea",
    "--data.mask_rate 1": r"data\.mask_rate is 1\.0: takes a number above 0 and below 1$",
    "--train.seed 99999999999999999999": r"train\.seed is 9+: takes 0 or more, below 2\*\*63$",
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field(refused, field, entry):
    refused(f"{ENTRIES[entry]} {field}", FIELDS[field])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("train.py", r"no config given; usage: train\.py CONFIG"),
        (
            "train.py tiny.py:lm more",
            r"cannot place 'more': every value follows its --dotted\.field$",
        ),
        ("train.py --workdir runs/new", r"the config comes before --workdir; usage: "),
        (
            f"{TRAIN} --mesh.data 3",
            r"mesh\.data=3 · mesh\.fsdp=1 · mesh\.tensor=1 is 3: there are 8 d",
        ),
        (
            f"{TRAIN} --mesh.tensor 3",
            r"mesh\.fsdp=1 · mesh\.tensor=3 is 3: must divide the 8 devices",
        ),
        (
            f"{TRAIN} --mesh.data 0",
            r"mesh\.data is 0: takes 1 or more, or -1 for all that are left$",
        ),
        (f"{TRAIN} --mesh.fsdp -1", r"mesh\.data and mesh\.fsdp are both -1: one at most$"),
        (
            f"{TRAIN} --mesh.tensor 8",
            r"model\.vocabulary_size is 300: must be a multiple of mesh\.ten",
        ),
        (
            f"{TRAIN} --data.batch_size 12",
            r"data\.batch_size is 12: must be a multiple of data · fsdp",
        ),
        (
            f"{TRAIN} --mesh.tensor 4",
            r"model\.attention\.num_heads is 2: must be a multiple of mesh\.",
        ),
        (f"{TRAIN} --workdir=", r"workdir is empty: takes a directory$"),
        (f"{TRAIN} --compile_onl", r"unknown field --compile_onl"),
        (f"{TRAIN} --topology v5e:2x2", r"--topology goes with --compile_only; usage: "),
        (
            f"{TRAIN} --model.vocabulary_size 261",
            r"model\.vocabulary_size=261: a tokenizer needs more",
        ),
        (
            f"{TRAIN} --model.vocabulary_size 9999",
            r"model\.vocabulary_size=9999: train\.en gives at mo",
        ),
        (f"{TRAIN} --data.tokenizer none.model", r"none\.model: no such file$"),
        (f"{TRAIN} --data.tokenizer train.en", r"train\.en: is not a sentencepiece model$"),
        (f"{TRAIN} --data.tokenizer runs", r"runs: Is a directory$"),
        (
            f"{TRAIN} --data.tokenizer runs/mlm/tokenizer.model --model.vocabulary_size 400",
            r"runs/mlm/tokenizer\.model: has 300 pieces, model\.vocabulary_size is 400; they",
        ),
        (
            f"{TRAIN} --data.sequence_length 1",
            r"data\.sequence_length is 1: task lm takes 2 or more$",
        ),
        (
            "train.py tiny.py:translation --workdir runs/new --train.eval_batches 2",
            r"train\.eval_batches is 2: must be None: the first batches of a translation split",
        ),
        (
            f"{TRAIN} --train.eval_translate 5",
            r"train\.eval_translate is 5: translation only, not lm$",
        ),
        (
            "train.py tiny.py:translation --workdir runs/new --train.eval_translate -1",
            r"train\.eval_translate is -1: takes 0 or more$",
        ),
        (
            "train.py tiny.py:translation --workdir runs/new --train.eval_translate 5"
            " --data.validation",
            r"train\.eval_translate is 5: needs data\.validation$",
        ),
        (
            f"{TRAIN} --train.profile_steps 3 1",
            r"train\.profile_steps is \(3, 1\): takes a first and",
        ),
        (
            f"{TRAIN} --data.validation tfds:x",
            r"tfds:x: must be tfds:NAME:SPLIT or tfds:NAME/CONFIG:",
        ),
        (
            f"{TRAIN} --train.init_from runs/mlm",
            r"train\.init_from is 'runs/mlm': a run of task mlm: takes a run of task lm$",
        ),
        (
            "train.py tiny.py:labels --workdir runs/new --train.init_from runs/mlmm",
            r"train\.init_from: no run at runs/mlmm; did you mean runs/",
        ),
        (
            "train.py tiny.py:labels --workdir runs/new --train.init_from runs/lm",
            r"train\.init_from is 'runs/lm': a run of task lm: takes a run of an encoder",
        ),
        (
            "train.py tiny.py:labels --workdir runs/new --train.init_from runs/mlm "
            "--model.attention.num_heads 4",
            r"model\.attention\.num_heads is 4: must be 2, as in train\.init_from=runs/mlm$",
        ),
        (
            "train.py tiny.py:lm --workdir runs/lm --model.mlp_features 8",
            r"runs/lm holds a run with model\.mlp_features=16, not 8: go on with the old value",
        ),
        (
            "train.py tiny.py:mlm --workdir runs/lm",
            r"runs/lm holds a run with task='lm', not 'mlm': ",
        ),
        (
            "train.py tiny.py:lm --workdir runs/lm --train.num_steps 1",
            r"train\.num_steps is 1: runs/lm has done 2 alrea",
        ),
        (f"{TRAIN} --distributed slurm", r"--distributed is 'slurm': takes auto$"),
        (
            f"{TRAIN} --distributed auto",
            r"--distributed auto: this is not a TPU pod or a Slurm, GKE or Open",
        ),
        (f"{TRAIN} --num_processes 2", r"--coordinator is missing: "),
        (
            f"{TRAIN} --coordinator x --num_processes 2 --process_id 0",
            r"--coordinator is 'x': takes H",
        ),
        (
            f"{TRAIN} --coordinator x:1 --num_processes 2 --process_id 2",
            r"--process_id is 2: takes 0 to",
        ),
        (
            f"{TRAIN} --coordinator no.host.invalid:1 --num_processes 2 --process_id 1",
            r"--coordinator no\.host\.invalid:1: ",
        ),
    ],
)
def test_training(refused, arguments, says):
    refused(arguments, says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--compile_only", r"--compile_only needs --topology; usage: "),
        ("--compile_only yes --topology v5e:2x2", r"--compile_only is 'yes': takes no value$"),
        (
            "--compile_only --topology v5e",
            r"--topology is 'v5e': takes a kind of device and its layout",
        ),
        ("--compile_only --topology v9x:2x2", r"--topology v9x:2x2"),
        (
            "--compile_only --topology v5e:2x2 --num_slices 0",
            r"--num_slices is 0: takes 1 or more$",
        ),
        (
            "--compile_only --topology v5e:2x2 --num_slices x",
            r"--num_slices is 'x': takes a whole num",
        ),
        (
            "--compile_only --topology v5e:2x2 --search_batch 3",
            r"--search_batch is '3': takes no value",
        ),
        (
            "--compile_only --topology h100:8x",
            r"--topology is 'h100:8x': takes a kind of device and its",
        ),
    ],
)
def test_compiling(refused, flags, says):
    refused(f"train.py tiny.py:lm {flags}", says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", r"--sweep has no value: takes FIELD=VALUE,VALUE,\.\.\.$"),
        ("model.features", r"--sweep is 'model\.features': takes FIELD=VALUE,VALUE,\.\.\.$"),
        ("model.features=", r"--sweep is 'model\.features=': takes FIELD=VALUE"),
        ("model.feature=8,16", r"unknown field model\.feature; did you mean model\.features"),
        ("model.features=8,x", r"--model\.features is 'x': takes a whole number$"),
        (
            "model.features=8,15",
            r"model\.attention\.num_heads is 2: must divide model\.features=15$",
        ),
        ("model.features=8,8", r"--sweep gives the run features=8,seed=0 twice$"),
        ("train.seed=1,2", r"--sweep train\.seed: --seeds does that$"),
        ("data.train=a,b", r"--sweep data\.train: takes fields of one value$"),
        (
            "model.features=8,16 --model.features 8",
            r"--model\.features is given, and swept too: give only one",
        ),
        (
            "model.features=8,16 --sweep model.features=4",
            r"--sweep model\.features is given twice$",
        ),
        ("model.features=8,16 --seeds 0", r"--seeds is '0': takes a whole number from 1 to 1000$"),
        (
            "model.features=8,16 --workdir runs/lm",
            r"runs/lm holds a run: a sweep needs a --workdir of",
        ),
        ("model.features=8,16 --compile_only --topology v5e:2x2", r"--compile_only goes with one"),
    ],
)
def test_sweeping(refused, flags, says):
    refused(f"{SWEEP} {flags}", says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("eval.py", r"no run given; usage: eval\.py RUN"),
        ("eval.py --split test", r"the run comes before --split; usage: "),
        ("eval.py runs/lmm", r"no run at runs/lmm; did you mean runs/lm"),
        (
            "eval.py runs",
            r"no run at runs: it has no config\.json; did you mean runs/labels, runs/lm, "
            r"runs/mlm, runs/translation\?$",
        ),
        ("eval.py tiny.py", r"no run at tiny\.py"),
        ("eval.py " + "a" * 300, r"a+/config\.json: File name too long$"),
        (f"{SCORE} --splt test", r"unknown field --splt; did you mean --split\?$"),
        (f"{SCORE} --split train", r"--split is 'train': takes one of validation, test$"),
        (
            f"{SCORE} --checkpoint newest",
            r"evaluation\.checkpoint is 'newest': takes best, last or a",
        ),
        (f"{SCORE} --checkpoint 7", r"runs/lm has no checkpoint '7'; there are: 1, 2; best: 2$"),
        (
            f"{SCORE} --checkpoint last --average_checkpoints 3",
            r"evaluation\.average_checkpoints is 3: a",
        ),
        (f"{SCORE} --batch_size 0", r"evaluation\.batch_size is 0: takes 1 or more$"),
        (f"{SCORE} --batch_size x", r"--batch_size is 'x': takes a whole number$"),
        (f"{SCORE} --stride 17", r"evaluation\.stride is 17: at most data\.sequence_length=16$"),
        (f"{SCORE} --sources a.txt b.txt", r"data\.test has 2 names, allowed is one source$"),
        (f"{SCORE} --sources tfds:x:y", r"tfds:x:y: TFDS knows no data set 'x', prepared or not$"),
        (
            f"{SCORE} --length_penalty nan",
            r"evaluation\.length_penalty is nan: takes a finite float32 number, 0",
        ),
        (f"{SCORE} --min_length -1", r"evaluation\.min_length is -1"),
        (f"{SCORE} --bleu_tokenizer ja", r"--bleu_tokenizer is 'ja': takes .*ja-mecab"),
        (f"{SCORE} --translate", r"runs/lm is a run of task lm: only translation translates$"),
        (f"{SCORE} --translate --generate", r"--translate and --generate: give only one$"),
        (f"{SCORE} --predict --generate", r"--generate and --predict: give only one$"),
        (
            f"{SCORE} --predict",
            r"runs/lm is a run of task lm: only classification, regression, .*, span predict$",
        ),
        (
            f"{SCORE} --generate --top_k 3",
            r"evaluation\.top_k is 3: needs evaluation\.temperature abov",
        ),
        (
            f"{SCORE} --generate --temperature 1 --top_p 2",
            r"evaluation\.top_p is 2\.0: takes a number a",
        ),
        (
            f"{SCORE} --generate --temperature 1e39",
            r"evaluation\.temperature is 1e\+39: takes a finite float32 number",
        ),
        (
            f"{SCORE} --generate --temperature -1",
            r"evaluation\.temperature is -1\.0: takes a finite",
        ),
        (f"{SCORE} --generate --seed 99999999999999999999", r"evaluation\.seed is 9+: takes "),
        (f"{SCORE} more", r"cannot place 'more'"),
        (f"{SCORE} --num_processes 2", r"--coordinator is missing: "),
        (
            "eval.py runs/translation --generate",
            r"runs/translation is a run of task translation: only",
        ),
        ("eval.py runs/translation --beam_size 0", r"evaluation\.beam_size is 0: takes 1 or more$"),
        (
            "eval.py runs/translation --stride 4",
            r"evaluation\.stride is 4: lm only, not translation$",
        ),
        (
            "eval.py runs/labels --answer_length 0",
            r"evaluation\.answer_length is 0: takes 1 or more$",
        ),
        (
            "mhe_jax/__main__.py",
            r"no command given: takes one of train, eval, compare",
        ),
        (
            "mhe_jax/__main__.py evil runs/lm",
            r"no command evil: .*; did you mean eval",
        ),
        ("mhe_jax/__main__.py convert runs/lm", r"two directories come first; usage: "),
        ("mhe_jax/__main__.py convert runs/lm new", r"--kind is not set: takes one of mha,"),
        (
            "mhe_jax/__main__.py convert runs/no new --kind mqa",
            r"no run at runs/no",
        ),
        (
            "mhe_jax/__main__.py convert runs/lm runs/mlm --kind mqa",
            r"runs/mlm is there already: takes a new directory$",
        ),
        (
            "mhe_jax/__main__.py convert runs/lm runs/lm/new --kind mqa",
            r"runs/lm/new lies in runs/lm: takes a directory outside of it$",
        ),
        (
            "mhe_jax/__main__.py factorize runs/lm runs/lm/new --mlp 1",
            r"runs/lm/new lies in runs/lm: takes a directory outside of it$",
        ),
        (
            "mhe_jax/__main__.py convert runs/lm new --kind gqa",
            r"model\.attention\.num_kv_heads is not set: kind gqa needs a divisor",
        ),
        (
            "mhe_jax/__main__.py convert runs/lm new --kind mqa --num_groups 2",
            r"model\.attention\.num_groups is 2: kinds mhe_add, .*, collaborative only, not mqa$",
        ),
        (
            "mhe_jax/__main__.py convert runs/lm new --kind mqa --latent_features 9",
            r"model\.attention\.latent_features is 9: kind mla only, not mqa$",
        ),
        (
            "mhe_jax/__main__.py convert runs/lm new --kind mhe_mull",
            r"--kind is 'mhe_mull': takes one of .*; did you mean mhe_mul",
        ),
        ("mhe_jax/__main__.py export runs/lm", r"two directories come first; usage: "),
        ("mhe_jax/__main__.py export runs/lm out", r"no format is given: takes --to safetensors"),
        (
            "mhe_jax/__main__.py export runs/lm out --to ctranslate",
            r"--to is 'ctranslate': takes one of safetensors, .*; did you mean ctranslate2",
        ),
        (
            "mhe_jax/__main__.py export runs/no out --to ctranslate2",
            r"no run at runs/no",
        ),
        (
            "mhe_jax/__main__.py export runs/lm runs/mlm --to safetensors",
            r"runs/mlm is there already: takes a new directory$",
        ),
        (
            "mhe_jax/__main__.py export runs/lm runs/lm/out --to stablehlo",
            r"runs/lm/out lies in runs/lm: takes a directory outside of it$",
        ),
        ("mhe_jax/__main__.py factorize runs/lm", r"two directories come first; usage: "),
        (
            "mhe_jax/__main__.py factorize runs/lm new",
            r"no number of terms is given: takes --attention,",
        ),
        (
            "mhe_jax/__main__.py factorize runs/no new --mlp 1",
            r"no run at runs/no$",
        ),
        (
            "mhe_jax/__main__.py factorize runs/lm new --mlp 0",
            r"model\.kronecker\.mlp is 0: takes 1 or more$",
        ),
        ("eval.py paper now", r"eval\.py paper takes no arguments, not now$"),
        ("eval.py compare", r"no runs given; usage: eval\.py compare RUNS"),
        ("eval.py compare --out x", r"no runs given; usage: eval\.py compare RUNS"),
        ("eval.py compare runs --metric blue", r"--metric blue: no run has it"),
        (
            "eval.py compare runs --choose lr",
            r"--choose lr: no such field; did you mean optimizer\.learning_rate\?",
        ),
        (
            "eval.py compare runs --choose train.seed",
            r"--choose train.seed: makes no groups; takes a field of what is learned, such as .*",
        ),
        ("eval.py compare runs --lengths 0", r"--lengths is \(0,\): takes 1 or more$"),
        ("eval.py compare runs --split dev", r"--split is 'dev': takes one of validation, test$"),
        ("eval.py compare runs --output x", r"unknown field --output"),
        ("eval.py compare run", r"there is no run; did you mean runs"),
        ("eval.py compare tiny.py", r"there is no tiny\.py"),
        ("eval.py compare runs/lm/checkpoints", r"no runs below runs/lm/checkpoints$"),
        ("eval.py compare runs --out tiny.py", r"--out tiny\.py: is a file$"),
        (
            "eval.py compare runs --out runs/lm",
            r"--out runs/lm: holds something other than a report; g",
        ),
        ("eval.py compare runs --out tiny.py/report", r"--out tiny\.py/report: Not a directory$"),
    ],
)
def test_evaluating(refused, arguments, says):
    refused(arguments, says)


@pytest.mark.parametrize(
    ("action", "stdin", "says", "written"),
    [
        (
            "translation --translate",
            b"one dog\nred \xff hat\n",
            r"standard input, line 2: is not UTF-8",
            1,
        ),
        (
            "translation --translate",
            b"\xff\xfeo\0n\0e\0",
            r"standard input, line 1: is not UTF-8",
            0,
        ),
        (
            "translation --translate",
            b"dog " * 2_500_000 + b"\xe9",
            r"standard input, line 1: is not U",
            0,
        ),
        (
            "lm --generate",
            b"one dog\n\x80\n",
            r"standard input, line 2: is not UTF-8 \(byte 1\)$",
            1,
        ),
    ],
)
def test_lines_of_standard_input(refused, capfd, action, stdin, says, written):
    refused(f"eval.py runs/{action} --beam_size 1", says, stdin=stdin, compiles=True, lines=written)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "NAME.py"],
        ["train.py", "tiny.py:lm", "--workdir", "runs/NAME"],
        ["train.py", "tiny.py:lm", "--workdir", "runs/new", "--data.train", "NAME"],
        ["train.py", "tiny.py:lm", "--workdir", "runs/new", "--NAME", "1", "--seeds", "2"],
        ["eval.py", "runs/NAME"],
        ["eval.py", "compare", "NAME"],
    ],
)
def test_names_that_are_not_utf8(refused, arguments):
    """As Python passes on such bytes."""
    name = next(a for a in arguments if "NAME" in a).replace("NAME", r"a\\udcff")
    refused([a.replace("NAME", "a\udcff") for a in arguments], rf"'{name}': is not UTF-8$")


def test_a_directory_whose_name_is_not_utf8(place, refused, monkeypatch):
    (place / "a\udcff").mkdir()
    monkeypatch.chdir(place / "a\udcff")
    refused("eval.py paper", r"'.*/a\\udcff': is not UTF-8$")


def test_a_workdir_in_a_config_that_is_not_utf8(place, refused):
    text = (place / "tiny.py").read_text().replace('f"runs/{variant}"', r'"runs/a\udcff"')
    (place / "bad.py").write_text(text)
    refused("train.py bad.py:lm", r"workdir='runs/a\\udcff': is not UTF-8$")
