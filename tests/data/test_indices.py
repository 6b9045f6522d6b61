"""What a run leaves in ``partition.npz`` runs again as it was; row lists; PFLlib's folder layout."""

import json

import jax
import numpy as np
import pytest

from fedjax_pfl import Config, ConfigError, simulate
from fedjax_pfl.cli.commands import main
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.divide import deal
from fedjax_pfl.data.pfllib import export
from fedjax_pfl.data.rows import Holdings, Split, read, save
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.record import RunDirectory
from tests.data.labels import TEN, divide

CLIENTS, TRAIN_ROWS, FIELD = 4, 150, "data.partition.file"
MADE = Dataset("made", np.zeros((200, 1, 1, 1), np.uint8), TEN, 10, TRAIN_ROWS, np.arange(200) % 9)


def dealt(dataset=MADE, **fields):
    return deal(dataset, **{"clients": CLIENTS, "partition": {"kind": "iid"}, "seed": 3, **fields})


def from_file(path, dataset=MADE, **fields):
    return dealt(dataset, partition={"kind": "indices", "file": str(path)}, **fields)


def write(path, *lists, **arrays):
    np.savez(path, **{str(client): rows for client, rows in enumerate(lists)}, **arrays)
    return path


def test_the_file_of_a_run_holds_rows_and_offsets(tmp_path):
    split = (
        Split(np.array([5, 2]), np.array([], int), np.array([9])),
        Split(np.array([4]), np.array([7]), np.array([1, 0])),
    )
    save(tmp_path / "partition.npz", Holdings(list(split), np.array([0, 1, 9]), "abc"))
    with np.load(tmp_path / "partition.npz", allow_pickle=False) as held:
        found = {name: held[name].tolist() for name in held.files}
    assert found == {
        "train": [5, 2, 4],
        "train_offsets": [0, 2, 3],
        "validation": [7],
        "validation_offsets": [0, 0, 1],
        "test": [9, 1, 0],
        "test_offsets": [0, 1, 3],
        "pooled": [0, 1, 9],
        "hash": "abc",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"validation_share": 0.2},
        {"partition": {"kind": "dirichlet"}, "split": "official", "validation_share": 0.3},
        {"partition": {"kind": "natural"}, "split": "official", "clients": 5},
        {"new_clients": 0.5},
        {"samples_per_client": 9, "test_share": 0.6},
        {
            "partition": {"kind": "pathological", "classes_per_client": 3, "overlap": True},
            "split": "official",
            "samples_per_client": 40,
        },
    ],
)
def test_a_file_gives_back_the_rows_in_their_order_whatever_the_seed(tmp_path, fields):
    holdings, record = dealt(**fields)
    save(tmp_path / "partition.npz", holdings)
    others = {name: value for name, value in fields.items() if name != "partition"}
    again, other = from_file(tmp_path / "partition.npz", **others, seed=8, stratified=True)
    jax.tree.map(np.testing.assert_array_equal, again[:2], holdings[:2])
    assert again.hash == holdings.hash == other["hash"]
    assert other["notes"][0] == f"the rows for training, validation and test are those of {tmp_path / 'partition.npz'}"
    assert other["notes"][1:] == [note for note in record["notes"] if "never train" in note]
    record.pop("users", None)  # the rows of a file may be of several users
    assert {**record, "notes": []} == {**other, "notes": []}


def test_validation_rows_of_a_file_are_used_if_there_is_a_share(tmp_path):
    holdings, _ = dealt(validation_share=0.2)
    save(tmp_path / "a.npz", holdings)
    partition = {"kind": "indices", "file": str(tmp_path / "a.npz")}
    fields = {"clients": CLIENTS, "partition": partition, "seed": 0}
    with_them, without = (divide(MADE, **fields, validation_share=share) for share in (0.9, 0.0))
    np.testing.assert_array_equal(with_them[0].validation.count, [len(rows.validation) for rows in holdings.splits])
    assert without[0].validation is None
    assert without[1]["notes"][-1] == "its 28 rows for validation are not used: data.validation_share is 0"
    assert with_them[1]["hash"] == without[1]["hash"] == holdings.hash
    judged, _ = divide(MADE, **fields, validation_share=0.1, evaluate_on="validation")
    rows = sorted(np.concatenate([rows.validation for rows in holdings.splits]).tolist())
    assert judged.pooled.index.ravel().tolist() == rows


