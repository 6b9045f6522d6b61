"""What `simulate` takes as data: everything becomes the same `Dataset`, and every misfit one clear line."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy.sparse import csr_matrix
from sklearn.datasets import load_breast_cancer, make_classification

from fedjax_pfl import Config, ConfigError, FederatedData, simulate
from fedjax_pfl.data.intake import as_dataset
from fedjax_pfl.data.sources import load
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.experiment.build import DataShape, make_engine, shape_of
from fedjax_pfl.experiment.trained import checked_samples
from tests.data.labels import divide

RNG = np.random.default_rng(5)
PIXELS, TEST_PIXELS = (RNG.integers(0, 256, (n, 4, 5, 3), np.uint8) for n in (6, 2))
NUMBERS, TEST_NUMBERS = (RNG.normal(size=(n, 7)) for n in (6, 2))
Y, TEST_Y = np.array([0, 2, 1, 2, 0, 1]), np.array([3, 0])


class Tensor:
    """All that is known of another library's array."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._array, dtype)


class OnTheGPU:
    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert cuda:0 device type tensor to numpy.\nUse Tensor.cpu() first")


class Samples:
    """A data set as torch has them."""

    def __init__(self, x, y):
        self._x, self._y = x, y

    def __len__(self):
        return len(self._x)

    def __getitem__(self, row):
        return self._x[row], self._y[row]


class Triples(Samples):
    def __getitem__(self, row):
        return (*super().__getitem__(row), 0)


class Loader:
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        yield from ()

    def __len__(self):
        return 1


def check(made, x, y, train_rows=None):
    np.testing.assert_array_equal(made.images, x)
    np.testing.assert_array_equal(made.labels, y)
    assert (made.images.dtype, made.labels.dtype, made.train_rows) == (x.dtype, np.int32, train_rows)


def test_of_images_with_a_palette_the_colours_are_samples():
    image = Image.new("P", (2, 2), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    check(as_dataset(Samples([image, image], [0, 1])), np.full((2, 2, 2, 3), [200, 100, 50], np.uint8), [0, 1])


@pytest.mark.parametrize("wrap", [np.asarray, Tensor, jnp.asarray, lambda array: array.tolist()])
@pytest.mark.parametrize("outside", [tuple, list])
def test_arrays_of_any_library_are_arrays(wrap, outside):
    x = NUMBERS.astype(np.float32)
    check(as_dataset(outside([wrap(x), wrap(Y)])), x, Y)
    test_x = TEST_NUMBERS.astype(np.float32)
    made = as_dataset(outside(map(wrap, (x, Y, test_x, TEST_Y))), name="mine")
    check(made, np.concatenate([x, test_x]), [*Y, *TEST_Y], train_rows=6)
    assert made.name == "mine"


def test_pixels_stay_bytes_and_lists_of_arrays_are_arrays():
    check(as_dataset((PIXELS, Y, TEST_PIXELS, TEST_Y)), np.concatenate([PIXELS, TEST_PIXELS]), [*Y, *TEST_Y], 6)
    check(as_dataset(([Tensor(image) for image in PIXELS], list(Y))), PIXELS, Y)
    assert as_dataset((PIXELS, Y)).images is PIXELS


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ">f8"])
@pytest.mark.parametrize("shape", [(6, 1), (6, 4, 5, 3), (6, 9), (6, 3, 5), (6, 2, 2, 2, 2)])
def test_floats_of_any_shape_stay_as_they_are(shape, dtype):
    x = RNG.normal(size=shape).astype(dtype)
    check(as_dataset((x, Y)), x.astype(np.float32), Y)


@pytest.mark.parametrize("wrap", [np.asarray, Tensor, lambda x: x])
def test_data_sets_of_samples_are_read_one_by_one(wrap):
    train = Samples([wrap(image) for image in PIXELS], [wrap(label) for label in Y])
    test = Samples(list(TEST_PIXELS), TEST_Y.tolist())
    check(as_dataset(train), PIXELS, Y)
    for pair in ((train, test), [train, test]):
        check(as_dataset(pair), np.concatenate([PIXELS, TEST_PIXELS]), [*Y, *TEST_Y], train_rows=6)


