"""The rounds of all methods in plain PyTorch, from their papers; evaluation, and what serves it alone, is left out.

They do the same work as ours: the same losses, epochs, steps and server work. Nothing is kept from one round to the
next but what the method itself keeps. Where a paper says how a loss is built sample by sample, it is written for a
whole mini-batch here.
"""

# ruff: noqa: D102  # ``Loop`` says what the functions of a method do

import copy
import math
from typing import Any

import numpy as np
import torch
from pytorch_loop import Client, Data, Loop, centre_loss, class_means, contrast, copy_into, normalise
from pytorch_model import Extractor, Net
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy


class FedAvg(Loop):
    """The whole model is sent, trained and averaged. FedAvg-FT: the same; it is fine-tuned for evaluation alone."""

    def local(self, client: Client) -> Any:
        copy_into(client.net, self.server)
        self.train(client.data, [client.net], lambda x, y: cross_entropy(client.net(x), y))
        return client.net

    def aggregate(self, uploads: list[Any]) -> None:
        self.server.load_state_dict(self.average(uploads))


class Local(FedAvg):
    """Nothing is sent."""

    def local(self, client: Client) -> Any:
        self.train(client.data, [client.net], lambda x, y: cross_entropy(client.net(x), y))
        return client.net

    def aggregate(self, uploads: list[Any]) -> None:
        del uploads


class FedProx(FedAvg):
    """The local loss is tied to the global model. FedProx-FT: the same."""

    def local(self, client: Client) -> Any:
        copy_into(client.net, self.server)
        tie = self.server, self.options["mu"]
        self.train(client.data, [client.net], lambda x, y: cross_entropy(client.net(x), y), tie=tie)
        return client.net


class Ditto(FedAvg):
    """FedAvg, and a personal model beside it that is tied to the global one."""

    def set_up(self) -> None:
        self.personal = [copy.deepcopy(self.server) for _ in self.clients]

    def local(self, client: Client) -> Any:
        upload = super().local(client)
        mine, tie = self.personal[client.number], (self.server, self.options["lam"])
        epochs = self.options["personal_epochs"]
        self.train(client.data, [mine], lambda x, y: cross_entropy(mine(x), y), epochs=epochs, tie=tie)
        return upload


class LGFedAvg(FedAvg):
    """The head is averaged."""

    def local(self, client: Client) -> Any:
        copy_into(client.net.head, self.server.head)
        self.train(client.data, [client.net], lambda x, y: cross_entropy(client.net(x), y))
        return client.net

    def aggregate(self, uploads: list[Any]) -> None:
        self.server.head.load_state_dict(self.average([net.head for net in uploads]))


class FedPer(FedAvg):
    """The extractor is averaged; extractor and head are trained together."""

    def local(self, client: Client) -> Any:
        copy_into(client.net.extractor, self.server.extractor)
        self.train(client.data, [client.net], lambda x, y: cross_entropy(client.net(x), y))
        return client.net

    def aggregate(self, uploads: list[Any]) -> None:
        self.server.extractor.load_state_dict(self.average([net.extractor for net in uploads]))


class FedRep(FedPer):
    """First the head, then the extractor."""

    def local(self, client: Client) -> Any:
        net = client.net
        copy_into(net.extractor, self.server.extractor)
        epochs = self.options["head_epochs"]
        self.train_heads(
            net.extractor, [net.head], client.data, lambda z, y: cross_entropy(net.head(z), y), epochs=epochs
        )
        self.train(client.data, [net.extractor], lambda x, y: cross_entropy(net(x), y), frozen=[net.head])
        return net


class FedBABU(FedPer):
    """The extractor is trained under a head that never changes."""

    def local(self, client: Client) -> Any:
        net = client.net
        copy_into(net.extractor, self.server.extractor)
        self.train(client.data, [net.extractor], lambda x, y: cross_entropy(net(x), y), frozen=[net.head])
        return net


