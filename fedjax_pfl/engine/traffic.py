"""What is exchanged: counted in every round on the device, turned into bytes by the shapes of view and upload."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from fedjax_pfl.method import Part, PerClass, SentIf, part_of
from fedjax_pfl.ops.uploads import has_form_of


class Traffic(NamedTuple):
    """Communication so far.

    Attributes:
      down: how often the view was sent to a client.
      up: how often an upload came back.
      rows_down: class rows sent in the per-class part of these views.
      rows_up: class rows sent in the per-class part of these uploads.
      sent_if_down: how many of these views came with the part that is sent only if its flag is true (`SentIf`).
      sent_if_up: how many of these uploads did.
    """

    down: Int[Array, ""]
    up: Int[Array, ""]
    rows_down: Int[Array, ""]
    rows_up: Int[Array, ""]
    sent_if_down: Int[Array, ""]
    sent_if_up: Int[Array, ""]


def flags_set(tree: PyTree, kind: type[Part]) -> Int[Array, ""]:
    """How many flags of the part of this kind are set, over all clients if it has a client axis; 0 without a part."""
    part = part_of(tree, kind)
    return jnp.zeros((), jnp.int32) if part is None else jnp.sum(part[0].astype(bool), dtype=jnp.int32)


def traffic_of(down: Int[Array, ""], view: PyTree, up: Int[Array, ""], uploads: PyTree) -> Traffic:
    """What a round sends: the view to so many clients, and the uploads of so many, stacked."""
    return Traffic(
        down=down,
        up=up,
        rows_down=down * flags_set(view, PerClass),
        rows_up=flags_set(uploads, PerClass),
        sent_if_down=down * flags_set(view, SentIf),
        sent_if_up=flags_set(uploads, SentIf),
    )


class Exchange(NamedTuple):
    """Shapes (``jax.ShapeDtypeStruct``) of what one client holds and exchanges.

    Attributes:
      view: what is sent down to every participant.
      client: a client's personal state. Its field ``inbox``, if any, is sent down anew in every round.
      upload: what is sent up.
      diagnostics: names of what it says for the record, which counts as no traffic.
    """

    view: PyTree
    client: PyTree
    upload: PyTree
    diagnostics: tuple[str, ...] = ()

    @property
    def down(self) -> PyTree:
        """All that a client receives in a round."""
        return self.view, getattr(self.client, "inbox", ())

    @property
    def up(self) -> PyTree:
        """All that a client sends in a round."""
        return self.upload

    @property
    def comes_back(self) -> bool:
        """Whether an upload is what was sent down, trained: numbers of the same form."""
        return has_form_of(self.view, self.upload)

    def dense_bytes(self, traffic: Traffic) -> int:
        """Bytes exchanged if all parts were always sent whole."""
        return int(traffic.down) * size(self.down) + int(traffic.up) * size(self.up)

    def sent_bytes(self, traffic: Traffic) -> int:
        """Bytes exchanged: only the class rows that are held, and no part in rounds that leave it out."""
        left_out = 0
        for tree, times, rows, flagged in (
            (self.view, traffic.down, traffic.rows_down, traffic.sent_if_down),
            (self.upload, traffic.up, traffic.rows_up, traffic.sent_if_up),
        ):
            for part, sent in ((part_of(tree, PerClass), rows), (part_of(tree, SentIf), flagged)):
                if part is not None:
                    flags, content = part
                    left_out += (int(times) * flags.size - int(sent)) * (size(content) // flags.size)
        return self.dense_bytes(traffic) - left_out


def count(tree: PyTree) -> int:
    """Number of scalars in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def size(tree: PyTree) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
