"""Two CPU devices, strict dtypes, checked array annotations, a compilation cache, and one tiny federation."""

import gc
import os
import platform
import re
import signal
import tempfile
import zlib
from pathlib import Path

import jax
import jaxtyping

from tests import typecheck

# Factories stay out: their ``float`` hyperparameters are also given traced values. So does engine.peak, which walks
# through programs: it made more than half of the checked calls in a profile of runs, and hardly any of them of arrays.
ENGINE = (path.stem for path in (Path(__file__).parent.parent / "fedjax_pfl/engine").glob("[a-z]*.py"))
CHECKED = ("ops", "models", "data.augment", "data.federated")
CHECKED += tuple(f"engine.{part}" for part in ENGINE if part != "peak")
PFEDCSPC = ("calibration", "cluster", "contrast", "corpus", "initial", "kmeans", "knowledge", "relations")
CHECKED += tuple(f"methods.pfedcspc.{part}" for part in PFEDCSPC)
CHECKED += tuple(f"methods.pgfedsplit.{part}" for part in ("gaussians", "mixture", "synthetic"))
CHECKED += ("methods.fedcpd.feature_distillation", "methods.fedecouple.weights", "methods.fedpac.simplex")
jaxtyping.install_import_hook([f"fedjax_pfl.{name}" for name in CHECKED], f"{typecheck.__name__}.once")


def cache_folder():
    """Where compiled programs are kept: one folder per jax and kind of processor, since they do not travel."""
    home = os.environ.get("FEDJAX_PFL_TEST_CACHE") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    processor = {line for line in lines if line.startswith(("flags", "Features", "model name"))} or set(lines)
    name = f"{jax.__version__}-{platform.machine()}-{zlib.crc32(repr(sorted(processor)).encode()):08x}"
    return Path(home) / "fedjax_pfl_tests" / name