def test_a_data_set_of_the_package_is_taken_as_it_is():
    digits = load("digits")
    assert as_dataset(digits) is digits


def test_a_client_may_have_nothing_to_be_tested_on():
    made = as_dataset([(NUMBERS, Y, TEST_NUMBERS, TEST_Y), (NUMBERS, Y, TEST_NUMBERS[:0], [])])
    np.testing.assert_array_equal(made.labels, [*Y, *Y, *TEST_Y])
    assert (made.labels.dtype, made.train_rows) == (np.int32, 12)


def test_users_come_with_the_data():
    users, test_users = np.array(["b", "a", "b", "c", "a", "c"]), np.array(["c", "a"])
    wraps = [np.asarray, list, lambda names: np.array(names, object)]
    if hasattr(np.dtypes, "StringDType"):
        wraps.append(lambda names: np.array(names, np.dtypes.StringDType()))
    for wrap in wraps:
        made = as_dataset(FederatedData(NUMBERS, Y, users=wrap(users), name="letters"))
        np.testing.assert_array_equal(made.users, [1, 0, 1, 2, 0, 2])
        assert (made.name, made.divided, made.train_rows) == ("letters", False, None)
        assert made.user_names == ("a", "b", "c")
    made = as_dataset(FederatedData(NUMBERS, Y, TEST_NUMBERS, TEST_Y, users, test_users), name="mine")
    np.testing.assert_array_equal(made.users, [1, 0, 1, 2, 0, 2, 2, 0])
    assert (made.name, made.train_rows) == ("mine", 6)


def test_users_that_are_integers_are_in_the_order_of_their_numbers():
    for users in (np.array([10, 9, 10, 1, 9, 1]), np.array([10, 9, 10, np.int64(1), 9, 1], object)):
        made = as_dataset(FederatedData(NUMBERS, Y, users=users))
        np.testing.assert_array_equal(made.users, [2, 1, 2, 0, 1, 0])
        assert made.user_names == ("1", "9", "10")
    mixed = as_dataset(FederatedData(NUMBERS, Y, users=np.array([10, "a", 9, 9, "a", 2**70], object)))
    assert mixed.user_names == ("10", str(2**70), "9", "a")


def test_data_from_python_are_somebodys_own_whatever_they_are_called():
    parts = NUMBERS, Y, TEST_NUMBERS, TEST_Y
    assert all(as_dataset(given).own for given in (parts, FederatedData(*parts, name="mine"), [(NUMBERS, Y)] * 2))
    assert not load("digits").own


@pytest.mark.parametrize("unknown", [None, float("nan"), 1.5])
def test_a_row_without_a_user_is_refused(unknown):
    users = np.array(["b", "a", unknown, "c", "a", "c"], object)
    with pytest.raises(ConfigError, match=rf"users must be strings or integers, .*; row 2 has {unknown}"):
        as_dataset(FederatedData(NUMBERS, Y, users=users))


def held(table):
    return [sorted(np.asarray(index)[:count].tolist()) for index, count in zip(table.index, table.count, strict=True)]


def natural(made, clients, **fields):
    return divide(made, clients=clients, partition={"kind": "natural"}, seed=3, **fields)[0]


def test_row_lists_are_the_clients_in_their_order():
    x, y, x_test, y_test = RNG.normal(size=(40, 3)), RNG.integers(0, 3, 40), RNG.normal(size=(9, 3)), np.zeros(9, int)
    clients = [[30, 2, 17, 48], list(range(9)), [39, 40, 41, 20, 21], [10, 11]]
    clients[1].remove(2)
    made = as_dataset(FederatedData(x, y, x_test, y_test, clients=clients))
    federation = natural(made, 4)
    both = [sorted(train + test) for train, test in zip(held(federation.train), held(federation.test), strict=True)]
    assert both == [sorted(rows) for rows in clients]
    pooled, tested = (sorted(itertools.chain(*held(table))) for table in (federation.pooled, federation.test))
    assert pooled == tested


