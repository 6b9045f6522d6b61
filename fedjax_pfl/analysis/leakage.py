"""What a method's upload gives away: gradient inversion of what one client with one image sends (FedeCouple, Fig. 14).

What is attacked is not written down anywhere: it is the upload that ``method.local`` returns, so that a method that
keeps its head keeps it here, too, and one that sends class means is attacked by these.
"""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from fedjax_pfl.analysis.inversion import Found, Send, Upload, invert, psnr, search
from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.data.sources import load
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import DataShape, make_engine, model_of, shape_of
from fedjax_pfl.experiment.config import HONEST, Config
from fedjax_pfl.experiment.inputs import keys_of
from fedjax_pfl.experiment.kept import named
from fedjax_pfl.experiment.plots.given import check_given
from fedjax_pfl.experiment.plots.style import COLUMN, as_label, drawing
from fedjax_pfl.experiment.programs import drawn_once
from fedjax_pfl.experiment.registry import with_own_parts
from fedjax_pfl.experiment.result import Result
from fedjax_pfl.experiment.trained import checked_labels, checked_samples
from fedjax_pfl.method import PerClass, Round, SentIf, is_part
from fedjax_pfl.ops.tree import keep_rows

if TYPE_CHECKING:
    import matplotlib.axes

Attack = Literal["idlg", "dlg"]
Optimiser = Literal["adam", "lbfgs"]
# The largest number of images in a plot; more would be too small to see.
_DRAWN = 12


@dataclass(frozen=True)
class Leakage:
    """The result of an attack.

    Attributes:
      method: the name of the method.
      uploaded: names of the arrays that the attacker sees.
      targets: the true images, [n, h, w, c], pixels in [0, 1].
      images: the reconstructions from their uploads, [n, h, w, c], clipped to [0, 1].
      psnr: PSNR between each reconstruction and its target in dB, [n].
      labels: the labels of the targets, [n].
      found: the labels that the attacker has inferred or optimised, [n].
      loss: distance between the upload of each reconstruction and the observed upload, [n]; 0 if they are equal, 1 if
        nothing was learned. If it is small and the PSNR is low, the upload does not determine the image. If it is
        large, the search has failed, which is no proof of privacy.
    """

    method: str
    uploaded: tuple[str, ...]
    targets: Float[np.ndarray, "n h w c"]
    images: Float[np.ndarray, "n h w c"]
    psnr: Float[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    found: Int[np.ndarray, " n"]
    loss: Float[np.ndarray, " n"]


def leakage(
    run: Config | Result,
    x: Shaped[np.ndarray, "n ..."],
    y: Int[np.ndarray, " n"],
    *,
    client: int = 0,
    attack: Attack = "idlg",
    optimiser: Optimiser = "adam",
    steps: int = 1000,
    lr: float = 0.1,
    tv: float = 1e-3,
    restarts: int = 1,
    seed: int = 0,
) -> Leakage:
    """Reconstructs images from what a client with this one image, and one local epoch, would send.

    The server is the attacker. It knows the method, the model and its hyperparameters, what it has sent down, the
    random draws of the round, the client's ``inbox``, which it has written, and the initial client state, which it has
    drawn. It does not know what a client has kept since then, and assumes that it is still the initial state. So
    nothing is hidden for an untrained federation (a `Config`); for a `Result` the personal parts are hidden. The server
    sees the upload as ``local`` returns it: for a `PerClass` the classes held and their rows, for a `SentIf` only what
    is sent. With one step of SGD on one image, this is the gradient times the learning rate; for methods with several
    phases it is the result of all of them. Not included are augmentation, malicious clients, and DP-FedAvg, whose
    server clips and adds noise only after it has seen an upload.

    The search uses second derivatives, so it finds more with smooth activations than with ReLU.

    Args:
      run: the federation: a `Config` for its beginning, or a `Result` for its state after a run.
      x: the images, uint8 [n, h, w, c], each held by a separate client; they are attacked side by side, independently.
      y: their labels, [n].
      client: for a `Result`, the client whose personal state all victims have.
      attack: ``"idlg"`` reads the label from the change of the head's bias, or from the classes held, if one of these
        is sent. Otherwise, and with ``"dlg"``, labels are optimised together with the pixels, which takes ``classes``
        times the arithmetic per step.
      optimiser: ``"adam"``, or ``"lbfgs"``, which needs several evaluations per step.
      steps: number of steps of the search; all are taken.
      lr: Adam's learning rate at the first step; it falls to 0 along a cosine.
      tv: weight of the total variation, relative to a distance of 1 for an image that explains nothing.
      restarts: number of starting points; for each image, the result with the smallest objective is kept.
      seed: seed of the starting points.

    Returns:
      Targets, reconstructions, PSNR in dB, labels and distances.

    Raises:
      ConfigError: an argument is out of range; x or y do not fit; samples are not images; the method uploads nothing,
        cannot be differentiated, or needs more than one client has.
    """
    _check_options(attack, optimiser, steps, lr, tv, restarts, seed)
    with with_own_parts(run.parts if isinstance(run, Result) else {}):
        config, data = _setting(run, client)
        x = checked_samples(x, data)
        y = checked_labels(y, len(x), data.classes)
        victim = _victim(run, config, data, client)
    targets = x.astype(np.float32) / np.float32(255)
    how = search(optimiser, steps, lr, tv)
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(restarts))

    def one(state: tuple, keys: Key[Array, " restarts"], pixels: Array, label: Array) -> Found:
        now, view, own, assumed = state
        seen = victim.send(now, view, own, True)(pixels, label)
        send = victim.send(now, view, assumed, True)
        nothing = victim.send(now, view, assumed, False)(pixels, label)
        known = _inferred_label(seen, nothing, victim.bias) if attack == "idlg" else None
        start = partial(invert, shape=data.sample, classes=data.classes, how=how)
        found = jax.vmap(lambda key: start(key, send, seen, nothing, known))(keys)
        best = jnp.argmin(jnp.where(jnp.isnan(found.objective), jnp.inf, found.objective))
        kept: Found = jax.tree.map(lambda leaf: leaf[best], found)
        return kept

    attack_all = jax.jit(jax.vmap(one, (None, None, 0, 0)))
    with jax.default_matmul_precision("float32"):
        try:
            lowered = attack_all.lower(victim.state, keys, targets, y)
        except (ValueError, TypeError, NotImplementedError) as error:  # JAX has no one kind for what has no derivative
            if "differentia" not in str(error):
                raise
            allowed = (
                "a method and a model whose upload can be differentiated by the pixels, twice where it is trained on"
            )
            raise ConfigError("method.name", victim.name, allowed) from error
        found = jax.device_get(lowered.compile()(victim.state, keys, targets, y))
    images = np.clip(found.pixels, 0, 1)
    return Leakage(
        victim.name, victim.uploaded, targets, images, np.asarray(psnr(images, targets)), y, found.label, found.distance
    )