def test_a_file_of_ones_own_may_leave_out_what_follows_or_is_nothing(tmp_path):
    uses = {"train": [3, 1, 8, 9], "train_offsets": [0, 3, 4], "test": [7, 0, 7], "test_offsets": [0, 2, 3]}
    found = read(str(write(tmp_path / "a.npz", **uses)))
    expected = [([3, 1, 8], [], [7, 0]), ([9], [], [7])]  # row 7 is tested on twice, and pooled once
    assert [tuple(rows.tolist() for rows in split) for split in found.splits] == expected
    assert (found.pooled.tolist(), found.hash) == ([0, 7], None)


LISTS = [7, 3, 120, 9], [60, 61, 62, 2, 5, 8], [1, 0], [140, 100, 90]


def test_row_lists_are_the_clients_and_are_split_as_ever(tmp_path):
    path = write(tmp_path / "lists.npz", *LISTS)
    holdings, record = from_file(path, validation_share=0.34)
    assert [sorted(np.concatenate(split).tolist()) for split in holdings.splits] == [sorted(rows) for rows in LISTS]
    assert record["n_test"] == [1, 2, 1, 1]
    assert record["n_validation"] == [1, 1, 0, 0]
    assert record["notes"] == ["2 clients of 4 without validation samples: scores on validation samples leave them out"]
    official, _ = from_file(path, split="official")
    assert [sorted(split.train.tolist()) for split in official.splits] == [sorted(rows) for rows in LISTS]
    assert min(min(split.test) for split in official.splits) >= TRAIN_ROWS
    np.testing.assert_array_equal(official.pooled, range(TRAIN_ROWS, 200))


def test_clients_of_a_file_may_have_one_row_or_no_test_row(tmp_path):
    lists = write(tmp_path / "lists.npz", [7, 3, 120, 9], [60], [1, 0])
    _, record = from_file(lists, clients=3, validation_share=0.4)
    assert (record["n_train"], record["n_validation"], record["n_test"]) == ([2, 1, 1], [1, 0, 0], [1, 0, 1])
    untested = "1 client of 3 without test samples: scores on test samples leave them out"
    unvalidated = "2 clients of 3 without validation samples: scores on validation samples leave them out"
    assert record["notes"] == [untested, unvalidated]
    assert min(from_file(lists, clients=3, split="official")[1]["n_test"]) == 1  # drawn from the test part for each
    run = write(tmp_path / "run.npz", train=[3, 1, 4], train_offsets=[0, 1, 2, 3], test=[7], test_offsets=[0, 0, 1, 1])
    holdings, record = from_file(run, clients=3)
    assert (record["n_train"], record["n_test"], holdings.pooled.tolist()) == ([1, 1, 1], [0, 1, 0], [7])
    assert record["notes"][1:] == ["2 clients of 3 without test samples: scores on test samples leave them out"]


