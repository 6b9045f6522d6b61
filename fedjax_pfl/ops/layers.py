"""Splits the parameters of a model into its last layers and the layers below."""

from fedjax_pfl.models.base import Model, Params


def last_layers(model: Model, number: int) -> tuple[str, ...]:
    """The names of the extractor's layers among the last ``number`` layers of the model; the head counts as one.

    Raises:
      ValueError: the model has fewer layers.
    """
    below = len(model.layers) - (number - 1)
    if below < 0:
        names = ", ".join((*model.layers, "head"))
        raise ValueError(f"{number} layers are more than the {len(model.layers) + 1} of the model: {names}")
    return model.layers[below:]


def split_layers(params: Params, names: tuple[str, ...]) -> tuple[Params, Params]:
    """(lower, upper): the extractor without the named layers; and the named layers together with the head."""
    theta = params["extractor"]
    lower = {name: layer for name, layer in theta.items() if name not in names}
    return lower, {"extractor": {name: theta[name] for name in names}, "head": params["head"]}


def join_layers(lower: Params, upper: Params) -> Params:
    """Puts the two parts from `split_layers` together again."""
    return {"extractor": {**lower, **upper["extractor"]}, "head": upper["head"]}