class PrototypeMethod(FedPer):
    """What keeps class prototypes on the server; an upload is (net, class sums under its extractor, ...)."""

    def set_up(self) -> None:
        self.prototypes = torch.zeros(self.classes, self.server.extractor.dim)
        self.known = torch.zeros(self.classes, dtype=torch.bool)

    def sums_under(self, extractor: Extractor, data: Data) -> Tensor:
        """The class sums of a client's features."""
        return self.class_sums(self.features(extractor, data), data[1])

    def update_prototypes(self, means: Tensor, held: Tensor) -> None:
        """A class that nobody holds keeps its prototype."""
        self.prototypes = torch.where(held[:, None], means, self.prototypes)
        self.known = self.known | held

    def pooled_means(self, sums: list[Tensor]) -> None:
        """The prototypes as means over the samples of all clients."""
        counts = torch.stack([client.counts for client in self.clients]).sum(0)
        self.update_prototypes(class_means(torch.stack(sums).sum(0), counts), counts > 0)


class FedPAC(PrototypeMethod):
    """Features are pulled to the prototypes, and heads are combined for each client by a quadratic program."""

    def local(self, client: Client) -> Any:
        net, options = client.net, self.options
        copy_into(net.extractor, self.server.extractor)
        y = client.data[1]
        z = self.features(net.extractor, client.data)
        means, share = class_means(self.class_sums(z, y), client.counts), client.counts / client.size
        spread = (z**2).sum(1).mean() - (share**2 * (means**2).sum(1)).sum()
        self.train_heads(
            net.extractor,
            [net.head],
            client.data,
            lambda z, y: cross_entropy(net.head(z), y),
            z,
            epochs=options["head_epochs"],
            lr=options["head_lr"],
        )
        centres = torch.where(self.known[:, None], self.prototypes, means)
        known = self.known | (client.counts > 0)
        lam = options["lam"] if self.t > 0 else 0.0

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = net.extractor(x)
            return cross_entropy(net.head(z), y) + lam * centre_loss(z, y, centres, known)

        self.train(client.data, [net.extractor], loss, frozen=[net.head])
        return net, self.sums_under(net.extractor, client.data), share[:, None] * means, spread / client.size

    def aggregate(self, uploads: list[Any]) -> None:
        nets, sums, h, v = zip(*uploads, strict=True)
        super().aggregate(list(nets))
        self.pooled_means(list(sums))
        flat, variance = torch.stack(h).flatten(1), torch.diag(torch.stack(v))
        heads = [copy.deepcopy(net.head) for net in nets]
        for number, client in enumerate(self.clients):
            apart = flat[number] - flat
            weights = simplex_weights((variance + apart @ apart.T).double().numpy())
            client.net.head.load_state_dict(self.average(heads, weights))


def simplex_weights(q: np.ndarray) -> list[float]:
    """The a that minimises a' Q a over the simplex, without weights up to 1e-3.

    Minimising (1/2) x' Q x - 1' x over x >= 0 gives it but for its sum, and that is non-negative least squares.
    """
    factor = np.linalg.cholesky(q / np.trace(q) + 1e-9 * np.eye(len(q)))
    x, _ = nnls(factor.T, np.linalg.solve(factor, np.ones(len(q))))
    kept = np.where(x / x.sum() > 1e-3, x, 0.0)
    return [float(weight) for weight in kept / kept.sum()]


class FedCPD(PrototypeMethod):
    """FedRep, with feature maps distilled from the client's last extractor, and features drawn to prototypes."""

    def set_up(self) -> None:
        super().set_up()
        shape = self.clients[0].data[0][:1]
        with torch.no_grad():
            maps = self.server.extractor.maps(shape)[1]
        distiller = Distiller([level.shape[1] for level in maps])
        self.distillers = [copy.deepcopy(distiller) for _ in self.clients]
        self.teachers: list[Extractor | None] = [None for _ in self.clients]

    def local(self, client: Client) -> Any:
        net, options = client.net, self.options
        copy_into(net.extractor, self.server.extractor)
        epochs = options["head_epochs"]
        self.train_heads(
            net.extractor, [net.head], client.data, lambda z, y: cross_entropy(net.head(z), y), epochs=epochs
        )
        teacher, distiller = self.teachers[client.number], self.distillers[client.number]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z, maps = net.extractor.maps(x)
            total = cross_entropy(net.head(z), y)
            total = total + options["alpha"] * centre_loss(z, y, self.prototypes, self.known)
            total = total + options["beta"] * contrast(z, y, self.prototypes, self.known, options["tau"])
            if teacher is not None:
                with torch.no_grad():
                    taught = teacher.maps(x)[1]
                total = total + options["gamma"] * distiller(maps, taught)
            return total

        trained = [net.extractor] if teacher is None else [net.extractor, distiller]
        self.train(client.data, trained, loss, frozen=[net.head])
        self.teachers[client.number] = copy.deepcopy(net.extractor).requires_grad_(False)
        return net, self.sums_under(net.extractor, client.data)

    def aggregate(self, uploads: list[Any]) -> None:
        super().aggregate([net for net, _ in uploads])
        self.pooled_means([sums for _, sums in uploads])


