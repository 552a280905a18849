"""capConv and capFC: routing approximated in one supervised step by a master and an aide branch (EncapNet).

Paper: Li, Guo, Dai, Ouyang, Wang, "Neural Network Encapsulation" (2018), section 3.1, Eq. 6, Fig. 1(c) and 3(a),
Table 3; kernel of the aide, weight layout of capFC and initial values from the authors' release.

============== ==========================================================================================
symbol         here
============== ==========================================================================================
``v_j``        ``poses``: output capsule, after BN-ReLU-squash
master         ``master``: the mapped lower capsules of the same channel (grouped convolution, kernel k)
aide           ``aide``: the mapped lower capsules of all channels (plain convolution, kernel k + 4)
co-efficients  ``alpha`` of the master and ``beta`` of the aide: one map per capsule channel, not normalised
============== ==========================================================================================

Letters: ``b`` batch, ``g`` capsule channels ("groups", 32 in the paper), ``d e`` child and parent pose size,
``h w`` grid, ``k`` kernel, ``n`` classes. Feature maps are ``[b, g*d, h, w]``, channel = group * d + dimension.

Eq. 6 sums the remaining channels in the aide; an ungrouped convolution has all of them.

Our choices where the paper does not specify: "both" computes the coefficients of one capsule channel from that channel
of master and aide side by side (the weights of that convolution are stored in two modules, one for each branch);
coefficients start near one, so that a layer starts as master + aide.

Files: ``routing`` has the steps as functions, ``convolutions`` and ``layers`` parameters and shapes,
``engines`` training with less memory or time.
"""

from .convolutions import CoefficientConv2d
from .layers import CapConv, CapFC, EncapModule, MasterAide
from .routing import SquashGroups, cap_fc, capconv_combine, squash_groups

__all__ = [
    "CapConv",
    "CapFC",
    "CoefficientConv2d",
    "EncapModule",
    "MasterAide",
    "SquashGroups",
    "cap_fc",
    "capconv_combine",
    "squash_groups",
]
