"""What the library computes, once more in float64 NumPy and plain loops; trees are dicts of arrays, as there."""

import zlib
from functools import partial

import jax
import numpy as np
from sklearn.metrics import f1_score

from fedjax_pfl.method import Round


def to_numpy(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def at(t):
    """A round, as the engine hands it on."""
    return jax.device_put(np.int32(t))


def now(key, t):
    """What a function of a method is called with in round t."""
    return Round(key, at(t))


def client(rows, i):
    """Client i of a tree whose leaves have a row per client."""
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[i]), rows)


def held(clients, i):
    """The pool rows of client i."""
    return np.asarray(clients.index)[i, : int(clients.count[i])]


def client_key(key, t, client):
    """Rule R12: a client's randomness in round t follows from the seed, t and its id alone."""
    return jax.random.fold_in(jax.random.split(jax.random.fold_in(key, t), 4)[3], client)


@jax.jit
def _draws_of(key, phase, epoch):
    key = jax.random.fold_in(jax.random.fold_in(key, phase), epoch)
    return jax.random.uniform(jax.random.split(key)[0], (64,))


def batches(key, count, *, epochs, batch_size, phase="local"):
    """The positions in each mini-batch of one client in one phase: a fresh permutation in each epoch."""
    word = np.uint32(zlib.crc32(phase.encode()))
    for epoch in range(epochs):
        draws = np.asarray(_draws_of(key, word, np.int32(epoch)))
        order = np.argsort(draws[:count], kind="stable")
        yield from (order[first : first + batch_size] for first in range(0, count, batch_size))


def sgd(w, gradients, *, lr, momentum=0.0, weight_decay=0.0, clip_norm=None):
    """PyTorch's SGD from a zero velocity, one step for each function w -> gradient."""
    velocity = jax.tree.map(np.zeros_like, w)
    for gradient in gradients:
        g = gradient(w)
        if clip_norm is not None:
            norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(g)))
            g = jax.tree.map(lambda leaf, norm=norm: leaf * min(1.0, clip_norm / norm), g)
        velocity = jax.tree.map(lambda v, g, w: momentum * v + g + weight_decay * w, velocity, g, w)
        w = jax.tree.map(lambda w, v: w - lr * v, w, velocity)
    return w


def train(w, gradient, key, t, rows, trainer, *, phase="local", epochs=None, lr=None):
    """Local training of the tree w and of nothing else; ``gradient`` is a function (w, rows of a batch) -> tree."""
    epochs, lr = trainer.epochs if epochs is None else epochs, trainer.lr if lr is None else lr
    order = batches(key, len(rows), epochs=epochs, batch_size=trainer.batch_size, phase=phase)
    steps = (partial(gradient, rows=rows[positions]) for positions in order)
    rate = lr * trainer.lr_decay**t
    return sgd(w, steps, lr=rate, momentum=trainer.momentum, weight_decay=trainer.weight_decay)


def softmax_loss(logits, y):
    """Mean cross-entropy and its gradient with respect to the logits."""
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log_p[np.arange(len(y)), y].mean(), (np.exp(log_p) - np.eye(logits.shape[1])[y]) / len(y)


def linear(phi, z):
    return z @ phi["kernel"] + phi["bias"]


def linear_gradient(z, d_logits):
    """The gradient with respect to a head, given the one with respect to its logits."""
    return {"kernel": z.T @ d_logits, "bias": d_logits.sum(0)}


def class_means(z, y, classes):
    """The mean feature of each class and its number of samples; zeros where there are none."""
    counts = np.bincount(y, minlength=classes).astype(float)
    return np.eye(classes)[y].T @ z / np.maximum(counts, 1)[:, None], counts


class MLP:
    """The tiny model of the fixtures on one pool of samples: forward pass, loss and gradient by hand."""

    def __init__(self, x, y, mean=0.45, std=0.3):
        self.x = ((np.asarray(x, np.float64) / 255 - mean) / std).reshape(len(x), -1)
        self.y = np.asarray(y)

    def extract(self, theta, rows):
        return np.maximum(linear(theta["hidden_layer"], self.x[rows]), 0)

    def extract_gradient(self, theta, rows, d_z):
        """The gradient with respect to the extractor, given the one with respect to the features."""
        return {"hidden_layer": linear_gradient(self.x[rows], d_z * (self.extract(theta, rows) > 0))}

    def features(self, w, rows):
        return self.extract(w["extractor"], rows)

    def logits(self, w, rows):
        return linear(w["head"], self.features(w, rows))

    def loss(self, w, rows):
        return softmax_loss(self.logits(w, rows), self.y[rows])[0]

    def gradient(self, w, rows):
        z = self.features(w, rows)
        d = softmax_loss(self.logits(w, rows), self.y[rows])[1]
        extractor = self.extract_gradient(w["extractor"], rows, d @ w["head"]["kernel"].T)
        return {"extractor": extractor, "head": linear_gradient(z, d)}

    def head_gradient(self, w, rows):
        gradient = self.gradient(w, rows)
        return {"extractor": jax.tree.map(np.zeros_like, gradient["extractor"]), "head": gradient["head"]}

    def extractor_gradient(self, w, rows):
        gradient = self.gradient(w, rows)
        return {"extractor": gradient["extractor"], "head": jax.tree.map(np.zeros_like, gradient["head"])}

    def train(self, w, key, t, rows, trainer, *, gradient=None, phase="local", **changed):
        """One client's local training in round t: the new parameters and the mean of the losses on the way."""
        gradient = gradient or self.gradient
        epochs, lr = changed.get("epochs", trainer.epochs), changed.get("lr", trainer.lr)
        losses = []

        def step(positions):
            def at(w):
                losses.extend([self.loss(w, rows[positions])] * len(positions))
                return gradient(w, rows[positions])

            return at

        steps = map(step, batches(key, len(rows), epochs=epochs, batch_size=trainer.batch_size, phase=phase))
        rate = lr * trainer.lr_decay**t
        w = sgd(w, steps, lr=rate, momentum=trainer.momentum, weight_decay=trainer.weight_decay)
        return w, np.mean(losses) if losses else 0.0

    def scores(self, w, rows):
        """The fields of Scores; zeros without samples."""
        if not len(rows):
            return 0.0, 0.0, 0.0, 0.0, 0.0
        guess, y = self.logits(w, rows).argmax(axis=1), self.y[rows]
        held, union = (f1_score(y, guess, labels=c, average="macro", zero_division=0) for c in (np.unique(y), None))
        return np.sum(guess == y), np.mean(guess == y), held, union, self.loss(w, rows)


def weighted_mean(trees, weights):
    return jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=weights), *trees)