RUN = {"train": [3, 1, 8, 9], "train_offsets": [0, 3, 4], "test": [0, 7], "test_offsets": [0, 1, 2]}
MISTAKES = {
    "other clients": ((LISTS[:3], {}), {}, "data.clients", "3, the number of clients in"),
    "other clients in a run": (((), RUN), {}, "data.clients", "2, the number of clients in"),
    "a row too far": ((([0, 1], [2, 200]), {}), {"clients": 2}, FIELD, "0 to 199, and client 1 has row 200"),
    "a row below": ((([0, -1], [2, 20]), {}), {"clients": 2}, FIELD, "client 0 has row -1"),
    "a row of two": ((([0, 1], [2, 1]), {}), {"clients": 2}, FIELD, "two clients have row 1$"),
    "a row twice": ((([0, 1, 1], [2, 4]), {}), {"clients": 2}, FIELD, "client 0 has row 1 twice"),
    "one row": ((([0], [2]), {}), {"clients": 2}, "data.split", "no client would have test samples"),
    "none": ((([0, 1], []), {}), {"clients": 2}, FIELD, "each client needs a row or more; .* without, client 1$"),
    "no row numbers": ((([0.0, 1.0],), {}), {"clients": 1}, FIELD, r"those of client 0 are float64 \(2,\)"),
    "a size": ((LISTS, {}), {"samples_per_client": 2}, "data.samples_per_client", "which samples each client gets"),
    "a test row": ((([0, 1], [2, 180]), {}), {"clients": 2, "split": "official"}, FIELD, "client 1 has row 180"),
    "other names": (((), {"a": [1], "b": [2]}), {}, FIELD, "under 0, 1, ...; present: a, b"),
    "a gap": (((), {"0": [1], "2": [2]}), {}, FIELD, "present: 0, 2"),
    "nothing": (((), {}), {}, FIELD, "present: none"),
    "no offsets": (((), {"train": [1], "test": [2]}), {}, FIELD, "needs an array 'train_offsets'"),
    "wrong offsets": (((), {**RUN, "test_offsets": [0, 1, 3]}), {}, FIELD, "test_offsets must ascend from 0 to 2"),
    "offsets that begin late": (
        ((), {**RUN, "test_offsets": [1, 1, 2]}),
        {},
        FIELD,
        "test_offsets must ascend from 0 to 2",
    ),
    "offsets that fall": (
        ((), {**RUN, "train_offsets": [0, 5, 4]}),
        {},
        FIELD,
        "train_offsets must ascend from 0 to 4",
    ),
    "fewer tested": (((), {**RUN, "test_offsets": [0, 2]}), {}, FIELD, "2 clients that train, and 1 that are tested"),
    "nothing to train on": (
        ((), {**RUN, "train_offsets": [0, 4, 4]}),
        {"clients": 2},
        FIELD,
        "each client needs a training row or more; leave out those without, client 1$",
    ),
    "nothing to test on": (
        ((), {**RUN, "test": [], "test_offsets": [0, 0, 0], "pooled": [0, 7]}),
        {"clients": 2},
        FIELD,
        "one client or more needs a test row",
    ),
    "trained on and tested on": (
        ((), {**RUN, "test": [0, 8]}),
        {"clients": 2},
        FIELD,
        "row 8 is for training .* and test$",
    ),
    "validated and tested on": (
        ((), {**RUN, "validation": [7], "validation_offsets": [0, 1, 1]}),
        {"clients": 2},
        FIELD,
        r"row 7 is for training \(or validation\) and test$",
    ),
    "trained on twice": (((), {**RUN, "train": [3, 3, 8, 9]}), {"clients": 2}, FIELD, "client 0 has row 3 twice"),
    "nothing pooled": (((), {**RUN, "pooled": []}), {"clients": 2}, FIELD, "pooled needs a row or more; without"),
    "pooled too far": (((), {**RUN, "pooled": [0, 7, 999]}), {"clients": 2}, FIELD, "pooled test set has row 999"),
    "other labels": (((), {**RUN, "hash": "another"}), {"clients": 2}, FIELD, "the labels of made are others"),
    "no validation": (
        ((), RUN),
        {"clients": 2, "validation_share": 0.2},
        "data.validation_share",
        "0: .* has no rows to validate on",
    ),
}


