"""Inverted dot-product attention (IDPA) routing: children choose among parents by a dot product, LayerNorm follows.

Paper: Tsai, Srivastava, Goh, Salakhutdinov, "Capsules with Inverted Dot-Product Attention Routing" (ICLR 2020,
arXiv:2002.04764), Procedures 1 and 2. The authors' release was read for facts: the scale of the agreement, the
initial values of the weights, the place of the dropout.

=========== ===========================================================================================
symbol      here
=========== ===========================================================================================
p_i^L       a child's pose; ``children`` holds those of a layer
p_j^{L+1}   a parent's pose, ``parents`` before a pass, ``poses`` after it
W_ij        ``weight``: vote = pose·W for matrix poses (``[p, q]·[q, r]``), a whole matrix for vector poses
v_ij        ``votes``
a_ij        ``agreement``, times ``scale``
r_ij        ``couplings``, softmax of the agreement over the parents
t           ``num_iters`` (passes of Procedure 1)
=========== ===========================================================================================

Letters: b batch, h w grid, k l kernel, i children, j parents, d and e their pose sizes, p q r rows and columns of
matrix poses (p = 1, q = d, r = e for vector poses), n rows of independent routings: batch x output positions.

In a convolutional layer each output position routes the children of its own window; the softmax runs over the
parent types at that position.

Concurrent routing and its dependency cone
    Procedure 2 computes iteration 1 layer after layer; in iterations 2..t every layer is updated from the
    *previous* iteration's poses of its children and of itself. Iteration s of layer L therefore depends only on
    iteration s-1 of layers L-1 and L (on iteration 1 of layer L-1 for s = 1). With layers 1..M the class capsules
    after t iterations need just ``max(1, t - (M - L))`` iterations of layer L; what lies outside of this cone cannot
    reach the scores, nor their gradients, and :class:`IDPAStack` does not compute it. At t = 2 that is one pass for
    every layer but the last, and two for the last. ``full=True`` computes everything, for those who look at
    the hidden layers' last poses and couplings. Sequential routing (ablation B) has no such shortcut.

    The cone also gives an order: layer after layer, each with all its iterations, from the list of its children's
    iterations. That is what the code does; the values are those of the procedure, iteration by iteration.

Speed
    First pass: with parents at zero every coupling is 1/parents, so that the new parents are the sum of votes
    divided by the number of parents: one convolution or matrix product, in which no vote is formed. For matrix
    poses the row p of the children becomes part of the batch: input ``[b*p, i*q, h, w]``, weight
    ``[j*r, i*q, k, l]``.

    Later passes: votes come from one batched product over the children, ``[i, n*p, q] x [i, q, j*r]``, and stay in
    its layout ``[i, n, p, j, r]``: they are never transposed, and shared between passes as long as the
    children stay the same. Agreement and update are batched products over blocks of votes, each block holding all
    children and g parents (and all rows p, where one block holds all parents); the terms between different parents
    are masked out. That is g times the arithmetic, but in products wide enough to run at a GEMM's speed. Measured
    on one thread, one pass over 800 children, 10 parents, 4x4 poses, batch 32, forward and backward: 52 ms, against
    91 ms with votes transposed to ``[n, j, i, e]`` and 80 ms with block-diagonal weights.

    That is the plain form, for what is traced, scripted or exported, and for few votes. Where votes are many
    (``engines._MANY``), an eager or compiled pass on a CPU is the operator ``capszoo::idpa_pass``, which keeps no
    vote: it takes some routings and some children at a time, computes their votes into a buffer that stays in the
    cache, routes them there with plain multiplications and sums, and adds up; its backward pass computes them again.
    (Children are independent of each other up to the sum, so that any block of them will do.)

    On CUDA a pass is ``capszoo::fused_pass`` (:mod:`capszoo.layers._triton`), eager or compiled, wherever its kernels
    take the sizes: votes in registers, windows read from the grid itself, LayerNorm at the end. Elsewhere, the plain
    form.

Files: ``routing`` has Procedure 1 as a pure function and the plain form; ``blocked`` the operator; ``engines``
chooses among the forms; ``base`` and ``layers`` are the modules, ``stack`` is Procedure 2.

Deviations and our choices: the agreement is scaled by 1/sqrt(e), as in the release (the text omits it; an argument).
Random starts are drawn once, at construction, and shared by all positions. What "activations as in EM routing"
(ablation C) means is said in :class:`ConvIDPA`.
"""

from .layers import FCIDPA, CapsuleNorm, ConvIDPA
from .routing import idpa_routing
from .stack import IDPAStack

__all__ = ["CapsuleNorm", "ConvIDPA", "FCIDPA", "IDPAStack", "idpa_routing"]