def plot_leakage(
    found: Leakage | Mapping[str, Leakage], *, ax: "matplotlib.axes.Axes | None" = None
) -> "matplotlib.axes.Axes":
    """Draws the targets, and below them the reconstructions from their uploads, each with its PSNR in dB.

    Args:
      found: one attack, or several on the same images as name -> attack, with one row for each.
      ax: matplotlib axes to draw on; a new figure unless given.

    Returns:
      The axes, with the first twelve images.

    Raises:
      ConfigError: no attack is given, or something else; or their targets differ; or matplotlib is not installed.
    """
    allowed = "what leakage(...) gives, or several of them as name -> attack"
    check_given("found", found, (Leakage, Mapping), allowed)
    rows = {found.method: found} if isinstance(found, Leakage) else dict(found)
    for row in rows.values():
        check_given("found", row, Leakage, allowed)
    first = next(iter(rows.values()), None)
    if first is None or any(not np.array_equal(row.targets, first.targets) for row in rows.values()):
        raise ConfigError("found", list(rows), "attacks on the same images, one or more")
    number, (height, width) = min(len(first.targets), _DRAWN), first.targets.shape[1:3]
    # Room for a number below each image, and a line between two.
    down, across = height * 1.35, width * 1.06
    inches = (COLUMN - 0.6) / number * (down / across) * (len(rows) + 1)
    with drawing(ax, height=inches) as ax:
        for line, (images, scores) in enumerate(
            [(first.targets, None), *((row.images, row.psnr) for row in rows.values())]
        ):
            for column in range(number):
                left, top = column * across, line * down
                picture = np.squeeze(images[column], -1) if images.shape[-1] == 1 else images[column]
                ax.imshow(picture, cmap="gray", vmin=0, vmax=1, extent=(left, left + width, top + height, top))
                if scores is not None:
                    ax.text(
                        left + width / 2,
                        top + height * 1.02,
                        f"{scores[column]:.1f}",
                        fontsize=5,
                        ha="center",
                        va="top",
                    )
        middles = [line * down + height / 2 for line in range(len(rows) + 1)]
        ax.set(xlim=(0, number * across), ylim=((len(rows) + 1) * down, 0), xticks=[], aspect="equal")
        ax.set_yticks(middles, ["target", *(as_label(textwrap.fill(name, 20)) for name in rows)])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return ax


