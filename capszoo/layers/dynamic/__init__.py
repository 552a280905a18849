"""Dynamic routing: routing by agreement between vector capsules.

Paper: Sabour, Frosst, Hinton, "Dynamic Routing Between Capsules" (2017), Procedure 1 and Eq. 1-3. The variants (which
axis the softmax runs over, how the logits start, transforms shared over the grid) are those of Li et al., "Neural
Network Encapsulation" (2018), appendix A and Table 5.

============ =====================================
symbol       here
============ =====================================
u_i          ``x``, the children
û_ij = W u_i ``votes``
b_ij         ``logits``
c_ij         ``couplings``
s_j          ``total``, the weighted sum of votes
v_j          ``poses``
r            ``num_iters``
============ =====================================

Letters: ``b`` batch, ``i`` children, ``j`` parents, ``d`` child pose, ``e`` parent pose, ``g`` groups (capsule types
that share a transform), ``p`` grid positions, ``h w`` grid, ``k l`` kernel.

Files: ``routing`` has the procedures, step by step; ``layers`` the parameters and shapes; ``engines`` the other ways
to compute them, and ``blocked`` the operator of one of them, with its gradient. Another one is in C++ (``_native``).

Deviations: the softmax is float32 for half-precision votes. On a CPU, in eager mode or compiled, all
iterations are float32 too, except a single iteration of :class:`DynamicRouting`, which forms no votes, and training
with transforms shared over the grid.
"""

from .layers import Conv3dDynamicRouting, ConvDynamicRouting, DynamicRouting, SharedDynamicRouting
from .routing import dynamic_routing, shared_dynamic_routing

__all__ = [
    "Conv3dDynamicRouting",
    "ConvDynamicRouting",
    "DynamicRouting",
    "SharedDynamicRouting",
    "dynamic_routing",
    "shared_dynamic_routing",
]
