"""EM routing: each parent is a Gaussian cluster of the votes of its children.

Papers: the procedure as Tsai et al. 2020 ("Capsules with inverted dot-product attention routing", Tables 6-7) and
Li et al. 2018 ("Neural network encapsulation", section 2.1) compare against it; it is that of Hinton, Sabour and
Frosst 2018 ("Matrix capsules with EM routing", Procedure 1). The cost normalisation is Li et al., appendix A.i.

========================= =================================================
symbol                    here
========================= =================================================
``V_ij``                  ``votes``, child ``i``'s vote for the pose of parent ``j``
``a_i``                   ``activations`` of the children
``R_ij``                  ``coupling``: share of child ``i`` that parent ``j`` takes
``sum_i R_ij`` (after a)  ``mass``
``mu_j``, ``sigma_j^2``   ``poses``, ``variance``
``beta_v``, ``beta_a``    ``beta_v``, ``beta_a``, one scalar per parent type
``lambda_t``              ``lam_start + lam_step * t``, with t from 0
``a_j``                   ``sigmoid(logits)``
========================= =================================================

Letters: b batch (for a convolution: batch times output positions) · i children · j parents · d, e pose sizes ·
p, q rows and columns of a matrix pose · h w grid · k l kernel · n classes · g groups of children that share their
transforms.

Each iteration, from ``R = 1 / parents``::

    M-step   R <- R * a_i + eps / parents;  mu, sigma^2 = weighted mean and variance of the votes
             cost_jh = (beta_v + log sigma_jh) * sum_i R_ij
             logit_j = lambda_t * (beta_a - sum_h cost_jh)
    E-step   R_ij = softmax over parents of (log sigmoid(logit_j) - sum_h [log sigma_jh + (V - mu)^2 / 2 sigma^2])

Deviations and choices of ours, all of them arguments: ``lambda_t = 1 + t``. Variances have the floor ``var_floor``, and
from the second iteration on also ``var_share`` of the first iteration's variance. Normalised costs whose range may be
rounding error are not stretched to the full range (``min_share``; these two are arguments of the functions only).
``eps`` is added to every child's activation, so that a weighted mean is defined where no child is active.
Activations are returned before their sigmoid, which keeps their order where the sigmoid has saturated; without
``normalize_cost`` it saturates early (Li et al. call this option crucial). :class:`SharedEM` clamps poses and
activations at 1e11: their products would overflow.

Computation: squares are taken about the mean of the first iteration, where they do not cancel; means,
variances and log-likelihoods are then matrix-vector products of the votes and of these squares, the only two
tensors of that size. Half precision is computed in float32, also under autocast.

Files: ``routing`` has the procedure for votes and for windows, step by step, and ``shared`` that for transforms shared
over a grid, which forms no votes; ``steps`` has the steps common to both; ``base`` and ``layers`` the parameters and
shapes; ``engines`` the other ways to compute them: ``native`` (windows, in C++), ``blocked`` (windows, in
blocks) and ``chunked`` (graphs for a CPU).
"""

from .layers import ClassEM, ConvEM, SharedEM
from .routing import em_routing
from .shared import shared_em_routing

__all__ = ["ClassEM", "ConvEM", "SharedEM", "em_routing", "shared_em_routing"]