class _Victim(NamedTuple):
    """A client that sends, and what the attacker knows of it.

    Attributes:
      name: of the method.
      send: (round, view, client's state, whether it has its sample) -> the function from an image to what it sends.
      state: the round; what the client received; its own state; what the attacker takes that to be.
      uploaded: the arrays that are sent, by name.
      bias: which of them is the head's bias; None where that is not sent.
    """

    name: str
    send: Callable[[Round, PyTree, PyTree, bool], Send]
    state: tuple[Round, PyTree, PyTree, PyTree]
    uploaded: tuple[str, ...]
    bias: str | None


def _setting(run: Config | Result, client: int) -> tuple[Config, DataShape]:
    """The config under which the victim trains, with one epoch of one image, and what its image looks like."""
    if not isinstance(run, Config | Result):
        raise ConfigError("run", type(run).__name__, "a Config, or a Result")
    config = run if isinstance(run, Config) else run.config
    if config.compression.kind != "none":
        raise ConfigError("compression.kind", config.compression.kind, '"none": whole arrays are compared')
    if not config.participation.collaborate:
        raise ConfigError("participation.collaborate", False, "true: alone, clients send nothing")
    if not isinstance(client, int | np.integer) or not 0 <= client < config.data.clients:
        raise ConfigError("client", client, f"a client from 0 to {config.data.clients - 1}")
    if isinstance(run, Result):
        if run.kept is None:
            raise ConfigError("run", "a Result without its state", 'one of a run with run.keep = "final" or "best"')
        data = run.kept.data
    elif config.data.source == "arrays":
        raise ConfigError("run", "a Config of data from Python", "a Result of it, or a Config that names a data.source")
    else:
        data = shape_of(load(config.data.source))
    if data.real or data.vocabulary is not None:
        kind = "real numbers" if data.real else "text"
        raise ConfigError("data.source", data.name, f"images; it is {kind}")
    one_step = {"training.epochs": 1, "training.batch_size": 1, "training.augment": "none", "training.copies": "none"}
    return config.replace({**HONEST, **one_step, "run.diagnostics": False}), data


