"""Protocols by name: ``protocol = "fedpac"`` in a config stands for the values of `PROTOCOLS` that are not given.

A protocol consists of the settings that all runs of a paper or a benchmark share, whatever the method: partition and
split, model, local training, participation. The data set, its normalisation, the method and how a run is carried out
are not part of it. The table in ``docs/protocol.md`` marks which values the paper states and which are our reading.
"""

import copy
from collections.abc import Mapping
from typing import Any

from fedjax_pfl.errors import ConfigError, one_of

Tables = dict[str, dict[str, Any]]


def _protocol(data: dict[str, Any], model: dict[str, Any], training: dict[str, Any]) -> Tables:
    """All values of a protocol. All set the same fields, so that one can replace another, but for `test_part_share`."""
    apart = {"samples_per_client": None, "test_classes": "all", "stratified": False, "seed": None}
    if data["split"] == "merge":
        apart["test_part_share"] = None  # for the official split, this depends on the data set
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


# The local training of FedPAC's code on CIFAR-10. FedeCouple has FedPAC's setting and model, but its paper gives only
# rounds and epochs.
_FEDPAC_TRAINING = {
    "rounds": 200,
    "epochs": 5,
    "batch_size": 50,
    "lr": 0.02,
    "momentum": 0.5,
    "weight_decay": 5e-4,
    "augment": "crop_flip",
}
# 600 training and 300 test images per client.
_FEDPAC_DATA = {"clients": 20, "split": "official", "test_share": 1 / 3, "samples_per_client": 600}
# Training and test part are merged; a quarter of each client's samples is for testing. Seed 1 gives exactly PFLlib's
# client sizes.
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
    """Section -> values of a protocol, as a copy that the caller may change.

    Raises:
      ConfigError: field ``protocol``: there is no protocol of this name.
    """
    if not isinstance(protocol, str) or protocol not in PROTOCOLS:
        raise ConfigError("protocol", protocol, one_of(protocol, PROTOCOLS))
    return copy.deepcopy(PROTOCOLS[protocol])


def with_defaults_of(given: Any, table: Mapping[str, Any]) -> Any:
    """The given table, completed by the values of another table.

    If the given table names another model or kind of partition than the other table, nothing is added to it.

    Args:
      given: a table, possibly nested; anything else is returned unchanged, for the config's checks to refuse.
      table: the table with the values to add.
    """
    if not isinstance(given, Mapping) or any(
        given.get(key, table[key]) != table[key] for key in {"name", "kind"} & {*table}
    ):
        return given
    below = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    inner = {key: with_defaults_of(given.get(key, {}), value) for key, value in below.items()}
    return {**table, **given, **inner}