def is_writable(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Compiling is what the tests spend their time on; JAX_DISABLE_MOST_OPTIMIZATIONS=0 runs them fully optimised.
if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") != "0":
    jax.config.update("jax_disable_most_optimizations", True)
    # Of what is left, the emitters of fused operations take a third, splitting programs this small over threads a
    # tenth, moving operations out of loops a twentieth, and noting the lines of code that they come from a seventh.
    loops = "while-loop-invariant-code-motion,while-loop-constant-sinking"
    flags = f"--xla_cpu_parallel_codegen_split_count=1 --xla_disable_hlo_passes={loops}"
    if jax.__version_info__ < (0, 11, 1):  # later ones always use the emitters, and end the process over the flag
        flags = f"--xla_cpu_use_fusion_emitters=false {flags}"
    given = os.environ.get("XLA_FLAGS", "")
    if flags not in given:  # workers of xdist get them from the first process; twice would be other programs
        os.environ["XLA_FLAGS"] = f"{given} {flags}"
    jax.config.update("jax_traceback_in_locations_limit", 0)
if is_writable(cache_folder()):
    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# E402 below: what these modules compute when they are imported must see the settings above.
import flax.linen as nn  # noqa: E402
import jax.flatten_util  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from fedjax_pfl.data.federated import Federation, pack  # noqa: E402
from fedjax_pfl.data.partition import PARTITIONS  # noqa: E402
from fedjax_pfl.data.sources import SOURCES  # noqa: E402
from fedjax_pfl.engine.metrics import METRICS  # noqa: E402
from fedjax_pfl.methods import METHODS  # noqa: E402
from fedjax_pfl.models import MODELS, build  # noqa: E402
from fedjax_pfl.models.base import dense  # noqa: E402
from fedjax_pfl.models.cnn import CNN  # noqa: E402
from fedjax_pfl.models.norm import BatchNorm  # noqa: E402
from fedjax_pfl.models.projection import Projected  # noqa: E402
from fedjax_pfl.ops.training import Trainer  # noqa: E402

LONGEST = "tests/test_distributed.py"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``-n``, a file stays in one process, which compiles its programs once; a method's conformance likewise.

    Those of many tests come first. The first process that is done with one goes on with the one whose few tests take
    the longest, so that nobody waits for it in the end.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            method = re.search(r"\[(\w+)", test) if file.endswith("test_conformance.py") else None
            return f"{file} {method[1]}" if method else file

        def schedule(self):
            super().schedule()
            if LONGEST in self.workqueue:
                self.workqueue.move_to_end(LONGEST, last=False)

    return ByFile(config, log)


def pytest_collection_finish():
    """What has been imported stays: Python need not look through it again and again for garbage of traces."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


CLASSES = 3
TRAIN_SIZES = (5, 1, 27, 3, 12, 19, 8)
TEST_SIZES = (4, 3, 9, 0, 5, 8, 6)


def pytest_configure(config):
    # A shell makes what it starts in the background deaf to interrupts, which some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # jax compiles anew when an entry is damaged, or half-written by another process: no reason to fail.
    for what in ("reading", "writing"):
        config.addinivalue_line("filterwarnings", f"ignore:Error {what} persistent compilation cache entry")


@pytest.fixture
def tables_as_before():
    """What a test registers is gone after it."""
    tables = METHODS, MODELS, SOURCES, PARTITIONS, METRICS
    before = [dict(table) for table in tables]
    yield
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)


_MOST_MAPPINGS = 20_000


def release_programs():
    """Frees what has been compiled before there is too much of it: programs take up to hundreds of memory mappings.

    Linux allows 65,530. Freed anew after each module, the small ones that all share would be made a hundred times.
    """
    try:
        mappings = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # another system
        mappings = _MOST_MAPPINGS + 1
    if mappings > _MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def programs_of_the_module():
    yield
    release_programs()


@pytest.fixture(scope="session")
def federation():
    """Seven clients of very unequal sizes and label shares; one has a single sample, one nothing to be tested on."""
    rng = np.random.default_rng(3)
    sizes = np.array(TRAIN_SIZES) + np.array(TEST_SIZES)
    shares = rng.dirichlet(np.ones(CLASSES), len(sizes))
    y = np.concatenate([rng.choice(CLASSES, n, p=share) for n, share in zip(sizes, shares, strict=True)])
    patterns = rng.integers(60, 196, (CLASSES, 4, 4, 1))
    x = np.clip(patterns[y] + rng.normal(0, 30, (len(y), 4, 4, 1)), 0, 255)
    order = rng.permutation(len(y))
    x, y = x[order].astype(np.uint8), y[order].astype(np.int32)
    rows = np.split(np.argsort(order), np.cumsum(sizes)[:-1])
    train = [held[:n] for held, n in zip(rows, TRAIN_SIZES, strict=True)]
    test = [held[n:] for held, n in zip(rows, TRAIN_SIZES, strict=True)]
    pooled = np.split(np.concatenate(test), [6, 8, 21])
    tables = (pack(held, y, CLASSES) for held in (train, test, pooled))
    train, test, pooled = tables
    return Federation(jnp.asarray(x), jnp.asarray(y), train, None, test, pooled)


def built(extractor):
    """A model of sixteen pixels and three classes, whose parameters are one draw.

    Random numbers are most of what there is to compile here.
    """
    mean, std = jnp.array([0.45]), jnp.array([0.3])
    model = build(extractor, (4, 4, 1), CLASSES, init="torch", mean=mean, std=std)
    flat, unravel = jax.flatten_util.ravel_pytree(jax.jit(model.init)(jax.random.key(0)))
    return model._replace(init=lambda key: unravel(jax.random.uniform(key, flat.shape, minval=-0.35, maxval=0.35)))


@pytest.fixture(scope="session")
def model():
    """Sixteen pixels, eight hidden units, three classes."""
    return built(MODELS["mlp"](hidden=8))


@pytest.fixture(scope="session")
def model_with_projection():
    """The same eight hidden units as an encoder, and a projection head of eight hidden units and six outputs."""
    return built(Projected(MODELS["mlp"](hidden=8), 6, "torch"))


class Mapped(nn.Module):
    """Eight hidden units as a map of 2x2 pixels, and eight features as one of a single pixel."""

    @nn.compact
    def __call__(self, x, mask=None):
        hidden = nn.relu(dense(8, "torch", 16, "hidden_layer")(x.reshape(len(x), -1)))
        z = nn.relu(dense(8, "torch", 8, "features")(hidden))
        return z, (hidden.reshape(-1, 2, 2, 2), z[:, None, None])


@pytest.fixture(scope="session")
def model_with_plain_maps():
    """Sixteen pixels, eight hidden units and eight features, which are maps as well, three classes; no convolution."""
    return built(Mapped())


@pytest.fixture(scope="session")
def model_with_maps():
    """Two convolutions of four and eight channels, eight features, three classes; maps of 2x2 and 1x1 pixels."""
    mean, std = jnp.array([0.45]), jnp.array([0.3])
    extractor = CNN(((4, 3, 1), (8, 3, 1)), 8, nn.relu, "torch")
    return build(extractor, (4, 4, 1), CLASSES, init="torch", mean=mean, std=std)


class Normalised(nn.Module):
    """Eight hidden units, each a channel of its own for batch normalisation."""

    @nn.compact
    def __call__(self, x, mask=None):
        hidden = dense(8, "torch", 16, "hidden_layer")(x.reshape(len(x), -1))
        return nn.relu(BatchNorm(name="norm")(hidden[:, None, None], mask)[:, 0, 0]), ()


@pytest.fixture(scope="session")
def model_with_norm():
    """Sixteen pixels, eight hidden units with batch normalisation, three classes."""
    mean, std = jnp.array([0.45]), jnp.array([0.3])
    return build(Normalised(), (4, 4, 1), CLASSES, init="torch", mean=mean, std=std)


@pytest.fixture(scope="session")
def trainer():
    return Trainer(epochs=2, batch_size=4, lr=0.1, momentum=0.5)


@pytest.fixture(scope="session")
def mesh():
    return jax.make_mesh((2,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
