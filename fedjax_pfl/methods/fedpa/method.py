"""FedPA (Jiang et al., IEEE TDSC 2024): prototypes, and a generator of hard features, regularise the whole model."""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt, Le
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, PerClass, Round, Samples, Update
from fedjax_pfl.methods.fedpa.generator import Generator
from fedjax_pfl.methods.fedpa.state import Server, Upload, View
from fedjax_pfl.methods.fedpa.teaching import Evidence, GeneratorTraining
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import cross_entropy, label_loss
from fedjax_pfl.ops.prototypes import Prototypes, centre_loss, class_sums, pool_prototypes
from fedjax_pfl.ops.training import LossTotals, Scalar, Trainer, is_off, phase_key
from fedjax_pfl.ops.tree import finite_rows, keep_rows


def fedpa(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    steps: Annotated[int, Ge(1)] | None = 20,
    guided_steps: Annotated[int, Ge(0)] = 20,
    alpha: Annotated[float, Ge(0)] = 25.0,
    beta: Annotated[float, Ge(0)] = 5.0,
    decay: Annotated[float, Gt(0), Le(1)] = 0.98,
    repulsion: Annotated[float, Ge(0)] = 0.15,
    generated: Annotated[int, Ge(1)] | None = None,
    hidden: Annotated[int, Ge(1)] = 256,
    noise: Annotated[int, Ge(1)] = 32,
    generator_lr: Annotated[float, Gt(0)] = 1e-4,
    generator_steps: Annotated[int, Ge(0)] = 50,
    generator_batch_size: Annotated[int, Ge(1)] = 32,
) -> Method:
    """FedPA: clients also classify generated features, and stay near the prototypes; the server trains the generator.

    Shared: w, the generator, prototypes. Personal: nothing. Headline: PRE, the global model; in tables of personal
    models report POST. The first round is FedAvg's with R steps. The generator learns from the heads before they are
    averaged. Gradients are large at first: ``training.clip_norm = 10`` helps where rounds diverge. The source is the
    public code, not the journal's text. Unlike there, prototypes are weighted by the samples of the round's steps, not
    of the data set; classes that nobody has keep theirs, and zeros are no prototype; features are generated of classes
    that have a prototype, there of all that the training data hold; a head's loss on a generated feature is weighted by
    that feature's class; the generator's hidden layer has no bias under its normalisation; and real features may be
    those of a ReLU, where both kinds are linear there.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      steps: R, local steps; None for the epochs of ``training``.
      guided_steps: how many of them, the first ones, have the two terms below.
      alpha: a_0, weight of the cross-entropy of generated features, on clients and in the generator's loss.
      beta: b_0, weight of the mean squared distance of features to their prototypes.
      decay: factor per round on both weights, down to 4e-6 alpha and 0.03 beta.
      repulsion: weight of the generated features' distance to the prototypes, which the generator increases.
      generated: B_g, features generated in each local step; their loss counts B_g / B times. None for B.
      hidden: width of the generator.
      noise: d_e, width of its noise.
      generator_lr: of Adam in round 0; times 0.98 in each round, with weight decay 0.01, as in the public code (3e-4 on
        MNIST there).
      generator_steps: of Adam in each round.
      generator_batch_size: features in each of these.

    Reference:
      L. Jiang, X. Wang, X. Yang, J. Shu, H. Lin, X. Yi. FedPA: Generator-Based Heterogeneous Federated Prototype
      Adversarial Learning. IEEE TDSC 2024. doi:10.1109/TDSC.2024.3419211.
    """
    classes, number = model.classes, train.batch_size if generated is None else generated
    network = Generator(hidden, classes, model.dim)
    teach = GeneratorTraining(model, network, noise, generator_steps, generator_batch_size, generator_lr, repulsion)

    def weights(t: Int[Array, ""]) -> tuple[Scalar, Scalar]:
        """a_t and b_t."""
        left = decay ** t.astype(jnp.float32)
        return alpha * jnp.maximum(left, 4e-6), beta * jnp.maximum(left, 0.03)

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, PyTree]:
        generator = teach.init(phase_key(key, "generator"))
        return Server(model.init(key), Prototypes.none(classes, model.dim), generator), ()

    def broadcast(server: Server) -> View:
        return View(server.params, server.prototypes.as_sent(), server.generator.params)

    def local(now: Round, view: View, client: PyTree, data: ClientData) -> Update:
        prototypes, (a, b) = Prototypes.as_received(view.prototypes), weights(now.t)
        optimizer = train.optimizer(now.t, view.params)

        def regularizer(params: Params, z: Float[Array, "batch K"], batch: Batch, key: Key[Array, ""]) -> Scalar:
            """The head's loss on generated features, and the distance of the extractor's features to the prototypes."""
            total = jnp.zeros(())
            if not is_off(alpha):
                key_y, key_noise = jax.random.split(key)
                # Of classes that somebody has trained on (rule R8): the generator learns no other.
                y = jax.random.categorical(key_y, jnp.where(prototypes.valid, 0.0, -jnp.inf), shape=(number,))
                features = teach.generate(view.generator, teach.draw(key_noise, y), y)
                known = prototypes.valid[y].astype(jnp.float32)  # all 1, or all 0 before any class has a prototype
                losses = cross_entropy(model.classify(params["head"], features), y, known)
                total += number / train.batch_size * a * losses
            if not is_off(beta):
                total += b * centre_loss(z, batch.y, batch.mask, prototypes)
            return total

        def loss(
            params: Params, batch: Batch, key: Key[Array, ""], guided: Bool[Array, ""]
        ) -> tuple[Float[Array, ""], Float[Array, "batch K"]]:
            z = model.features(params["extractor"], batch.x, batch.mask)
            total = label_loss(model, z, model.classify(params["head"], z), batch)
            return total + jnp.where(guided, regularizer(params, z, batch, key), 0.0), z

        def step(carry: tuple, batch: Batch, key: Key[Array, ""]) -> tuple:
            params, opt_state, totals, sums, counts = carry
            guided = (now.t > 0) & (totals.steps < guided_steps)
            (value, z), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch, key, guided)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            sums += class_sums(z, batch.y, batch.mask, classes)
            counts += jnp.sum(jax.nn.one_hot(batch.y, classes) * batch.mask[:, None], axis=0)
            return optax.apply_updates(params, updates), opt_state, totals.after(value, batch), sums, counts

        nothing = jnp.zeros((classes, model.dim)), jnp.zeros(classes)
        start = view.params, optimizer.init(view.params), LossTotals.none(), *nothing
        params, _, totals, sums, counts = train.over_batches(now, step, start, data, steps=steps)
        upload = Upload(params, PerClass(counts, sums))
        return Update(client, upload, train.info(totals, data), post=(view._replace(params=params), client))

    def aggregate(
        now: Round, server: Server, clients: PyTree, uploads: Upload, cohort: Cohort
    ) -> tuple[Server, PyTree]:
        # 0 * NaN is NaN: a client that has diverged counts as absent.
        heads, sums = keep_rows(finite_rows(uploads), (uploads.params["head"], uploads.prototypes))
        evidence = Evidence(heads, sums.held, server.prototypes)
        generator = teach(now, server.generator, evidence, weights(now.t)[0])
        prototypes = pool_prototypes(server.prototypes, sums)
        return Server(combine(uploads.params, cohort.weight), prototypes, generator), clients

    def personal(view: View, client: PyTree) -> Params:
        return view.params

    def global_predict(server: Server, x: Samples) -> Logits:
        return model.apply(server.params, x)

    return Method(init, local, aggregate, personal, model.apply, broadcast, global_predict=global_predict)
