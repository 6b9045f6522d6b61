"""FedAvg-FT and FedProx-FT: fine-tuning starts from the global model, is thrown away, and is what it says it is."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedavg_ft import fedavg_ft
from fedjax_pfl.methods.fedfcd import fedfcd
from fedjax_pfl.methods.fedprox_ft import fedprox_ft
from fedjax_pfl.methods.fedrep import fedrep
from fedjax_pfl.methods.finetuned import finetuned
from tests import generator
from tests.reference import MLP, client_key, held, now, to_numpy

KEY = generator.key(9)
bounds = jnp.zeros((), jnp.int32), jnp.array(2, jnp.int32)


def play(method, federation):
    """The run of two rounds, and its PRE scores."""
    engine = Engine(method, 7)
    run = jax.jit(engine.rounds)(KEY, jax.jit(engine.init)(KEY, federation), *bounds, jnp.array(True), federation)
    return run, jax.jit(engine.pre)(KEY, bounds[1], run.state, federation)


def same(tree, other):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, tree, other)))


@pytest.fixture(scope="module")
def plain(model, trainer, federation):
    return play(fedavg(model, trainer), federation)


@pytest.fixture(scope="module")
def tuned(model, trainer, federation):
    return play(fedavg_ft(model, trainer, finetune_epochs=3), federation)


def test_no_epochs_give_fedavgs_pre_exactly(model, trainer, federation, plain):
    for scope in ("full", "head"):
        assert same(play(fedavg_ft(model, trainer, finetune_epochs=0, finetune_scope=scope), federation), plain)


def test_rounds_are_fedavgs_bit_for_bit_and_only_pre_differs(plain, tuned):
    assert same(tuned[0], plain[0])
    assert float(tuned[1].test.loss.mean()) < float(plain[1].test.loss.mean())


def personalize(method, key, t, view, federation, i, client=()):
    """The model that the client is scored on."""
    data = client_data(federation.x, federation.y, jax.tree.map(lambda leaf: leaf[i], federation.train))
    return jax.jit(lambda *args: method.personal(*method.personalize(*args)))(now(key, t), view, client, data)


@pytest.mark.parametrize(("scope", "lr"), [("full", None), ("full", 0.05), ("head", None), ("head", 0.05)])
def test_fine_tuning_is_numpys_with_and_without_cached_features(scope, lr, model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.7, weight_decay=0.0 if scope == "head" else 0.02)
    method = fedavg_ft(model, trainer, finetune_epochs=4, finetune_lr=lr, finetune_scope=scope)
    view, mlp = model.init(KEY), MLP(federation.x, federation.y)
    for i in (1, 2, 6):
        key = client_key(KEY, 2, i)
        found = personalize(method, key, 2, view, federation, i)
        gradient = mlp.gradient if scope == "full" else mlp.head_gradient
        expected, _ = mlp.train(
            to_numpy(view),
            key,
            2,
            held(federation.train, i),
            trainer,
            gradient=gradient,
            phase="finetune",
            epochs=4,
            lr=trainer.lr if lr is None else lr,
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


def test_head_only_leaves_the_extractor_alone_even_with_weight_decay(model, trainer, federation):
    method = fedavg_ft(model, replace(trainer, weight_decay=0.1), finetune_scope="head")
    view = model.init(KEY)
    found = personalize(method, KEY, 0, view, federation, 2)
    assert same(found["extractor"], view["extractor"])
    assert not same(found["head"], view["head"])


def test_fedprox_ft_without_the_proximal_term_is_fedavg_ft_bit_for_bit(model, trainer, federation, tuned):
    assert same(play(fedprox_ft(model, trainer, mu=0.0, finetune_epochs=3), federation), tuned)


def test_fedprox_ft_fine_tunes_without_the_proximal_term(model, trainer, federation, plain):
    view, options = plain[0].state.server, {"finetune_epochs": 2, "finetune_lr": 0.05, "finetune_scope": "head"}
    found = personalize(fedprox_ft(model, trainer, mu=5.0, **options), KEY, 2, view, federation, 2)
    assert same(found, personalize(fedavg_ft(model, trainer, **options), KEY, 2, view, federation, 2))
    with_prox = play(fedprox_ft(model, trainer, mu=1.0), federation)[0]
    assert not same(with_prox.state, plain[0].state)


def test_any_method_can_be_fine_tuned_where_its_model_is_an_extractor_with_a_head(model, trainer, federation):
    """It starts from FedRep's personal head, trained once more as before any scoring; training goes on without both."""
    method = fedrep(model, trainer, final_head_epochs=3)
    tuned = finetuned(method, model, trainer, epochs=2, lr=0.05, scope="full")
    theta, phi = model.init(KEY)["extractor"], jax.tree.map(lambda leaf: leaf + 0.1, model.init(KEY)["head"])
    key, mlp = client_key(KEY, 0, 4), MLP(federation.x, federation.y)
    found = personalize(tuned, key, 0, theta, federation, 4, phi)
    start, rows = to_numpy({"extractor": theta, "head": phi}), held(federation.train, 4)
    scored, _ = mlp.train(start, key, 0, rows, trainer, gradient=mlp.head_gradient, phase="final head", epochs=3)
    expected, _ = mlp.train(scored, key, 0, rows, trainer, phase="finetune", epochs=2, lr=0.05)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert same(tuned.personal(theta, phi), method.personal(theta, phi))
    with pytest.raises(ValueError, match="more than an extractor with a head"):
        finetuned(fedfcd(model, trainer), model, trainer, epochs=2, lr=None, scope="full")