def test_data_of_each_client_stay_its_own():
    sizes, test_sizes = (5, 9, 3), (2, 1, 4)
    x = [RNG.normal(size=(n, 4)) for n in sizes]
    x_test = [RNG.normal(size=(n, 4)) for n in test_sizes]
    y, y_test = ([np.arange(len(part)) % 3 for part in parts] for parts in (x, x_test))
    pairs = natural(as_dataset(list(zip(x, y, strict=True))), 3)
    for client, (train, test) in enumerate(zip(held(pairs.train), held(pairs.test), strict=True)):
        np.testing.assert_array_equal(pairs.x[np.array(sorted(train + test))], x[client].astype(np.float32))
    quadruples = natural(as_dataset(list(zip(x, y, x_test, y_test, strict=True))), 3, split="official")
    for client, (train, test) in enumerate(zip(held(quadruples.train), held(quadruples.test), strict=True)):
        np.testing.assert_array_equal(quadruples.x[np.array(train)], x[client].astype(np.float32))
        np.testing.assert_array_equal(quadruples.x[np.array(test)], x_test[client].astype(np.float32))
        np.testing.assert_array_equal(quadruples.y[np.array(test)], y_test[client])


NAN = NUMBERS.copy()
NAN[1, 2:4], NAN[4, 0] = (np.nan, np.inf), -np.inf
ONE_HOT = np.eye(3)[Y]
UNIQUE = r"numpy\.unique\(y, return_inverse=True\)\[1\] numbers the classes$"
PART = (NUMBERS, Y)
TOKENS = np.arange(60).reshape(6, 10) % 13
MISTAKES = {
    "NaN": ((NAN, Y), r"samples must be finite; 3 of 42 numbers, in 2 rows, are NaN or infinite as float32$"),
    "too large": ((np.full((3, 2), 1e39), Y[:3]), r"6 of 6 numbers, in 3 rows, are NaN or infinite as float32$"),
    "NaN in the test part": ((NUMBERS, Y, NAN, Y), "the test samples must be finite; 3 of 42"),
    "more than float32 holds": ((NUMBERS * 1e200, Y), "must be finite; 42 of 42 numbers"),
    "whole numbers": (
        (NUMBERS.astype(int), Y),
        r"uint8 \(pixels\) or floats, got int64: .*numpy\.asarray\(x, numpy\.fl",
    ),
    "truth values": ((NUMBERS > 0, Y), "uint8 .* or floats, got bool: "),
    "flat samples": ((NUMBERS[:, 0], Y), r"must be \[n, \.\.\.\], got \(6,\); x\.reshape\(-1, 1\)"),
    "bytes that are no image": (
        (PIXELS.reshape(6, 60), Y),
        r"got \(6, 60\); reshape flat images, convert .*float32; text is FederatedData\(x, y, vocabulary=80\), of",
    ),
    "tokens without a vocabulary": (
        (TOKENS.astype(np.int32), Y),
        r"got int32: .*; text is FederatedData\(x, y, vocabulary=80\), of tokens$",
    ),
    "a token too large": (
        FederatedData(TOKENS, Y, vocabulary=int(TOKENS.max())),
        rf"tokens must be within 0 to {TOKENS.max() - 1}, .*samples are from 0 to {TOKENS.max()}$",
    ),
    "a token below 0": (FederatedData(TOKENS - 1, Y, vocabulary=80), "within 0 to 79, .*samples are from -1 to "),
    "a token of the test part too large": (
        FederatedData(TOKENS, Y, TOKENS[:2] + 80, TEST_Y, vocabulary=80),
        "those of the test samples are from 8",
    ),
    "tokens that are no whole numbers": (
        FederatedData(TOKENS / 1, Y, vocabulary=80),
        r"whole numbers \[n, length\], got float64 \(6, 10\)$",
    ),
    "images with a vocabulary": (FederatedData(PIXELS, Y, vocabulary=80), r"\[n, length\], got uint8 \(6, 4, 5, 3\)$"),
    "no tokens": (FederatedData(TOKENS[:, :0], Y, vocabulary=80), r"hold nothing, their shape is \(6, 0\)$"),
    "a vocabulary of too many": (FederatedData(TOKENS, Y, vocabulary=257), "whole number, 1 to 256, .*it is 257$"),
    "a vocabulary that is a text": (FederatedData(TOKENS, Y, vocabulary="abc"), "1 to 256, .*it is 'abc'$"),
    "pixels with channels first": ((np.zeros((6, 3, 8, 8), np.uint8), Y), r"moveaxis\(x, 1, -1\) puts them last"),
    "floats with channels first": (
        (np.zeros((6, 1, 8, 8)), Y),
        r"puts them last; if they do .*swapaxes\(x, 1, 2\)$",
    ),
    "two kinds of samples": (
        (PIXELS, Y, TEST_PIXELS / 255, TEST_Y),
        r"samples uint8 \(4, 5, 3\) and test samples float32 \(4, 5, 3\) must agree",
    ),
    "unequal rows": (([[1.0], [1.0, 2.0]], [0, 1]), "the samples are no array.*inhomogeneous"),
    "a tensor on a GPU": ((OnTheGPU(), Y), r"no array \(can't convert cuda:0 device type tensor to numpy\.\)$"),
    "labels as floats": ((NUMBERS, Y.astype(float)), r"labels must be integers, got float64: y\.astype\(int\)$"),
    "labels as truth values": ((NUMBERS, Y > 1), r"got bool: y\.astype\(int\)$"),
    "labels that are infinite": ((NUMBERS, np.where(Y > 1, np.inf, Y)), r"numbers of classes, and inf is none$"),
    "what is no class": ((NUMBERS, Y / 4), r"numbers of classes, and 0\.5 is none$"),
    "labels as names": ((NUMBERS, list("abcabc")), rf"got <U1: {UNIQUE}"),
    "labels of both parts as names": (
        (NUMBERS, list("abcabc"), TEST_NUMBERS, list("ca")),
        r"got <U1: numpy\.split\(numpy\.unique\(numpy\.concatenate\(\[y, y_test\]\), .* the classes of both parts$",
    ),
    "labels of the test part as objects": (
        (NUMBERS, Y, TEST_NUMBERS, np.array(["c", "a"], object)),
        r"the test labels must be integers, got object: numpy\.split\(.* of both parts$",
    ),
    "labels as objects": ((NUMBERS, np.array(list("abcabc"), object)), rf"got object: {UNIQUE}"),
    "labels that are postal codes": ((NUMBERS, 10_000 + Y), rf"the largest of 3 different ones is 10002: {UNIQUE}"),
    "one-hot labels": ((NUMBERS, ONE_HOT), r"\[n\], got \(6, 3\): y\.argmax\(1\) gives these$"),
    "one-hot labels as integers": ((NUMBERS, ONE_HOT.astype(int)), r"y\.argmax\(1\) gives these$"),
    "a column of labels": ((NUMBERS, Y[:, None]), r"got \(6, 1\): y\.ravel\(\) makes them so$"),
    "several labels": ((NUMBERS, np.ones((6, 3))), r"class numbers \[n\], got \(6, 3\)$"),
    "samples alone": (NUMBERS, r"data = 'ndarray' is not usable: \(x, y\) or "),
    "three arrays": ((NUMBERS, Y, TEST_NUMBERS), "data = 'tuple of 3' is not usable"),
    "clients as lists": (
        [list(PART), list(PART)],
        r"data = 'list of list, list' is.*a list of tuples of arrays, one for",
    ),
    "clients as tuples and lists": ([(*PART, *PART), [*PART, *PART]], r"'list of tuple, list' is.*a list of tuples of"),
    "clients in a tuple": (
        (PART,) * 4,
        r"'tuple of tuple, tuple, tuple, tuple' is.*a list of tuples of arrays, one for",
    ),
    "a table": ({"x": NUMBERS, "y": Y}, r"data = 'dict' is not usable: \(x, y\)"),
    "a loader": (Loader(Samples(NUMBERS, Y)), "of a DataLoader, take its .dataset$"),
    "samples without a label": (Samples([], []), "the train part holds nothing"),
    "samples that are no pair": (Triples(NUMBERS, Y), r"each sample must be \(x, y\), and \[0\] is tuple$"),
    "samples of several shapes": (
        Samples([NUMBERS[0], NUMBERS[1, :5]], Y),
        r"x must have one shape: that of sample 0 is \(7,\), and of sample 1 \(5,\)",
    ),
    "clients of two kinds": ([PART, (*PART, *PART)], r"tuple \(x, y\) for each client.*with \[\] for .*are 2, 4$"),
    "a client with a label too few": ([PART, (NUMBERS, Y[1:])], r"client 1 has samples \(6, 7\) and labels \(5,\)"),
    "a client with other samples": (
        [PART, (NUMBERS[:, 1:], Y)],
        r"those of client 0 are float64 \(7,\), and of client 1 float64 \(6,\)",
    ),
    "a client with samples of another type": (
        [PART, (NUMBERS.astype(np.float32), Y)],
        r"one type and shape: those of client 0 are float64 \(7,\), and of client 1 float32 \(7,\)",
    ),
    "hidden samples": ((np.ma.masked_equal(NUMBERS, NUMBERS[0, 0]), Y), "the samples are a masked array with entries"),
    "a sparse matrix": ((csr_matrix(NUMBERS), Y), r"the samples are a sparse matrix; give the array: \.toarray\(\)$"),
    "no labels": (FederatedData(NUMBERS, None), "FederatedData needs x and y"),
    "users and clients": (FederatedData(*PART, users=Y, clients=[[0, 1]]), "not both"),
    "users of too few": (FederatedData(*PART, users=Y[1:]), r"users must be integers or strings \[6\]"),
    "no clients": (FederatedData(*PART, clients=[]), "row numbers, integers"),
    "a number of clients": (FederatedData(*PART, clients=4), "row numbers, integers"),
    "a number of clients in an array": (FederatedData(*PART, clients=np.array(4)), "row numbers, integers"),
    "rows that are none": (FederatedData(*PART, clients=[[0.5, 1]]), r"integers.*; client 0 has float64 \(2,\)$"),
    "clients in a dict": (FederatedData(*PART, clients={0: [0, 1]}), r"got a dict: list\(clients\.values\(\)\)$"),
    "masks": (
        FederatedData(*PART, clients=[[0, 1], Y > 1]),
        r"client 1 has bool \(6,\): numpy\.flatnonzero\(mask\)$",
    ),
    "a data set for each client": ([Samples(*PART)] * 4, r"data = 'list of 4' is not usable: \(x, y\) or "),
    "rows that there are not": (FederatedData(*PART, clients=[[0, 1], [2, 6]]), "0 to 5, and client 1 has row 6"),
    "a row of two": (FederatedData(*PART, clients=[[0, 1], [2, 1]]), "two clients have row 1$"),
    "a row twice": (FederatedData(*PART, clients=[[0, 1, 0]]), "client 0 has row 0 twice"),
    "a client without rows": (FederatedData(*PART, clients=[[0, 1], []]), "needs a row or more; .* without, client 1$"),
    "many clients without rows": (
        FederatedData(*PART, clients=[[], [0, 1], *[[]] * 6]),
        "leave out those without, clients 0, 2, 3, 4, 5 and 2 more$",
    ),
    "the first client without samples": ([([], []), PART, PART], "leave out those without, client 0$"),
    "two clients without samples": (
        [PART, ([], []), PART, (NUMBERS[:0], Y[:0])],
        "each client needs samples; leave out those without, clients 1, 3$",
    ),
    "a client without samples of either part": (
        [(*PART, *PART), (NUMBERS[:0], Y[:0]) * 2],
        "leave out those without, client 1$",
    ),
    "clients that nothing is to test": ([(*PART, [], [])] * 2, r"no client has test samples: give a tuple \(x, y\)"),
    "clients that nothing is to train": ([([], [], *PART)] * 2, r"no client has training samples: give a tuple"),
}


