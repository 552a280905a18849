"""Inverted dot-product attention (IDPA) routing: children choose among parents by a dot product, LayerNorm follows.

Paper: Tsai, Srivastava, Goh, Salakhutdinov, "Capsules with Inverted Dot-Product Attention Routing" (ICLR 2020,
arXiv:2002.04764), Procedures 1 and 2. The authors' release was read for facts: the scale of the agreement, the
initial values of the weights, the place of the dropout.

=========== ===========================================================================================
symbol      here
=========== ===========================================================================================
p_i^L       a child's pose; ``children`` has those of a layer
p_j^{L+1}   a parent's pose, ``parents`` before an iteration, ``poses`` after it
W_ij        ``weight``: vote = pose·W for matrix poses (``[p, q]·[q, r]``), a whole matrix for vector poses
v_ij        ``votes``
a_ij        ``agreement``, times ``scale``
r_ij        ``couplings``, softmax of the agreement over the parents
t           ``num_iters`` (iterations of Procedure 1)
=========== ===========================================================================================

Letters: b batch, h w grid, k l kernel, i children, j parents, d and e their pose sizes, p q r rows and columns of
matrix poses (p = 1, q = d, r = e for vector poses), n rows of independent routings: batch x output positions.

In a convolutional layer each output position routes the children of its own window; the softmax runs over the
parent types at that position.

Concurrent routing and its dependency cone
    Procedure 2 computes iteration 1 layer after layer; in iterations 2..t every layer is updated from the
    *previous* iteration's poses of its children and of itself. Iteration s of layer L therefore depends only on
    iteration s-1 of layers L-1 and L (on iteration 1 of layer L-1 for s = 1). With layers 1..M the class capsules
    after t iterations need ``max(1, t - (M - L))`` iterations of layer L. Everything outside of this cone affects
    neither the scores nor their gradients, and :class:`IDPAStack` does not compute it. At t = 2 that is one iteration
    for every layer but the last, and two for the last. ``full=True`` computes everything, to inspect the hidden
    layers' last poses and couplings. Sequential routing (ablation B) has no such shortcut.

    The cone also determines an order: layer after layer, each with all its iterations, from the list of its children's
    iterations. The code computes in this order; the values equal those of the procedure, iteration by iteration.

The first iteration forms no votes
    With parents at zero every coupling is 1/parents, so that the new parents are the sum of votes divided by the
    number of parents: one convolution or matrix product. For matrix poses the row p of the children becomes part
    of the batch: input ``[b*p, i*q, h, w]``, weight ``[j*r, i*q, k, l]``.

Files: ``routing`` has Procedure 1; ``base`` and ``layers`` the modules, whose ``reference`` uses it; ``stack`` is
Procedure 2; ``engines`` declares the other ways to compute an iteration (``blocked`` has the operator of one of
them, ``_native`` that of another, in C++).

Deviations and our choices: the agreement is scaled by 1/sqrt(e), as in the release (the text omits it; an argument).
Random starts are drawn once, at construction, and shared by all positions. :class:`ConvIDPA` explains our reading of
"activations as in EM routing" (ablation C).
"""

from .layers import FCIDPA, CapsuleNorm, ConvIDPA
from .routing import idpa_routing
from .stack import IDPAStack

__all__ = ["CapsuleNorm", "ConvIDPA", "FCIDPA", "IDPAStack", "idpa_routing"]
