"""The last layers of a model, split off and joined again."""

import jax
import pytest

from fedjax_pfl.ops.layers import join_layers, last_layers, split_layers

KEY = jax.random.key(0)


def test_the_last_layers_are_the_head_and_those_nearest_to_it(model, model_with_maps):
    assert [last_layers(model, p) for p in (1, 2)] == [(), ("hidden_layer",)]
    assert [last_layers(model_with_maps, p) for p in (1, 2, 4)] == [(), ("dense",), ("conv1", "conv2", "dense")]
    with pytest.raises(ValueError, match="5 layers are more than the 4 of the model: conv1, conv2, dense, head"):
        last_layers(model_with_maps, 5)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_split_model_is_joined_again(number, model_with_maps):
    params = model_with_maps.init(KEY)
    lower, upper = split_layers(params, last_layers(model_with_maps, number))
    assert sorted(lower) == ["conv1", "conv2", "dense"][: 4 - number]
    assert sorted(upper["extractor"]) == ["conv1", "conv2", "dense"][4 - number :]
    assert upper["head"] is params["head"]
    joined = join_layers(lower, upper)
    assert jax.tree.structure(joined) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(params), strict=True))