def _victim(run: Config | Result, config: Config, data: DataShape, client: int) -> _Victim:
    """The client that is attacked, of a federation that begins or has ended, in its `_setting`."""
    name: str = config.method["name"]
    kept = run.kept if isinstance(run, Result) else None
    engine = make_engine(config, data)
    method = engine.method
    needs = {
        "a message that the server computes for each client that it knows": method.dispatch is not None,
        "validation samples to select on": method.selects,
        "round -1, which only a Result has behind it": method.setup is not None and kept is None,
    }
    for what, needed in needs.items():
        if needed:
            raise ConfigError("method.name", name, f"a method without what one client alone has not: {what}")
    mean, std = (np.float32(getattr(config.data, field)) for field in ("mean", "std"))

    def send(now: Round, view: PyTree, own: PyTree, held: bool) -> Send:
        def upload(pixels: Array, label: Array) -> Upload:
            batch = ClientData(
                ((pixels - mean) / std)[None],  # a model reads what is no uint8 as it is
                label[None],
                jnp.zeros(1, jnp.int32),
                np.int32(1) if held else jnp.int32(0),  # loops that NumPy's number bounds can be differentiated
                jax.nn.one_hot(label, data.classes) if held else jnp.zeros(data.classes),
                id=jnp.int32(client),
            )
            sent = method.local(now, view, own, batch).upload
            seen = jax.tree.map(_visible, sent, is_leaf=is_part)
            return {name: leaf.astype(jnp.float32) for name, leaf in named(seen).items()}

        return upload

    def state(server: PyTree, initial: PyTree) -> tuple[Round, PyTree, PyTree, PyTree]:
        own = initial
        if kept is not None:
            server, own = kept.state.server, jax.tree.map(lambda leaf: leaf[client], kept.state.clients)
        inbox = getattr(own, "inbox", None)
        assumed = initial if inbox is None else initial._replace(inbox=inbox)
        now = Round(jax.random.fold_in(key_rounds, client), jnp.int32(0 if kept is None else kept.round))
        return now, method.broadcast(server), own, assumed

    def upload(pixels: Array, label: Array) -> Upload:
        now, view, _, assumed = state(*method.init(key, engine.clients))
        return send(now, view, assumed, True)(pixels, label)

    key_init, key_rounds = keys_of(config)
    key = jax.random.split(key_init, 3)[0]
    sample = jax.ShapeDtypeStruct(data.sample, jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    uploaded = jax.eval_shape(upload, *sample)
    if not uploaded:
        raise ConfigError("method.name", name, "a method whose clients upload something")
    bias = _bias_of_head(uploaded, jax.eval_shape(model_of(config, data).init, key)["head"], data.classes)
    init = jax.jit(method.init, static_argnums=1, compiler_options=drawn_once())
    return _Victim(name, send, state(*init(key, engine.clients)), tuple(uploaded), bias)


def _visible(node: PyTree) -> PyTree:
    """A part of an upload without what is not sent."""
    if isinstance(node, PerClass):
        return node._replace(rows=keep_rows(node.held != 0, node.rows))
    if isinstance(node, SentIf):
        return node._replace(value=jax.tree.map(lambda leaf: jnp.where(node.sent, leaf, 0), node.value))
    return node


def _bias_of_head(upload: Upload, head: PyTree, classes: int) -> str | None:
    """Which array of an upload is the bias of the head's last layer; None where it is not sent or cannot be told.

    Args:
      upload: shapes of it.
      head: shapes of a model's.
      classes: number of classes, which is the length of that bias.
    """
    ends = [name for name, leaf in named(head).items() if name.split("/")[-1] == "bias" and leaf.shape == (classes,)]
    if len(ends) != 1:
        return None
    sent = [name for name, leaf in upload.items() if leaf.shape == (classes,)]
    found = [name for name in sent if name == ends[0] or f"/{name}".endswith(f"/head/{ends[0]}")]
    # A control variate changes as a gradient does: with two classes its signs would be taken for a trained bias.
    return min(found, key=lambda name: "control" in name.split("/"), default=None)


def _inferred_label(seen: Upload, nothing: Upload, bias: str | None) -> Int[Array, ""] | None:
    """The label of the only sample; None where an upload does not tell it.

    The gradient of the cross-entropy by the logits, and so by the head's bias, has one sign for the label and the other
    for all other classes: a trained bias has risen for the label alone, a gradient is negative there.
    """
    if bias is not None:
        change = seen[bias] - nothing[bias]
        rose = jnp.sum(change > 0) <= jnp.sum(change < 0)
        return jnp.where(rose, jnp.argmax(change), jnp.argmin(change)).astype(jnp.int32)
    counts = [seen[name] for name in seen if name.split("/")[-1] == "held"]
    return jnp.argmax(counts[0]).astype(jnp.int32) if counts else None


def _check_options(attack: str, optimiser: str, steps: int, lr: float, tv: float, restarts: int, seed: int) -> None:
    """Raises a ConfigError for an option that is out of range."""
    for field, value, names in (("attack", attack, ("idlg", "dlg")), ("optimiser", optimiser, ("adam", "lbfgs"))):
        if value not in names:
            raise ConfigError(field, value, f"one of {', '.join(names)}")
    for field, number, least in (("steps", steps, 1), ("restarts", restarts, 1), ("seed", seed, 0)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < least:
            raise ConfigError(field, number, f"a whole number, {least} or more")
    if not (isinstance(lr, Real) and 0 < lr < np.inf):
        raise ConfigError("lr", lr, "a number above 0")
    if not (isinstance(tv, Real) and 0 <= tv < np.inf):
        raise ConfigError("tv", tv, "a number, 0 or more")
