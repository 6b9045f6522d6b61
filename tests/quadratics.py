"""A model whose loss is a quadratic, for methods whose steps then have a closed form."""

import jax.numpy as jnp
import numpy as np

from fedjax_pfl.models import Model


def quadratic(matrix, centre, start):
    """F(w) = (w - c)' A (w - c) / 2 plus a constant on every batch that has a sample; 0 on one that has none.

    w stands in ``params["extractor"]["point"]``; as a feature it carries the loss as a regulariser, and the head is
    a parameter without any effect.
    """
    matrix, centre = jnp.asarray(matrix, jnp.float32), jnp.asarray(centre, jnp.float32)

    def init(key):
        return {"extractor": {"point": jnp.asarray(start, jnp.float32)}, "head": {"bias": jnp.zeros(3)}}

    def features(theta, x, mask=None):
        return jnp.broadcast_to(theta["point"], (len(x), len(centre)))

    def classify(phi, z):
        return jnp.zeros((len(z), 3))

    def regularizer(z, mask):
        away = z[0] - centre
        return jnp.where(jnp.sum(mask) > 0, 0.5 * away @ (matrix @ away), 0.0)

    return Model(
        init=init,
        features=features,
        features_and_maps=lambda theta, x, mask=None: (features(theta, x), ()),
        classify=classify,
        apply=lambda params, x, mask=None: classify(params["head"], features(params["extractor"], x)),
        dim=len(centre),
        classes=3,
        maps=(),
        regularizer=regularizer,
    )


def half_running(model):
    """The quadratic, of whose point all but two coordinates are a running statistic: its gradient is its update."""

    def init(key):
        params = model.init(key)
        point = params["extractor"]["point"]
        return {**params, "extractor": {"point": point[:2], "running_mean": point[2:]}}

    def features(theta, x, mask=None):
        return model.features({"point": jnp.concatenate([theta["point"], theta["running_mean"]])}, x, mask)

    return model._replace(init=init, features=features)


def curved(seed=0, dim=4):
    """A positive definite matrix with eigenvalues up to a few ones, a centre and a starting point, in float64."""
    rng = np.random.default_rng(seed)
    root = rng.normal(0, 0.7, (dim, dim))
    return root @ root.T + 0.2 * np.eye(dim), rng.normal(0, 1, dim), rng.normal(0, 1, dim)