class Distiller(nn.Module):
    """FedCPD's attention and fusion of feature maps, level by level; no layer has a bias."""

    def __init__(self, channels: list[int]):
        super().__init__()
        middle = max(channels)
        self.reduce = nn.ModuleList(nn.Linear(c, max(1, c // 16), bias=False) for c in channels)
        self.expand = nn.ModuleList(nn.Linear(max(1, c // 16), c, bias=False) for c in channels)
        self.spatial = nn.ModuleList(nn.Conv2d(2, 1, 7, padding=3, bias=False) for _ in channels)
        self.plain = nn.ModuleList(Fusion(c, middle) for c in channels)
        self.attended = nn.ModuleList(Fusion(c, middle) for c in channels)

    def attend(self, maps: list[Tensor]) -> list[Tensor]:
        """The maps after a gate per channel, then one per pixel (CBAM)."""
        attended = []
        for x, reduce, expand, spatial in zip(maps, self.reduce, self.expand, self.spatial, strict=True):
            pooled = torch.stack([x.mean((2, 3)), x.amax((2, 3))])
            x = x * torch.sigmoid(expand(functional.relu(reduce(pooled))).sum(0))[:, :, None, None]
            across = torch.stack([x.mean(1), x.amax(1)], 1)
            attended.append(x * torch.sigmoid(spatial(across)))
        return attended

    def forward(self, student: list[Tensor], teacher: list[Tensor]) -> Tensor:
        """Mean squared distances of the student's fused maps to the teacher's, summed over the levels."""
        with torch.no_grad():
            attended = self.attend(teacher)
        total = torch.zeros(())
        kinds = ((self.plain, student, teacher), (self.attended, self.attend(student), attended))
        for levels, maps, targets in kinds:
            deeper = None
            for level, x, target in reversed(list(zip(levels, maps, targets, strict=True))):
                fused, deeper = level(x, deeper)
                total = total + functional.mse_loss(fused, target)
        return total


class Fusion(nn.Module):
    """One level of the fusion, the identity at first."""

    def __init__(self, channels: int, middle: int):
        super().__init__()
        self.cv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.cv2 = nn.Conv2d(middle, channels, 3, padding=1, bias=False)
        self.cv3 = nn.Conv2d(channels, middle, 3, padding=1, bias=False)
        nn.init.zeros_(self.cv1.weight)
        nn.init.dirac_(self.cv2.weight)
        nn.init.dirac_(self.cv3.weight)

    def forward(self, x: Tensor, deeper: Tensor | None) -> tuple[Tensor, Tensor]:
        """The fused map, and what the level above it takes from this one."""
        narrow = self.cv1(x)
        total = narrow + self.cv3(x)
        if deeper is not None:
            total = total + functional.interpolate(deeper, x.shape[2:], mode="bilinear")
        return self.cv2(total), narrow


class FedeCouple(FedAvg):
    """Heads taught on the client's own features; extractors anchored under the global head, then under the own one."""

    def local(self, client: Client) -> Any:
        net, options, server = client.net, self.options, self.server
        images = client.images
        if self.augments:
            images = torch.cat([images, five_operations(images)])
        data = (normalise(images), client.data[1].repeat(len(images) // client.size))
        # The head phase runs on the extractor that the client left behind; the teacher adapts while it teaches.
        teacher, tau = copy.deepcopy(server.head), options["tau"]

        def head_loss(z: Tensor, y: Tensor) -> Tensor:
            logits, taught = net.head(z), teacher(z)
            log_p, log_q = functional.log_softmax(taught.detach() / tau, 1), functional.log_softmax(logits / tau, 1)
            divergence = functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
            return cross_entropy(logits, y) + options["lam"] * divergence + cross_entropy(taught, y)

        self.train_heads(net.extractor, [net.head, teacher], data, head_loss, epochs=options["head_epochs"])
        copy_into(net.extractor, server.extractor)
        counts = torch.bincount(data[1], minlength=self.classes)
        anchors = class_means(self.class_sums(self.features(net.extractor, data), data[1]), counts)

        def train_under(head: nn.Module, epochs: int) -> None:
            def loss(x: Tensor, y: Tensor) -> Tensor:
                z = net.extractor(x)
                return cross_entropy(head(z), y) + options["mu"] * centre_loss(z, y, anchors, counts > 0)

            self.train(data, [net.extractor], loss, frozen=[head], epochs=epochs)

        train_under(server.head, options["frozen_head_epochs"])
        train_under(net.head, self.epochs)
        return net

    augments = True

    def aggregate(self, uploads: list[Any]) -> None:
        mean = flat(self.average(uploads))
        cosines = [functional.cosine_similarity(flat(net.state_dict()), mean, dim=0) for net in uploads]
        self.server.load_state_dict(self.average(uploads, [max(float(cosine), 1e-6) for cosine in cosines]))


def flat(state: dict[str, Tensor]) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([tensor.flatten() for tensor in state.values()])


def five_operations(images: Tensor) -> Tensor:
    """One of FedeCouple's five operations for each image, at random, each run on all images that drew it; uint8."""
    n, _, height, width = images.shape
    x = images.float()
    operation = torch.randint(0, 5, (n,))
    moved = torch.nonzero(operation < 2)[:, 0]
    shift = torch.where(operation[moved, None] == 0, torch.randint(-4, 5, (len(moved), 2)), 0)
    angle = torch.where(operation[moved] == 1, (torch.rand(len(moved)) * 2 - 1) * math.pi / 6, 0.0)
    cos, sin = torch.cos(angle), torch.sin(angle)
    affine = torch.stack(
        [cos, -sin, shift[:, 1] * 2 / width, sin, cos, shift[:, 0] * 2 / height],
        1,
    ).view(-1, 2, 3)
    grid = functional.affine_grid(affine, [len(moved), *images.shape[1:]], align_corners=False)
    x[moved] = functional.grid_sample(x[moved], grid, align_corners=False)
    x[operation == 2] = x[operation == 2].flip(3)
    bright = operation == 3
    x[bright] *= torch.rand(int(bright.sum()), 1, 1, 1) + 0.5
    x[operation == 4] = 255.0 - x[operation == 4]
    return x.round().clamp(0, 255).to(torch.uint8)


class FedFCD(PrototypeMethod):
    """Class means of features go up; the server trains a head on them, which decides together with the personal one."""

    def set_up(self) -> None:
        super().set_up()
        sums = [self.sums_under(client.net.extractor, client.data) for client in self.clients]
        self.aggregate(sums)

    def local(self, client: Client) -> Any:
        net, head = client.net, self.server.head

        def decide(z: Tensor) -> Tensor:
            return net.head(z) + head(z)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = net.extractor(x)
            pull = centre_loss(z, y, self.prototypes, self.known)
            return cross_entropy(decide(z), y) + self.options["lam"] * pull

        head.requires_grad_(False)
        for _ in range(self.epochs):
            self.train(client.data, [net.extractor], loss, frozen=[net.head], epochs=1)
            self.train_heads(net.extractor, [net.head], client.data, lambda z, y: cross_entropy(decide(z), y), epochs=1)
        return self.sums_under(net.extractor, client.data)

    def aggregate(self, uploads: list[Any]) -> None:
        means = torch.cat(
            [class_means(sums, client.counts) for sums, client in zip(uploads, self.clients, strict=True)]
        )
        held = torch.cat([client.counts > 0 for client in self.clients])
        pairs = means[held], torch.arange(self.classes).repeat(len(uploads))[held]
        head, options = self.server.head, self.options
        self.train(
            pairs,
            [head],
            lambda z, y: cross_entropy(head(z), y),
            epochs=options["server_epochs"],
            batch_size=options["server_batch_size"],
            lr=options["server_lr"],
        )
        self.pooled_means(uploads)


class PGFedSplit(PrototypeMethod):
    """Heads are trained on features and on synthetic ones, and now and then mixed with the mean of all heads.

    The features of a client are computed once a round, since the mixed set is made of features in the paper, too.
    """

    def set_up(self) -> None:
        super().set_up()
        self.deviation = torch.zeros_like(self.prototypes)
        self.received: nn.Module | None = None
        self.counter = 0
        self.adapted = [0 for _ in self.clients]

    def mixed_set(self, z: Tensor, client: Client) -> Data:
        """The client's features, followed by synthetic ones from the Gaussians of its classes."""
        y, share = client.data[1], client.counts / client.size
        odds = torch.where(self.known, share, 0.0)
        r = self.options["r"]
        if r == 0 or not odds.any():
            return z, y
        drawn = torch.multinomial(odds, math.ceil(r / (1 - r) * client.size - 1e-6), replacement=True)
        scale = (share / share.max())[drawn, None]
        synthetic = self.prototypes[drawn] + scale * self.deviation[drawn] * torch.randn(len(drawn), z.shape[1])
        return torch.cat([z, synthetic]), torch.cat([y, drawn])

    @torch.no_grad()
    def mix_heads(self, client: Client, received: nn.Module, z: Tensor, y: Tensor) -> None:
        """The client's head becomes the mixture with the received one that suits its mixed set best."""
        head = client.net.head
        own, other = head(z), received(z)
        log_p, log_q = functional.log_softmax(own, 1), functional.log_softmax(other, 1)
        gap = self.t - self.adapted[client.number]
        penalty = self.options["beta"] * gap * functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        truth, apart = functional.one_hot(y, self.classes), own - other
        low, high = 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            surprise = torch.softmax(other + middle * apart, 1) - truth
            slope = (surprise * apart).sum(1).mean() + 2 * penalty * middle
            low, high = (middle, high) if slope <= 0 else (low, middle)
        for mine, theirs in zip(head.parameters(), received.parameters(), strict=True):
            mine.copy_(high * mine + (1 - high) * theirs)
        self.adapted[client.number] = self.t

    def local(self, client: Client) -> Any:
        net = client.net
        copy_into(net.extractor, self.server.extractor)
        z, y = self.mixed_set(self.features(net.extractor, client.data), client)
        if self.received is not None:
            self.mix_heads(client, self.received, z, y)
        self.train((z, y), [net.head], lambda z, y: cross_entropy(net.head(z), y))

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = net.extractor(x)
            pull = centre_loss(z, y, self.prototypes, self.known)
            return cross_entropy(net.head(z), y) + self.options["lam"] * pull

        self.train(client.data, [net.extractor], loss, frozen=[net.head])
        return net, self.sums_under(net.extractor, client.data)

    def aggregate(self, uploads: list[Any]) -> None:
        nets = [net for net, _ in uploads]
        super().aggregate(nets)
        counts = torch.stack([client.counts for client in self.clients])
        means = torch.stack([sums for _, sums in uploads]) / counts.clamp(min=1)[..., None]
        held = (counts > 0).float()
        holders = held.sum(0)
        mean = means.sum(0) / holders.clamp(min=1)[:, None]
        variance = (held[..., None] * (means - mean) ** 2).sum(0) / holders.clamp(min=1)[:, None]
        self.deviation = torch.where((holders > 0)[:, None], variance.sqrt(), self.deviation)
        self.update_prototypes(mean, holders > 0)
        # The benchmark's interval is one that stays as it is.
        self.received, self.counter = None, self.counter + 1
        if self.counter >= self.options["interval"]:
            self.received, self.counter = copy.deepcopy(self.server.head), 0
            self.received.load_state_dict(self.average([net.head for net in nets]))


class PFedCSPC(FedAvg):
    """Clients cluster features into prototypes; the server calibrates projection head and classifier on all of them."""

    def set_up(self) -> None:
        width = len(self.features(self.server.extractor.encode, self.clients[0].data)[0])
        self.prototypes = torch.zeros(self.classes, width)
        self.exemplars = torch.zeros(self.classes, self.server.extractor.dim)
        self.known = torch.zeros(self.classes, dtype=torch.bool)
        self.personal: list[dict[str, Tensor]] = []

    def local(self, client: Client) -> Any:
        net, options = client.net, self.options
        copy_into(net, self.server)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            f = net.extractor.encode(x)
            total = cross_entropy(net.head(net.extractor.projection(f)), y)
            if not self.known.any():
                return total
            node = contrast(f, y, self.prototypes, self.known, options["tau_l"])
            return total + options["kappa"] * (node + self.relations(f, y))

        self.train(client.data, [net], loss)
        return net, *self.cluster(self.features(net.extractor.encode, client.data), client.data[1])

    def relations(self, f: Tensor, y: Tensor) -> Tensor:
        """Angles of triples and edges of pairs, held against those of the prototypes."""
        u, known = self.prototypes[y], self.known[y]
        first, second = y.roll(-1), y.roll(-2)
        pairs = (known & known.roll(-1) & (y != first)).float()
        triples = (pairs > 0) & known.roll(-2) & (first != second) & (y != second)

        def cosines(points: Tensor) -> Tensor:
            middle = points.roll(-1, 0)
            return (functional.normalize(points - middle) * functional.normalize(points.roll(-2, 0) - middle)).sum(1)

        def edges(points: Tensor) -> Tensor:
            distance = ((points - points.roll(-1, 0)) ** 2).sum(1).add(1e-12).sqrt()
            return distance / ((distance * pairs).sum() / pairs.sum().clamp(min=1)).clamp(min=1e-6)

        angle = ((cosines(f) - cosines(u)).abs() * triples).sum() / triples.sum().clamp(min=1)
        return angle + ((edges(f) - edges(u)).abs() * pairs).sum() / pairs.sum().clamp(min=1)

    @torch.no_grad()
    def cluster(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """K-means of each class; of each cluster the means of random shares. Returns prototypes and their classes."""
        points, labels = [], []
        for label in range(self.classes):
            mine = f[y == label]
            if not len(mine):
                continue
            centres = mine[torch.randint(0, len(mine), (1,))]
            while len(centres) < min(self.options["clusters"], len(mine)):
                odds = torch.cdist(mine, centres).amin(1) ** 2
                if not odds.any():
                    break
                centres = torch.cat([centres, mine[torch.multinomial(odds, 1)]])
            for _ in range(self.options["kmeans_steps"]):
                nearest = torch.cdist(mine, centres).argmin(1)
                size = torch.bincount(nearest, minlength=len(centres))[:, None]
                means = torch.zeros_like(centres).index_add_(0, nearest, mine) / size.clamp(min=1)
                centres = torch.where(size > 0, means, centres)
            nearest = torch.cdist(mine, centres).argmin(1)
            for group in range(len(centres)):
                members = mine[nearest == group]
                wanted = math.ceil(self.options["share"] * len(members) - 1e-3)
                for _ in range(self.options["repeats"] if len(members) else 0):
                    points.append(members[torch.randperm(len(members))[:wanted]].mean(0))
                    labels.append(label)
        return torch.stack(points), torch.tensor(labels)

    def aggregate(self, uploads: list[Any]) -> None:
        nets = [net for net, _, _ in uploads]
        u, y = torch.cat([points for _, points, _ in uploads]), torch.cat([labels for _, _, labels in uploads])
        owner = torch.cat([torch.full_like(labels, number) for number, (_, _, labels) in enumerate(uploads)])
        super().aggregate(nets)
        if self.options["pmi"] != "off":
            self.combine_encoders(nets, u, y, owner)
        self.calibrate(u, y, owner)
        with torch.no_grad():
            means, held = mean_over_clients(u, y, owner, self.classes)
            self.prototypes = torch.where(held[:, None], means, self.prototypes)
            means, _ = mean_over_clients(self.server.extractor.projection(u), y, owner, self.classes)
            self.exemplars = torch.where(held[:, None], means, self.exemplars)
            self.known = self.known | held

    @torch.no_grad()
    def combine_encoders(self, nets: list[Net], u: Tensor, y: Tensor, owner: Tensor) -> None:
        """A personal encoder for each client, by the loss of its prototypes under the heads of all."""
        counts = torch.bincount(owner, minlength=len(nets))
        columns = []
        for net in nets:
            losses = cross_entropy(net.head(net.extractor.projection(u)), y, reduction="none")
            columns.append(torch.zeros(len(nets)).index_add_(0, owner, losses) / counts)
        weights = torch.softmax(-torch.stack(columns, 1) / self.options["tau_p"], 1)
        encoders = [nn.ModuleList([net.extractor.blocks, net.extractor.dense]) for net in nets]
        self.personal = [self.average(encoders, row.tolist()) for row in weights]

    def calibrate(self, u: Tensor, y: Tensor, owner: Tensor) -> None:
        """With the encoder frozen, projection head and classifier learn to tell the classes of all prototypes."""
        options, projection, head = self.options, self.server.extractor.projection, self.server.head
        class_start, class_size = stretches(owner * self.classes + y)
        client_start, client_size = stretches(owner)
        pairs, steps = (options["augmented"],), torch.tensor([0.1, 0.3, 0.5])

        def loss(rows: Tensor) -> Tensor:
            points, labels, owners = u[rows], y[rows], owner[rows]
            z = projection(points)
            total = cross_entropy(head(z), labels) + options["eta"] * weighted_contrast(
                z, labels, owners, options["tau_g"]
            )
            # A partner of the same client and class, and one of the same client and another class.
            start, size = class_start[rows, None], class_size[rows, None]
            others = client_size[rows, None] - size
            shape = (len(rows), *pairs)
            same = start + (torch.rand(shape) * (size - 1)).long()
            same = same + (same >= rows[:, None]).long()
            other = client_start[rows, None] + (torch.rand(shape) * others).long()
            other = other + torch.where(other >= start, size, 0)
            exists = ((size > 1) & (others > 0))[:, 0].float()
            last, points = len(u) - 1, points[:, None]
            lam = steps[torch.randint(0, 3, (2, *shape, 1))]
            near = projection(points + lam[0] * (points - u[same.clamp(max=last)]))
            far = projection(points + lam[1] * (u[other.clamp(max=last)] - points))
            z = z[:, None]
            hinge = functional.relu(((z - near) ** 2).sum(2) - ((z - far) ** 2).sum(2) + options["margin"]).mean(1)
            return total + options["eta"] * (hinge * exists).sum() / exists.sum().clamp(min=1)

        lr = options["server_lr"] * 0.1 ** sum(self.t >= drop for drop in options["server_lr_drops"])
        left, stretch = options["server_epochs"], options["server_epochs_per_drop"]
        for number in range(math.ceil(left / stretch)):
            self.train(
                (torch.arange(len(u)),),
                [projection, head],
                loss,
                epochs=min(stretch, left - number * stretch),
                batch_size=options["server_batch_size"],
                lr=lr * 0.1**number,
                weight_decay=options["server_weight_decay"],
            )


def stretches(group: Tensor) -> tuple[Tensor, Tensor]:
    """Where the stretch of a row's group begins, and how long it is; rows of a group lie side by side."""
    _, inverse, size = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
    return (torch.cumsum(size, 0) - size)[inverse], size[inverse]


def weighted_contrast(z: Tensor, y: Tensor, owner: Tensor, temperature: float) -> Tensor:
    """Supervised contrastive loss over a batch of prototypes; easy pairs weigh half."""
    z = functional.normalize(z)
    alike, mine = y[:, None] == y, owner[:, None] == owner
    others = ~torch.eye(len(y), dtype=torch.bool)
    scores = z @ z.T / temperature + torch.where(alike != mine, 0.0, math.log(0.5))
    log_p = scores - torch.logsumexp(scores.masked_fill(~others, -1e9), 1, keepdim=True)
    positive = (alike & others).float()
    return -((log_p * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


def mean_over_clients(points: Tensor, y: Tensor, owner: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean, over the clients that hold a class, of each client's mean; and which classes anybody holds."""
    clients = int(owner.max()) + 1
    group = owner * classes + y
    counts = torch.bincount(group, minlength=clients * classes)
    sums = torch.zeros(clients * classes, points.shape[1]).index_add_(0, group, points)
    own = (sums / counts.clamp(min=1)[:, None]).view(clients, classes, -1)
    holders = (counts.view(clients, classes) > 0).sum(0)
    return own.sum(0) / holders.clamp(min=1)[:, None], holders > 0


METHODS = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg_ft": FedAvg,
    "fedprox": FedProx,
    "fedprox_ft": FedProx,
    "ditto": Ditto,
    "lg_fedavg": LGFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "fedpac": FedPAC,
    "fedecouple": FedeCouple,
    "fedfcd": FedFCD,
    "pgfedsplit": PGFedSplit,
    "fedcpd": FedCPD,
    "pfedcspc": PFedCSPC,
}
