"""Capsule heads: from a feature map to class scores, with any routing of the zoo. :data:`HEADS` lists them.

The trunk and the twins are those of Hahn, Pyeon, Kim, "Self-Routing Capsule Networks" (NeurIPS 2019): 32 capsule types
of 16 dimensions from a 3x3 convolution, then one routing layer whose window is the whole map (``depth=1``), or a 3x3
layer of stride 2 below it (``depth=2``). The public release was read for facts. ``depth=2`` is available for the
paper's routings: dynamic, em, self_routing.

If scores are logarithms, they are log-probabilities: their cross-entropy is the negative log-likelihood.

Our choices: the EM head's inverse temperature is ``5e-4 + 4.6e-4 t``, the straight line through the release's
0.01 (1 - 0.95^(t+1)) at t = 0 and nearly at t = 1, 2; ``idpa`` and ``self_attention`` have the same primary capsules,
with LayerNorm and with the exponential squash; ``poses`` of self_routing, whose last layer has none, are the weighted
means of its children's poses. ``heinsen`` is the head of its own paper, which has no primary capsules.

Files: ``base`` has the table and the base class; ``pooling`` the heads without primary capsules; ``capsule_layers`` the
base of those with; the others a routing each.

Letters: ``b`` batch, ``i`` children, ``j`` parents, ``d`` child pose, ``e`` parent pose, ``h w`` grid, ``n`` classes.
"""

# isort: off
from .base import HEADS, CapsuleHead, HeadOutput, create_head, head_arguments, unknown_routing

# heads enter HEADS in this order, which is that of the docs' tables
from . import pooling, dynamic, em, idpa, self_routing, self_attention, heinsen  # noqa: F401

# isort: on

__all__ = ["HEADS", "CapsuleHead", "HeadOutput", "create_head", "head_arguments", "unknown_routing"]
