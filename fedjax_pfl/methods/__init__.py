"""Methods, one paper per file. ``METHODS`` is the table that configs name."""

from collections.abc import Callable

from fedjax_pfl.method import Method
from fedjax_pfl.methods.ditto import ditto
from fedjax_pfl.methods.fedala import fedala
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedavg_ft import fedavg_ft
from fedjax_pfl.methods.fedbabu import fedbabu
from fedjax_pfl.methods.fedcpd import fedcpd
from fedjax_pfl.methods.fedecouple import fedecouple
from fedjax_pfl.methods.fedfcd import fedfcd
from fedjax_pfl.methods.fedpac import fedpac
from fedjax_pfl.methods.fedper import fedper
from fedjax_pfl.methods.fedprox import fedprox
from fedjax_pfl.methods.fedprox_ft import fedprox_ft
from fedjax_pfl.methods.fedrep import fedrep
from fedjax_pfl.methods.lg_fedavg import lg_fedavg
from fedjax_pfl.methods.local import local
from fedjax_pfl.methods.pfedcspc import pfedcspc
from fedjax_pfl.methods.pgfedsplit import pgfedsplit
from fedjax_pfl.methods.scaffold import scaffold

METHODS: dict[str, Callable[..., Method]] = {
    "local": local,
    "fedavg": fedavg,
    "fedavg_ft": fedavg_ft,
    "fedprox": fedprox,
    "fedprox_ft": fedprox_ft,
    "scaffold": scaffold,
    "ditto": ditto,
    "lg_fedavg": lg_fedavg,
    "fedper": fedper,
    "fedrep": fedrep,
    "fedbabu": fedbabu,
    "fedala": fedala,
    "fedpac": fedpac,
    "fedecouple": fedecouple,
    "fedfcd": fedfcd,
    "pgfedsplit": pgfedsplit,
    "fedcpd": fedcpd,
    "pfedcspc": pfedcspc,
}

__all__ = ["METHODS"]