@pytest.mark.parametrize(("content", "fields", "field", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(tmp_path, content, fields, field, message):
    lists, arrays = content
    path = write(tmp_path / "rows.npz", *lists, **arrays)
    with pytest.raises(ConfigError, match=message) as caught:
        from_file(path, **fields)
    assert caught.value.field == field
    given = {"clients": CLIENTS, "split": "merge", **fields}
    assert caught.value.value == (str(path) if field == FIELD else given[field[5:]])


def test_files_that_are_none(tmp_path):
    text, pickled = tmp_path / "a.npz", tmp_path / "b.npz"
    text.write_text("0: 1, 2")
    np.savez(pickled, **{"0": np.array([[1], [2, 3]], object)})
    for path, message in (
        (tmp_path / "none.npz", "there is no such file; looked for /.*none.npz$"),
        (text, "it is no npz file; numpy.savez writes one"),
        (pickled, "cannot be read as plain arrays"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            from_file(path)
        assert (caught.value.field, caught.value.value) == (FIELD, str(path))
    with pytest.raises(ConfigError, match="it has no default and must be given") as caught:
        Config(data={"source": "digits", "partition": {"kind": "indices"}}, method={"name": "fedavg"})
    assert caught.value.field == FIELD


# --- Runs ------------------------------------------------------------------------------------------------------------


def config(out, **data):
    fields = {"source": "digits", "clients": CLIENTS, "samples_per_client": 20, "validation_share": 0.25}
    return Config(
        data={**fields, "partition": {"kind": "dirichlet", "beta": 0.5}, **data},
        model={"name": "mlp", "hidden": 4},
        method={"name": "fedavg"},
        training={"rounds": 2, "lr": 0.1},
        run={"out": str(out)},
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    return out, simulate(config(out))


def test_a_run_from_the_file_of_another_is_that_run(first, tmp_path):
    out, result = first
    wanted = config(tmp_path / "again", partition={"kind": "indices", "file": str(out / "partition.npz")}, seed=9)
    again = simulate(wanted)
    assert again.summary["partition_hash"] == result.summary["partition_hash"]
    assert {name: column.tolist() for name, column in again.history.items() if name != "seconds"} == {
        name: column.tolist() for name, column in result.history.items() if name != "seconds"
    }
    assert (tmp_path / "again" / "partition.npz").read_bytes() == (out / "partition.npz").read_bytes()


def test_the_rows_of_a_run_are_those_that_its_manifest_counts(first):
    out, result = first
    labels = load("digits").labels
    with np.load(out / "partition.npz") as held:
        for use in ("train", "validation", "test"):
            rows = np.split(held[use], held[f"{use}_offsets"][1:-1])
            counts = [np.bincount(labels[part], minlength=10).tolist() for part in rows]
            assert counts == result.partition[f"{use}_class_counts"]
        assert str(held["hash"]) == result.partition["hash"]


def test_the_file_of_a_run_goes_with_its_directory(tmp_path):
    holdings, record = dealt()
    RunDirectory(tmp_path / "run").begin("", record, holdings)
    other = Holdings(holdings.splits[:2], holdings.pooled, "other")
    RunDirectory(tmp_path / "run", overwrite=True).begin("", record, other)
    assert len(read(str(tmp_path / "run" / "partition.npz")).splits) == 2


# --- PFLlib ----------------------------------------------------------------------------------------------------------


def as_pfllib_reads(folder, part, client):
    """PFLlib's ``read_data``, which knows a client by its number."""
    with (folder / part / f"{client}.npz").open("rb") as file:
        return np.load(file, allow_pickle=True)["data"].tolist()


COLOURS = np.random.default_rng(0).integers(0, 256, (200, 4, 5, 3), np.uint8)
PIXELS = {"batch_size": 10, "mean": 0.5, "std": 0.5}


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (COLOURS, ((COLOURS / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2)),  # ToTensor, Normalize(0.5, 0.5)
        (COLOURS / np.float32(9), (COLOURS / np.float32(9)).transpose(0, 3, 1, 2)),
        (COLOURS[:, 0, :, 0] / np.float32(9), COLOURS[:, 0, :, 0] / np.float32(9)),
    ],
)
def test_pfllib_reads_every_client_s_samples(tmp_path, images, expected):
    dataset = MADE._replace(images=images)
    holdings, record = dealt(dataset, partition={"kind": "dirichlet", "beta": 0.7})
    export(str(tmp_path / "made"), dataset, holdings, partition={"kind": "dirichlet", "beta": 0.7}, **PIXELS)
    for part in ("train", "test"):
        assert len(list((tmp_path / "made" / part).iterdir())) == CLIENTS
        for client, split in enumerate(holdings.splits):
            held, rows = as_pfllib_reads(tmp_path / "made", part, client), getattr(split, part)
            np.testing.assert_allclose(held["x"], expected[rows], atol=1e-6)
            np.testing.assert_array_equal(held["y"], TEN[rows])
            assert (held["x"].dtype, held["y"].dtype) == (np.float32, np.int64)
    found = json.loads((tmp_path / "made" / "config.json").read_text())
    counts = found.pop("Size of samples for labels in clients")
    assert [{k: n for k, n in enumerate(row) if n} for row in record["class_counts"]] == [dict(row) for row in counts]
    assert found == {
        "num_clients": CLIENTS,
        "num_classes": 10,
        "non_iid": True,
        "balance": False,
        "partition": "dir",
        "alpha": 0.7,
        "batch_size": 10,
    }


@pytest.mark.parametrize(("larger", "balanced"), [(6, True), (7, False)])
def test_pfllib_is_told_that_clients_are_balanced_up_to_one_sample(tmp_path, larger, balanced):
    splits = [Split(np.arange(size), np.zeros(0, int), np.array([100])) for size in (5, larger)]
    holdings = Holdings(splits, np.array([100]), None)
    export(str(tmp_path / "made"), MADE, holdings, partition={"kind": "iid"}, **PIXELS)
    assert json.loads((tmp_path / "made" / "config.json").read_text())["balance"] is balanced


@pytest.mark.parametrize(
    ("kind", "said"), [("iid", (False, "iid")), ("pathological", (True, "pat")), ("natural", (True, "natural"))]
)
def test_pfllib_is_told_of_the_partition_in_its_own_words(tmp_path, kind, said):
    holdings = Holdings([Split(np.arange(5), np.zeros(0, int), np.array([100]))], np.array([100]), None)
    export(str(tmp_path / "made"), MADE, holdings, partition={"kind": kind}, **PIXELS)
    found = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (found["non_iid"], found["partition"]) == said
    assert found["alpha"] is None


def test_a_config_becomes_a_folder_for_pfllib(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.toml").write_text(config("unused", validation_share=0.0).replace({"run.out": None}).to_toml())
    monkeypatch.setattr(
        "sys.argv", ["fedjax-pfl", "partition", str(tmp_path / "config.toml"), "--pfllib", str(tmp_path / "p")]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (None, 0)
    assert f"written to {tmp_path / 'p'}, for PFLlib" in capsys.readouterr().out
    assert as_pfllib_reads(tmp_path / "p", "train", 3)["x"].shape == (20, 1, 8, 8)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "a folder that is new or empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scale", "field"), [({"mean": []}, "data.mean"), ({"mean": [0.5] * 3, "std": [0.5, 0.5]}, "data.std")]
)
def test_pixels_for_pfllib_are_scaled_by_one_number_or_one_per_channel(tmp_path, scale, field):
    dataset, folder = MADE._replace(images=COLOURS), tmp_path / "new"
    holdings, _ = dealt(dataset)
    with pytest.raises(ConfigError, match="one number, or one for each of the 3 channels") as caught:
        export(str(folder), dataset, holdings, partition={"kind": "iid"}, **PIXELS | scale)
    assert caught.value.field == field
    assert not folder.exists()
    export(str(folder), dataset, holdings, partition={"kind": "iid"}, **PIXELS | {"mean": [0.0, 0.5, 1.0]})
    expected = ((COLOURS[holdings.splits[0].train] / 255 - [0.0, 0.5, 1.0]) / 0.5).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(as_pfllib_reads(folder, "train", 0)["x"], expected, atol=1e-6)


def test_what_pfllib_has_not_is_refused(tmp_path):
    validated, _ = dealt(validation_share=0.3)
    text = MADE._replace(images=np.zeros((200, 5), np.uint8), vocabulary=80)
    some, none = np.array([0, 1]), np.arange(0)
    untested = Holdings([Split(some[:1], none, some[1:]), Split(some + 2, none, none)], some[1:], "")
    for dataset, holdings, message in (
        (MADE, validated, "data.validation_share = 0: PFLlib has no validation samples"),
        (text, dealt(text)[0], "images or numbers: made is text"),
        (MADE, untested, "test samples for client 1: PFLlib scores every client"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            export(str(tmp_path / "new"), dataset, holdings, partition={"kind": "iid"}, **PIXELS)
        assert caught.value.field == "--pfllib"
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match=r"a folder that can be written \(File name too long\)"):
        export(str(tmp_path / ("a" * 300)), MADE, dealt()[0], partition={"kind": "iid"}, **PIXELS)
