"""What a capsule network does with an image: heat maps, reconstructions, routing statistics, convergence, plotting.

>>> from capszoo.explain import explain, save_figure
>>> from capszoo.inference import load_model
>>> explanation = explain(load_model("resnet20_routingcaps.mnist"), "digit_7.png")
>>> save_figure(explanation, "heat.png").name
'heat.png'

``heat_map`` shows where a prediction came from and ``reconstructions`` what a decoder makes of the capsules;
``routing_stats`` measures couplings and votes, ``convergence`` what each iteration of routing changes; ``plotting``
is what all pictures share.
"""

from .heat_map import Explanation, class_index, explain, save_figure, save_heat_grid

__all__ = ["Explanation", "class_index", "explain", "save_figure", "save_heat_grid"]
