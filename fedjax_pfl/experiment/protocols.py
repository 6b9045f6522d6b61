"""Protocols by name: ``protocol = "fedpac"`` in a config stands for values of `PROTOCOLS` that it does not give itself.

A protocol is what all runs of a paper or a benchmark have in common, whatever the method: partition and split, model,
local training, participation. The data set, what normalises its pixels, the method and how a run is carried out are not
part of it. The table in ``docs/protocol.md`` tells what a paper states from what is our reading.
"""

import copy
from collections.abc import Mapping
from typing import Any

from fedjax_pfl.errors import ConfigError

Tables = dict[str, dict[str, Any]]


def _protocol(data: dict[str, Any], model: dict[str, Any], training: dict[str, Any]) -> Tables:
    """All values of a protocol: what two of them differ in is given by both, so that one can take another's place."""
    apart = {"samples_per_client": None, "test_classes": "all", "stratified": False, "seed": None}
    if data["split"] == "merge":
        apart["test_part_share"] = None  # of the official split, it is the data set that decides
    plain = {
        "lr_decay": 1.0,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip_norm": None,
        "drop_last": False,
        "augment": "none",
        "augment_every": "epoch",
    }
    everyone = {"ratio": 1.0, "dropout": 0.0}
    return {"data": apart | data, "model": model, "training": plain | training, "participation": everyone}


# The local training of FedPAC's code on CIFAR-10. FedeCouple, whose setting and model are FedPAC's, gives rounds and
# epochs alone.
_FEDPAC_TRAINING = {
    "rounds": 200,
    "epochs": 5,
    "batch_size": 50,
    "lr": 0.02,
    "momentum": 0.5,
    "weight_decay": 5e-4,
    "augment": "crop_flip",
}
# 600 images to train on and 300 to test on.
_FEDPAC_DATA = {"clients": 20, "split": "official", "test_share": 1 / 3, "samples_per_client": 600}
# Training and test part in one, a quarter of each client's for testing. Seed 1 gives PFLlib's very client sizes.
_PFLLIB_DATA = {"clients": 20, "split": "merge", "test_share": 0.25, "seed": 1}
_PFLLIB_DIRICHLET = {"kind": "dirichlet", "beta": 0.1, "style": "pfllib"}

PROTOCOLS: dict[str, Tables] = {
    "fedpac": _protocol(
        data=_FEDPAC_DATA | {"partition": {"kind": "weak_pathological", "s": 20.0, "style": "fedpac"}},
        model={"name": "cnn3"},
        training=_FEDPAC_TRAINING,
    ),
    "pfllib": _protocol(
        data=_PFLLIB_DATA | {"partition": _PFLLIB_DIRICHLET},
        model={"name": "cnn2"},
        training={"rounds": 2000, "epochs": 1, "batch_size": 10, "lr": 0.005, "drop_last": True},
    ),
    "fedecouple": _protocol(
        data=_FEDPAC_DATA | {"partition": {"kind": "weak_pathological", "s": 20.0, "style": "random"}},
        model={"name": "cnn3"},
        training=_FEDPAC_TRAINING,
    ),
    "fedfcd": _protocol(
        data=_PFLLIB_DATA | {"partition": {"kind": "pathological", "classes_per_client": 2, "style": "pfllib"}},
        model={"name": "mlp"},
        training={"rounds": 500, "epochs": 1, "batch_size": 10, "lr": 0.01},
    ),
    "pgfedsplit": _protocol(
        data=_PFLLIB_DATA | {"partition": _PFLLIB_DIRICHLET},
        model={"name": "cnn2"},
        training={"rounds": 200, "epochs": 5, "batch_size": 64, "lr": 0.005},
    ),
    "fedcpd": _protocol(
        data=_PFLLIB_DATA | {"partition": _PFLLIB_DIRICHLET},
        model={"name": "cnn2"},
        training={"rounds": 200, "epochs": 1, "batch_size": 10, "lr": 0.01},
    ),
    "pfedcspc": _protocol(
        data={
            "clients": 10,
            "partition": {"kind": "dirichlet", "beta": 0.5, "style": "plain"},
            "split": "official",
            "test_share": 1 / 6,
        },
        model={"name": "cnn_proj"},
        training={
            "rounds": 100,
            "epochs": 10,
            "batch_size": 64,
            "lr": 0.01,
            "momentum": 0.9,
            "weight_decay": 1e-5,
            "augment": "crop_flip_reflect",
        },
    ),
}


def tables_of(protocol: Any) -> Tables:
    """The tables that a protocol gives, by section; they are the caller's own.

    Raises:
      ConfigError: field ``protocol``: there is none of this name.
    """
    if not isinstance(protocol, str) or protocol not in PROTOCOLS:
        raise ConfigError("protocol", protocol, f"one of {', '.join(PROTOCOLS)}")
    return copy.deepcopy(PROTOCOLS[protocol])


def with_defaults_of(given: Any, table: Mapping[str, Any]) -> Any:
    """A table with all that is given, and the values of another where nothing is given.

    A model or a kind of partition other than the other table's takes none of its options.

    Args:
      given: a table, perhaps with tables in it; returned as it is if it is none, for the config's checks to refuse.
      table: the other.
    """
    if not isinstance(given, Mapping) or any(
        given.get(key, table[key]) != table[key] for key in {"name", "kind"} & {*table}
    ):
        return given
    below = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    inner = {key: with_defaults_of(given.get(key, {}), value) for key, value in below.items()}
    return {**table, **given, **inner}
