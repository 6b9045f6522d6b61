"""Methods, one paper per file or package. ``METHODS`` is the table that configs name."""

from collections.abc import Callable

from fedjax_pfl.method import Method
from fedjax_pfl.methods.apfl import apfl
from fedjax_pfl.methods.ccvr import ccvr
from fedjax_pfl.methods.ditto import ditto
from fedjax_pfl.methods.fedala import fedala
from fedjax_pfl.methods.fedamp import fedamp
from fedjax_pfl.methods.fedasam import fedasam
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedavg_ft import fedavg_ft
from fedjax_pfl.methods.fedavgm import fedavgm
from fedjax_pfl.methods.fedbabu import fedbabu
from fedjax_pfl.methods.fedbn import fedbn
from fedjax_pfl.methods.fedcpd import fedcpd
from fedjax_pfl.methods.fedcrl_approx import fedcrl_approx
from fedjax_pfl.methods.feddc import feddc
from fedjax_pfl.methods.feddecorr import feddecorr
from fedjax_pfl.methods.fedecouple import fedecouple
from fedjax_pfl.methods.fedetf import fedetf
from fedjax_pfl.methods.fedfcd import fedfcd
from fedjax_pfl.methods.fedfomo import fedfomo
from fedjax_pfl.methods.fedgh import fedgh
from fedjax_pfl.methods.fednova import fednova
from fedjax_pfl.methods.fedntd import fedntd
from fedjax_pfl.methods.fedopt import fedadam, fedyogi
from fedjax_pfl.methods.fedpa import fedpa
from fedjax_pfl.methods.fedpac import fedpac
from fedjax_pfl.methods.fedper import fedper
from fedjax_pfl.methods.fedper_pp_approx import fedper_pp_approx
from fedjax_pfl.methods.fedproc import fedproc
from fedjax_pfl.methods.fedproto import fedproto
from fedjax_pfl.methods.fedprox import fedprox
from fedjax_pfl.methods.fedprox_ft import fedprox_ft
from fedjax_pfl.methods.fedrep import fedrep
from fedjax_pfl.methods.fedrod import fedrod
from fedjax_pfl.methods.fedsoup import fedsoup
from fedjax_pfl.methods.fedtgp import fedtgp
from fedjax_pfl.methods.gpfl import gpfl
from fedjax_pfl.methods.grace import grace
from fedjax_pfl.methods.heur_fedamp import heur_fedamp
from fedjax_pfl.methods.lg_fedavg import lg_fedavg
from fedjax_pfl.methods.local import local
from fedjax_pfl.methods.moon import moon
from fedjax_pfl.methods.perfedavg import perfedavg
from fedjax_pfl.methods.pfedcspc import pfedcspc
from fedjax_pfl.methods.pfedme import pfedme
from fedjax_pfl.methods.pgfedsplit import pgfedsplit
from fedjax_pfl.methods.scaffold import scaffold

METHODS: dict[str, Callable[..., Method]] = {
    "local": local,
    "fedavg": fedavg,
    "fedavg_ft": fedavg_ft,
    "fedprox": fedprox,
    "fedprox_ft": fedprox_ft,
    "scaffold": scaffold,
    "fednova": fednova,
    "feddc": feddc,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "ccvr": ccvr,
    "moon": moon,
    "fedntd": fedntd,
    "feddecorr": feddecorr,
    "fedproc": fedproc,
    "fedetf": fedetf,
    "fedasam": fedasam,
    "ditto": ditto,
    "perfedavg": perfedavg,
    "pfedme": pfedme,
    "apfl": apfl,
    "lg_fedavg": lg_fedavg,
    "fedbn": fedbn,
    "fedper": fedper,
    "fedper_pp_approx": fedper_pp_approx,
    "fedrep": fedrep,
    "fedbabu": fedbabu,
    "fedrod": fedrod,
    "fedsoup": fedsoup,
    "grace": grace,
    "fedamp": fedamp,
    "heur_fedamp": heur_fedamp,
    "fedfomo": fedfomo,
    "fedala": fedala,
    "fedcrl_approx": fedcrl_approx,
    "fedpac": fedpac,
    "fedproto": fedproto,
    "fedtgp": fedtgp,
    "fedgh": fedgh,
    "gpfl": gpfl,
    "fedpa": fedpa,
    "fedecouple": fedecouple,
    "fedfcd": fedfcd,
    "pgfedsplit": pgfedsplit,
    "fedcpd": fedcpd,
    "pfedcspc": pfedcspc,
}

__all__ = ["METHODS"]
