"""Eight simulated CPU devices, strict ranks, quick compilation; set before jax is imported."""

import gc
import importlib.metadata
import importlib.util
import itertools
import os
import signal
import threading
from collections import Counter, defaultdict

# A shell ignores Ctrl-C for what it starts in the background, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of the time of the suite; nothing in it depends on how fast a program runs.
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # two workers have two cores
]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    # The older ones compile three times as fast; a later jaxlib has none, and ends at the flag.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
given = os.environ.get("XLA_FLAGS", "")
missing = [flag for flag in FLAGS if flag.split("=")[0] not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()

# To trace and compile a program makes thousands of objects, hardly any of them in cycles.
gc.set_threshold(20_000, 20, 20)

import emulators  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# JAX loads all dialects of MLIR for each program that it lowers, which takes half as long as to
# compile a small one. One context of a thread serves all its programs, in half of the memory.
_contexts = threading.local()
_make_context = mlir.make_ir_context


def _context():
    if not hasattr(_contexts, "one"):
        _contexts.one = _make_context()
    return _contexts.one


mlir.make_ir_context = _context


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Skips what needs libtpu; marks as `rest` the cases of `covering(n)` that show nothing new."""
    tests = defaultdict(list)
    has_libtpu = importlib.util.find_spec("libtpu") is not None
    for item in items:
        if item.get_closest_marker("libtpu") and not has_libtpu:
            item.add_marker(pytest.mark.skip(reason="needs libtpu: see `make ahead`"))
        if marker := item.get_closest_marker("covering"):
            values = [f"{name}={value}" for name, value in sorted(item.callspec.params.items())]
            groups = set(itertools.combinations(values, *marker.args))
            tests[item.parent, item.originalname].append((item, groups))
    for cases in tests.values():
        missing = set().union(*(groups for _, groups in cases))
        assert missing, f"{cases[0][0].nodeid} has fewer parameters than its `covering` asks for"
        used = Counter()
        while missing:
            # Of those that add as much, the one whose values stand in the fewest others.
            order = [(len(new & missing), -sum(used[x] for x in new)) for _, new in cases]
            _, new = cases.pop(order.index(max(order)))
            missing -= new
            used.update(new)
        for item, _ in cases:
            item.add_marker("rest")


def pytest_collection_finish():
    """What was imported and collected stays: garbage is sought in what tests make alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Where evaluation keeps indices: not in the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MHE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory):
    """Compiled programs on disk: what one file compiled, no later file compiles again.

    Of one worker: JAX writes them in place, where another worker could read half of one. Small ones
    are left out: to read one takes as long as to compile it.
    """
    if jax.config.jax_compilation_cache_dir is None:
        directory = tmp_path_factory.getbasetemp() / "programs"
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="session")
def gs():
    """`gs://bucket` of an emulator, which this process and those that it starts use."""
    for library in ("gcsfs", "google.cloud.storage"):
        pytest.importorskip(library, reason=f"needs {library}: the extra `cloud`")
    yield from emulators.gs()


@pytest.fixture(scope="session")
def s3():
    """`s3://bucket` of an emulator."""
    pytest.importorskip("s3fs", reason="needs s3fs: the extra `cloud`")
    yield from emulators.s3()


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs of other files would fill the memory, and slow every collection."""
    yield
    jax.clear_caches()


@pytest.fixture
def hang_ups():
    """SIGHUP as a terminal has it, also where the tests run under `nohup`, which ignores it."""
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, old)