def test_maps_of_a_few_pixels_with_many_channels_are_not_taken_for_channels_first():
    for shape in ((6, 3, 3, 200), (6, 4, 4, 512), (6, 2, 9, 3)):
        assert as_dataset((np.zeros(shape, np.float32), Y)).images.shape == shape


@pytest.mark.parametrize(("data", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(data, message):
    with pytest.raises(ConfigError, match=message) as caught:
        as_dataset(data)
    assert caught.value.field == "data"
    assert "\n" not in str(caught.value)


def config(clients=5, model=None, **sections):
    tables = {
        "data": {"source": "arrays", "clients": clients, "partition": {"kind": "dirichlet", "beta": 0.5}},
        "model": model or {"name": "mlp", "hidden": 8},
        "method": {"name": "fedavg"},
        "training": {"rounds": 3, "lr": 0.05},
    }
    return Config(**{name: {**tables.get(name, {}), **sections.get(name, {})} for name in {**tables, **sections}})


PAIRS = [PART, PART]
SHORT = [(NUMBERS[:1], Y[:1])] * 2
UNTRAINED = [(NUMBERS, Y, TEST_NUMBERS, TEST_Y), *[([], [], TEST_NUMBERS, TEST_Y)] * 7]
OFFICIAL = {"partition": {"kind": "natural"}, "split": "official"}
TESTED_BY_NONE = FederatedData(*PART, TEST_NUMBERS, TEST_Y, clients=[[0, 1], [2, 3]])
WITH_ONE_TEST_SAMPLE = [(NUMBERS, Y, NUMBERS[:1], Y[:1]), (NUMBERS[:4], Y[:4], NUMBERS[:1], Y[:1])]
NATURAL = {"partition": {"kind": "natural"}}
LINE = np.zeros((20, 6, 7))


@pytest.mark.parametrize(
    ("data", "sections", "field", "message"),
    [
        (PAIRS, {"clients": 2}, "data.partition.kind", '"natural": arrays come divided among 2 clients'),
        (
            PAIRS,
            {"clients": 3, "data": NATURAL},
            "data.clients",
            "2, the clients with samples that arrays come",
        ),
        (
            SHORT,
            {"clients": 2, "data": NATURAL},
            "data.split",
            "no client would have test samples; one client or more needs two samples",
        ),
        (
            UNTRAINED,
            {"clients": 8, "data": OFFICIAL},
            "data",
            'missing for clients 1, 2, 3, 4, 5 and 2 more: leave them out, or data.split = "merge"',
        ),
        (TESTED_BY_NONE, {"clients": 2, "data": OFFICIAL}, "data.split", 'no client .* test samples; use "merge"'),
        (
            FederatedData(*PART, clients=[range(5), [5]]),
            {"clients": 2, "data": {**OFFICIAL, "test_part_share": 0.5, "seed": 1}},
            "data.test_part_share",
            "a smaller share: it leaves no training samples to client 1",
        ),
        (
            WITH_ONE_TEST_SAMPLE,
            {"clients": 2, "data": {**OFFICIAL, "samples_per_client": 5}},
            "data.samples_per_client",
            "fewer: client 1 has 4 samples, and 5 are asked for",
        ),
        (PART, {"clients": 2, "data": {"mean": 0.1}}, "data.mean", "0.5, or left out: arrays is real numbers"),
        (PART, {"clients": 2, "data": {"std": [0.5] * 7}}, "data.std", "which models read as they are"),
        (PART, {"clients": 2, "model": {"name": "cnn2"}}, "model.name", r"of shape \[7\], such as mlp"),
        (PART, {"clients": 2, "model": {"name": "resnet18"}}, "model.name", r"\[7\].* for images \[h, w, c\]"),
        ((LINE, LINE[:, 0, 0] > 1), {"clients": 2}, "data", r"got bool: y\.astype"),
        ((LINE, np.arange(20)), {"clients": 2, "model": {"name": "cnn_digits"}}, "model.name", r"of shape \[6x7\]"),
        (
            PART,
            {"clients": 2, "model": {"name": "char_lstm"}},
            "model.name",
            "80 symbols, and arrays is real .*vocabulary=80",
        ),
        (
            (LINE[..., None], np.arange(20)),
            {"clients": 2, "training": {"augment": "crop_flip"}},
            "training.augment",
            "arrays is real numbers, not pixels, and 'crop_flip' augments images",
        ),
        (
            PART,
            {"clients": 2, "method": {"name": "fedecouple"}},
            "training.copies",
            r"not pixels, and 'concat' .* \(it is what fedecouple does unless told otherwise\)",
        ),
    ],
)
def test_data_that_do_not_fit_the_config_are_one_line_before_anything_is_compiled(
    data, sections, field, message, monkeypatch
):
    monkeypatch.setattr("fedjax_pfl.experiment.programs._compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ConfigError, match=message) as caught:
        simulate(config(**sections), data)
    assert caught.value.field == field


def test_what_is_no_number_is_no_sample_for_a_trained_model():
    shape, x = DataShape("arrays", (3,), 2, None, real=True), np.ones((4, 3))
    np.testing.assert_array_equal(checked_samples(x, shape), x.astype(np.float32))
    x[1, 2], x[3] = np.nan, np.inf
    with pytest.raises(ConfigError, match=r"x = 'float64\[4, 3\]' is not usable: finite numbers; 4 of 12 are not"):
        checked_samples(x, shape)


def test_the_memory_of_floats_is_four_bytes_each():
    """Of the same pixels, as numbers: the samples take three bytes more each, and so does what is resident."""
    digits = load("digits")
    floats = digits._replace(images=digits.images.astype(np.float32))
    found = {}
    for name, made in (("pixels", digits), ("floats", floats)):
        wanted = config()
        federation = divide(made, clients=5, partition={"kind": "iid"}, seed=0)[0]
        found[name] = survey(make_engine(wanted, shape_of(made)), federation)[0]
    assert found["floats"].samples - found["pixels"].samples == 3 * digits.images.size
    assert found["floats"].resident - found["pixels"].resident == 3 * digits.images.size


def test_next_characters_are_learnt_from_tokens():
    """The tokens of a window go up by one each; the label is the token that would follow."""
    first = np.random.default_rng(0).integers(0, 8, 400)
    windows, following = (first[:, None] + np.arange(16)) % 8, first % 8
    data = FederatedData(windows, following, users=first % 4, vocabulary=80)
    made = as_dataset(data)
    assert (made.images.dtype, made.images.shape, made.vocabulary, made.classes) == (np.uint8, (400, 16), 80, 8)
    model = {"name": "char_lstm", "embedding": 4, "hidden": 8}
    result = simulate(config(model=model, method={"name": "local"}, training={"rounds": 20, "lr": 2.0}), data)
    assert result.history["pre.accuracy"][-1] > 0.9
    x, client = windows[:40], 2
    np.testing.assert_array_equal(result.predict(x, client), result.predict(x.astype(np.uint8), client))
    for wrong, message in ((x + 80, "a symbol 8"), (x - 1, "a symbol -1"), (x / 1, r"'float64\[40, 16\]'")):
        with pytest.raises(ConfigError, match=message):
            result.predict(wrong, client)


def test_breast_cancer_is_learnt_from_thirty_numbers():
    x, y = load_breast_cancer(return_X_y=True)
    result = simulate(config(), ((x - x.mean(axis=0)) / x.std(axis=0), y))
    assert sum(result.partition["sizes"]) == 569
    assert result.history["pre.accuracy"][-1] > result.summary["majority_class"]["accuracy"] + 0.1


def test_a_table_like_covtype_is_learnt():
    x, y = make_classification(
        700, 54, n_informative=20, n_classes=7, n_clusters_per_class=1, class_sep=2.5, random_state=0
    )
    result = simulate(config(data={"partition": {"kind": "dirichlet", "beta": 2.0}}, training={"lr": 0.1}), (x, y))
    assert result.history["pre.accuracy"][-1] > result.summary["majority_class"]["accuracy"] + 0.2
