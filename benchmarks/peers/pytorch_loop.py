"""A round in plain PyTorch, the way PFLlib does it: what all methods have in common.

Clients are trained one after the other in one process. Each has a model of its own, which the server's parameters are
copied into, a ``DataLoader`` that shuffles tensors in memory, and a ``torch.optim.SGD`` for each phase. The server
averages parameters by the number of samples. A head phase runs the frozen extractor on every mini-batch of every epoch.
"""

import abc
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from case import Case, normalised
from pytorch_model import Extractor, Net
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

Data = tuple[Tensor, Tensor]


class Client:
    """A client's samples and its model.

    Attributes:
      number: its number.
      net: its model.
      images: uint8, [n, c, h, w].
      data: the images, normalised, and the labels.
      counts: samples per class.
    """

    def __init__(self, number: int, net: Net, images: Tensor, labels: Tensor, classes: int):
        self.number, self.net, self.images = number, net, images
        self.data = (normalise(images), labels)
        self.counts = torch.bincount(labels, minlength=classes).float()

    @property
    def size(self) -> int:
        """n_i."""
        return len(self.images)


def normalise(images: Tensor) -> Tensor:
    """Pixels in [-1, 1], float32."""
    return torch.from_numpy(normalised(images.numpy()))


class Loop(abc.ABC):
    """Server and clients of a method; a method is a ``local``, an ``aggregate`` and what they keep.

    Attributes:
      server: the global model.
      options: hyperparameters of the method.
      t: the round.
    """

    def __init__(self, case: Case, *, loader: bool, device: str = "cpu"):
        """Sets up server and clients, all with the same model.

        Args:
          case: what to run.
          loader: whether mini-batches come from a ``DataLoader``, or are slices of the tensors.
          device: where models are and mini-batches go; without a loader, all samples are there, too.
        """
        settings = case.settings
        self.options: dict[str, Any] = settings["options"]
        self.batch_size, self.epochs, self.lr = (settings[name] for name in ("batch_size", "epochs", "lr"))
        self.classes, self.loader, self.device = settings["classes"], loader, device
        self.server = Net(settings["model"], settings["shape"], self.classes).to(device)
        if case.initial:
            with torch.no_grad():
                for parameter, array in zip(self.server.parameters(), case.initial, strict=True):
                    parameter.copy_(torch.tensor(array))
        self.all = self._clients(case, None)
        self.short = self._clients(case, settings["warm_up"])
        self.clients = self.all
        self.orders: Iterator[Tensor] = iter([torch.from_numpy(row) for rows in case.orders for row in rows])
        self.uploads: list[Any] = []
        self.cached = False
        self.t = 0
        self.set_up()

    def _clients(self, case: Case, samples: int | None) -> list[Client]:
        clients = []
        for number, rows in enumerate(case.rows):
            images = torch.from_numpy(case.images[rows[:samples]].transpose(0, 3, 1, 2).copy())
            labels = torch.from_numpy(case.labels[rows[:samples]])
            net = copy.deepcopy(self.server) if samples is None else self.all[number].net
            clients.append(Client(number, net, images, labels, self.classes))
            if not self.loader:
                clients[-1].data = self.placed(clients[-1].data)
        return clients

    def placed(self, tensors: Sequence[Tensor]) -> Any:
        """The tensors on the device."""
        return tuple(tensor.to(self.device) for tensor in tensors)

    def set_up(self) -> None:  # noqa: B027  # most methods keep nothing
        """What a method keeps besides the models."""

    @abc.abstractmethod
    def local(self, client: Client) -> Any:
        """A client's part in a round; returns its upload."""

    @abc.abstractmethod
    def aggregate(self, uploads: list[Any]) -> None:
        """The server's part in a round."""

    def round(self, warm_up: bool = False) -> None:
        """One communication round, on few samples of each client if it is not to count."""
        self.clients = self.short if warm_up else self.all
        self.uploads = [self.local(client) for client in self.clients]
        self.aggregate(self.uploads)
        self.t += 1

    def one_client(self) -> None:
        """The part of the first client again, with the features of frozen extractors computed once (``cached``)."""
        self.cached = True
        self.local(self.clients[0])
        self.cached = False

    # What clients do.

    def batches(self, data: Sequence[Tensor], batch_size: int | None = None, *, shuffle: bool = True) -> Iterable:
        """The mini-batches of an epoch; the last one may be short."""
        size = batch_size or self.batch_size
        if self.loader:
            return map(self.placed, DataLoader(TensorDataset(*data), size, shuffle=shuffle))
        samples = len(data[0])
        order = next(self.orders, torch.randperm(samples)) if shuffle else torch.arange(samples)
        return (tuple(tensor[rows] for tensor in data) for rows in order.to(self.device).split(size))

    def train(
        self,
        data: Sequence[Tensor],
        trained: Sequence[nn.Module],
        loss: Callable[..., Tensor],
        *,
        frozen: Sequence[nn.Module] = (),
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        weight_decay: float = 0.0,
        tie: tuple[nn.Module, float] | None = None,
    ) -> None:
        """SGD on a loss of the mini-batch.

        Args:
          data: tensors of one row per sample.
          trained: modules that it trains.
          loss: of the tensors of a mini-batch.
          frozen: modules that the loss runs through and that stay as they are.
          epochs: instead of the client's number.
          batch_size: likewise.
          lr: likewise.
          weight_decay: L2 coefficient.
          tie: a module and the strength mu of the pull (mu / 2) ||w - w'||^2 to its parameters, by its gradient.
        """
        for module in frozen:
            module.requires_grad_(False)
        for module in trained:
            module.requires_grad_(True)
        parameters = [parameter for module in trained for parameter in module.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=lr or self.lr, weight_decay=weight_decay)
        for _ in range(self.epochs if epochs is None else epochs):
            for batch in self.batches(data, batch_size):
                optimizer.zero_grad()
                loss(*batch).backward()
                if tie is not None:
                    with torch.no_grad():
                        for parameter, anchor in zip(parameters, tie[0].parameters(), strict=True):
                            assert parameter.grad is not None
                            parameter.grad.add_(parameter - anchor, alpha=tie[1])
                optimizer.step()

    @torch.no_grad()
    def features(self, extractor: Callable[[Tensor], Tensor], data: Data) -> Tensor:
        """The features of all samples, in their order."""
        return torch.cat([extractor(x) for x, _ in self.batches(data, shuffle=False)])

    def train_heads(
        self,
        extractor: Extractor,
        heads: Sequence[nn.Module],
        data: Data,
        loss: Callable[[Tensor, Tensor], Tensor],
        z: Tensor | None = None,
        **options: Any,
    ) -> None:
        """A head phase: a loss of features and labels, under a frozen extractor.

        Args:
          extractor: theta.
          heads: what is trained.
          data: the client's samples.
          loss: of the features and labels of a mini-batch.
          z: the features of all samples, if they are known; used only to count what must be computed.
          options: of :meth:`train`.
        """
        if self.cached:
            known = self.features(extractor, data) if z is None else z
            self.train((known, data[1]), heads, loss, **options)
        else:
            self.train(data, heads, lambda x, y: loss(extractor(x), y), frozen=[extractor], **options)

    def class_sums(self, z: Tensor, y: Tensor) -> Tensor:
        """The sum of the features of each class, [C, K]."""
        return torch.zeros(self.classes, z.shape[1]).index_add_(0, y, z)

    # What the server does.

    def average(self, modules: Sequence[nn.Module], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
        """The weighted mean of the modules' state dicts, by n_i unless weights are given."""
        shares = weights or [client.size for client in self.clients]
        total = sum(shares)
        mean: dict[str, Tensor] = {}
        for module, share in zip(modules, shares, strict=True):
            for name, tensor in module.state_dict().items():
                part = tensor * (share / total)
                mean[name] = mean[name] + part if name in mean else part
        return mean


def copy_into(target: nn.Module, source: nn.Module) -> None:
    """Gives a module the parameters of another, as when a server sends its model."""
    target.load_state_dict(source.state_dict())


def centre_loss(z: Tensor, y: Tensor, centres: Tensor, known: Tensor) -> Tensor:
    """Mean squared distance to the centre of the own class, over the features; 0 for a class without one."""
    return (((z - centres[y]) ** 2).mean(1) * known[y]).mean()


def class_means(sums: Tensor, counts: Tensor) -> Tensor:
    """Sums divided by counts, [C, K]."""
    return sums / counts.clamp(min=1)[:, None]


def contrast(z: Tensor, y: Tensor, prototypes: Tensor, known: Tensor, temperature: float) -> Tensor:
    """-log softmax of the cosine to the own class's prototype among all prototypes; mean over the batch."""
    cosines = functional.normalize(z) @ functional.normalize(prototypes).T
    log_p = functional.log_softmax(torch.where(known, cosines / temperature, -1e9), 1)
    return -(log_p.gather(1, y[:, None])[:, 0] * known[y]).mean()
