"""capszoo: capsule networks with the interfaces of timm, pretrained weights and a tested export.

>>> import capszoo
>>> model = capszoo.load("resnet20_routingcaps.mnist")  # predict, explain and export; see capszoo.facade
>>> model.predict("digit_3.png").label
'3'
>>> net = capszoo.create_model("resnet20_routingcaps", pretrained=True)  # the PyTorch module, as timm gives it

Importing the package registers every architecture with timm, so ``timm.create_model`` knows the names too, whichever of
the two is imported first. Heavy dependencies are loaded on first use: public names are resolved on first access (PEP
562), so that ``capszoo --help`` starts without torch.
"""

from __future__ import annotations

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._lazy import resolver as _resolver
from ._register import register_with_timm as _register_with_timm

if _TYPE_CHECKING:
    from ._api import ModelInfo, UnknownModel, create_model, list_models, list_pretrained, model_info
    from ._memory import keep_freed_memory
    from .facade import ExportedModel, LoadedModel, load
    from .inference import ImagePrediction, ScoredClass
    from .models import CapsuleNet, CapsuleOutput, WeightsError
    from .models._feedback import FeedbackAgreement, encapnet_feedback
    from .models._heads import CapsuleHead
    from .models._surgery import replace_global_pool
    from .models.caps_head import attach_head

__version__ = "0.1.0"

_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "hubconf.py").is_file() and (_checkout / "recipes" / "__init__.py").is_file():
    # a checkout has `recipes` and `export` beside the package; an installation has them inside it
    __path__.append(str(_checkout))

__all__ = [
    "CapsuleHead",
    "CapsuleNet",
    "CapsuleOutput",
    "ExportedModel",
    "FeedbackAgreement",
    "ImagePrediction",
    "LoadedModel",
    "ModelInfo",
    "ScoredClass",
    "UnknownModel",
    "WeightsError",
    "__version__",
    "attach_head",
    "create_model",
    "encapnet_feedback",
    "keep_freed_memory",
    "list_models",
    "list_pretrained",
    "load",
    "model_info",
    "replace_global_pool",
]

#: Public name -> the module that defines it.
_DEFINED_IN = {
    "CapsuleHead": "models._heads",
    "CapsuleNet": "models",
    "CapsuleOutput": "models",
    "ExportedModel": "facade",
    "FeedbackAgreement": "models._feedback",
    "ImagePrediction": "inference",
    "LoadedModel": "facade",
    "ModelInfo": "_api",
    "ScoredClass": "inference",
    "UnknownModel": "errors",
    "WeightsError": "errors",
    "attach_head": "models.caps_head",
    "create_model": "_api",
    "encapnet_feedback": "models._feedback",
    "keep_freed_memory": "_memory",
    "list_models": "_api",
    "list_pretrained": "_api",
    "load": "facade",
    "model_info": "_api",
    "replace_global_pool": "models._surgery",
}

#: Modules that are attributes of the package without being imported by it.
_MODULES = frozenset(
    ("cli", "data", "errors", "explain", "export", "facade", "inference", "layers", "losses", "models")
    + ("preprocess", "recipes", "scores", "summary")
)


__getattr__ = _resolver(__name__, _DEFINED_IN, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


_register_with_timm()
