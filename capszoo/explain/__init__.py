"""Analyse a capsule network on images: heat maps, reconstructions, routing statistics, convergence, plotting.

>>> from capszoo.explain import explain, save_figure
>>> from capszoo.inference import load_model
>>> explanation = explain(load_model("resnet20_routingcaps.mnist"), "digit_7.png")
>>> save_figure(explanation, "heat.png").name
'heat.png'

``heat_map`` shows the source of a prediction and ``reconstructions`` a decoder's images from the capsules;
``routing_stats`` measures couplings and votes, ``convergence`` the changes in each iteration of routing; ``plotting``
is shared by all pictures.
"""

from .heat_map import Explanation, class_index, explain, save_figure, save_heat_grid

__all__ = ["Explanation", "class_index", "explain", "save_figure", "save_heat_grid"]
