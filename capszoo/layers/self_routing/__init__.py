"""Self-routing: every child chooses its parents from its pose alone, without agreement and without iterations.

Paper: Hahn, Pyeon, Kim, "Self-Routing Capsule Networks" (NeurIPS 2019), section 3. The public release was read for
facts: initialisation and the place of the activations.

======================= ==================================================================
symbol                  here
======================= ==================================================================
u_i, a_i                ``poses``, ``activations`` of the children
W_route_i, b_i          ``weight``, ``bias``
c_ij                    ``couplings``, ``softmax_j(W_route_i u_i + b_i)``
a_j                     ``Σ_i c_ij a_i / Σ_i a_i``
û_ij = W_pose_ij u_i    ``votes``
u_j                     ``Σ_i c_ij a_i û_ij / Σ_i c_ij a_i``
======================= ==================================================================

Letters: ``b`` batch, ``i`` children, ``j`` parents, ``d`` child pose, ``e`` parent pose, ``h w`` grid, ``k l`` kernel.

Deviations: 1e-7 is added to both denominators (1e-12 in the release, which the ONNX exporter would delete). All sums
are computed in float32 for half precision; under autocast, those of votes have its type.
"""

from .layers import ConvSelfRouting, SelfRouting
from .routing import self_routing

__all__ = ["ConvSelfRouting", "SelfRouting", "self_routing"]
