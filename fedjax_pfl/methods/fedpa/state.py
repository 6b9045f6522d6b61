"""What FedPA's server keeps, and what it exchanges with the clients."""

from typing import NamedTuple

from fedjax_pfl.method import PerClass
from fedjax_pfl.methods.fedpa.teaching import Trained
from fedjax_pfl.models.base import Params
from fedjax_pfl.ops.prototypes import Prototypes


class Server(NamedTuple):
    """Shared: w, the prototypes P, and the generator, whose optimiser goes on from round to round."""

    params: Params
    prototypes: Prototypes
    generator: Trained


class View(NamedTuple):
    """What is sent down: w, P of the classes that have one, and the generator."""

    params: Params
    prototypes: PerClass
    generator: Params


class Upload(NamedTuple):
    """What is sent up: w_i, and of each class trained on the sum of its features and the number of its samples."""

    params: Params
    prototypes: PerClass
