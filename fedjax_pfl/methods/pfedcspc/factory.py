"""pFedCSPC: its hyperparameters, and which parts they switch on."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Strict

from fedjax_pfl.method import Method, Static
from fedjax_pfl.methods.loss_by_name import Base, loss_named
from fedjax_pfl.methods.pfedcspc.calibration import Calibrator
from fedjax_pfl.methods.pfedcspc.client_loss import ClientLoss
from fedjax_pfl.methods.pfedcspc.cluster import ClusterPrototypes
from fedjax_pfl.methods.pfedcspc.initial import ClassWeight, InitialModels
from fedjax_pfl.methods.pfedcspc.knowledge import KnowledgePrediction, Norm
from fedjax_pfl.methods.pfedcspc.method import algorithm
from fedjax_pfl.methods.pfedcspc.parts import Parts
from fedjax_pfl.methods.pfedcspc.relations import Alignment, Penalty
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.training import Trainer, is_off


def pfedcspc(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    kappa: Annotated[float, Ge(0)] = 0.1,
    eta: Annotated[float, Ge(0)] = 0.1,
    pmi: Literal["every", "eval", "off"] = "eval",
    tau_p: Annotated[float, Gt(0)] = 0.5,
    pmi_weight: ClassWeight = "loss",
    calibrate: bool = True,
    clusters: Annotated[int, Ge(1)] = 3,
    repeats: Annotated[int, Ge(1)] = 5,
    share: Annotated[float, Gt(0), Le(1)] = 0.8,
    kmeans_steps: Annotated[int, Ge(0)] = 20,
    augmented: Annotated[int, Ge(0)] = 5,
    margin: Annotated[float, Ge(0)] = 1.0,
    tau_l: Annotated[float, Gt(0)] = 0.5,
    tau_g: Annotated[float, Gt(0)] = 0.5,
    edge: Penalty = "abs",
    kp_weight: Annotated[float, Ge(0), Le(1)] = 0.5,
    kp_norm: Norm = "minmax",
    base: Base = "fedavg",
    mu: Annotated[float, Ge(0)] | None = None,
    encoder_ce: Annotated[float, Ge(0), Static] = 0.0,
    server_lr: Annotated[float, Gt(0)] = 0.01,
    server_lr_drops: Annotated[tuple[int, ...], Strict(False)] = (6, 41),
    server_epochs: Annotated[int, Ge(0)] = 100,
    server_epochs_per_drop: Annotated[int, Ge(1)] = 30,
    server_batch_size: Annotated[int, Ge(1)] = 100,
    server_weight_decay: Annotated[float, Ge(0)] = 1e-5,
) -> Method:
    """pFedCSPC: one method for a better global model and for better personal ones.

    Clients train guided by global prototypes, and cluster their features into prototypes. The server retrains
    projection head and classifier of the averaged model on the prototypes of the round's participants, and combines a
    personal initial model m_k for each client from their encoders; local adaptation makes the personal model of it.

    Shared: w_g, u_g, e; the server keeps each client's newest prototypes and the encoder of its m_k, which takes memory
    (`Known`). Personal: with ``pmi = "every"``, what the client last got of these encoders. Headline: PRE, m_k after
    local adaptation; with another ``pmi`` than ``eval``, where PRE is not adapted, POST. The paper's global accuracy is
    ``global``, its I_local is ``i_local``. With every module off it is FedAvg, and POST is FedAvg-FT.

    Args:
      model: encoder, projection head and classifier.
      train: the local trainer.
      combine: how the server averages models.
      kappa: weight of the alignment with the global prototypes (PTA); the paper's grid is 0.01, 0.05, 0.1, 0.5.
      eta: weight of both contrastive losses of the server; the same grid.
      pmi: what personal initial models are for. ``eval``: for evaluation alone, where they are adapted by
        ``training.epochs`` before PRE; training starts from the global model. ``every``: training starts from them in
        every round, and PRE is not adapted. ``off``: there are none. The paper does not say. Its ablation of the global
        model does without them and ends at the figure of the whole method, which speaks for ``eval``. In either case
        every round combines the encoders of its participants anew for all that ever sent prototypes, by the newest of
        these; a client that never took part has the global encoder. With ``eval`` they are no traffic: what is sent for
        an evaluation counts for no method.
      tau_p: temperature of the weights of PMI, not in the paper.
      pmi_weight: what counts alike in the loss of a client's prototypes that the weights of PMI follow (Eq. 4).
        ``loss``: each prototype, as printed. ``class``: each class that the client holds. ``count``: each sample, that
        is, each class by the number of the client's samples, which are then sent up with the prototypes. The paper's
        clients send about as many prototypes of a rare class as of a frequent one, so that the first two know little
        of a client's label proportions and give nearly equal weights; the diagnostics ``p_kk`` and
        ``effective_clients`` say how equal.
      calibrate: whether the server retrains H and F (CA).
      clusters: j, clusters per class (CPM).
      repeats: n_repeat, prototypes per cluster, 1 and 5 in Fig. 6; illegible elsewhere, as are clusters and share.
      share: r, the share of a cluster's samples in a prototype. TPG: one cluster, one repeat, share 1.
      kmeans_steps: Lloyd's steps.
      augmented: n_aug, pairs of augmented samples per prototype (PA); 0 leaves their loss out.
      margin: alpha of their loss.
      tau_l: temperature of the contrast with the global prototypes.
      tau_g: temperature of the contrast between the clients' prototypes.
      edge: how the edge alignment measures a difference; the paper's L2 norm of a number is its absolute value.
      kp_weight: lambda, weight of the exemplars in the global model's prediction (KP), not in the paper.
      kp_norm: how logits and similarities are brought to one scale, per sample; not in the paper.
      base: the client's loss that the alignment is added to (Table VI); under FedASAM the alignment's gradient is
        taken at the worst point near w, too.
      mu: the coefficient of that loss: FedProx's and MOON's mu, FedNTD's beta, FedASAM's rho; that method's default
        unless given.
      encoder_ce: weight of one more cross-entropy in the client's loss, of a linear classifier on the encoder's
        features. It is not in the paper; FedCSPC's code has it, with weight 1 (and its FedAvg has not). The classifier
        is part of the shared model, averaged as the rest is, and predicts nothing.
      server_lr: learning rate of the server in the first rounds, not in the paper. FedCSPC's code begins at 0.1, with
        which our global model had 59 to 60 % on CIFAR-10 after 20 rounds instead of 62, with ``encoder_ce`` and without
        (one seed, docs/papers/pfedcspc.md).
      server_lr_drops: rounds from which on it is a tenth of what it was, those of FedCSPC's code (0.1, from round 6 on
        0.01, from round 41 on 0.001); with our ``server_lr`` the rate is a tenth of that throughout. We chose 0.01 by
        15 rounds (a third of CIFAR-10, one seed, test samples) with the only drop in round 40, hence without one.
      server_epochs: passes over the prototypes.
      server_epochs_per_drop: passes after which the learning rate is a tenth of what it was, within a round.
      server_batch_size: prototypes per step.
      server_weight_decay: L2 coefficient of the server.

    Raises:
      ValueError: the model has no projection head, or mu is given with a base that has none, FedAvg.

    Reference:
      L. Meng, Z. Qi, L. Wu, X. Du, Z. Li, L. Cui, X. Meng. Improving Global Generalization and Local Personalization
      for Federated Learning. IEEE TNNLS, 2025. Eqs. 2-18. From its predecessor FedCSPC's code are epochs, batch size,
      weight decay, the rounds in which the rate drops, cosines in Eqs. 5 and 12 (the paper prints inner products) and
      distances by their mean over the batch in Eq. 7. It retrains on the last prototypes of all who ever took part.
    """
    calibrator = Calibrator(
        eta=eta,
        augmented=augmented,
        margin=margin,
        temperature=tau_g,
        lr=server_lr,
        lr_drops=server_lr_drops,
        epochs=server_epochs,
        epochs_per_drop=server_epochs_per_drop,
        batch_size=server_batch_size,
        weight_decay=server_weight_decay,
        diagnose=train.diagnose,
    )
    align = None if is_off(kappa) else Alignment(kappa, tau_l, edge)
    initial = None if pmi == "off" else InitialModels(pmi, tau_p, pmi_weight)
    knowledge = None if is_off(kp_weight) else KnowledgePrediction(kp_weight, kp_norm)
    needs_prototypes = calibrate or not (align is None and initial is None and knowledge is None)
    counts = initial is not None and pmi_weight == "count"
    parts = Parts(
        loss=ClientLoss(align, encoder_ce, loss_named(base, model, mu)),
        cluster=ClusterPrototypes(clusters, repeats, share, kmeans_steps, counts) if needs_prototypes else None,
        initial=initial,
        calibrate=calibrator if calibrate else None,
        knowledge=knowledge,
    )
    return algorithm(model, train, combine, parts)
