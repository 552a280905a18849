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

from ._utils.importing import register_with_timm as _register_with_timm
from ._utils.importing import resolver as _resolver
from ._version import __version__

_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "hubconf.py").is_file() and (_checkout / "recipes" / "__init__.py").is_file():
    # a checkout has `recipes` and `export` beside the package; an installation has them inside it
    __path__.append(str(_checkout))

#: Public name -> the module that defines it. ``__init__.pyi`` has the same names for type checkers; a test compares.
_DEFINED_IN = {
    "CapsuleHead": "models._heads",
    "CapsuleNet": "models",
    "CapsuleOutput": "models",
    "ExportedModel": "facade",
    "FeedbackAgreement": "models._feedback",
    "ImagePrediction": "inference",
    "LoadedModel": "facade",
    "ModelInfo": "models._factory",
    "ScoredClass": "inference",
    "UnknownModel": "errors",
    "WeightsError": "errors",
    "attach_head": "models.caps_head",
    "create_head": "models._heads",
    "create_model": "models._factory",
    "encapnet_feedback": "models._feedback",
    "keep_freed_memory": "_utils.process",
    "list_models": "models._factory",
    "list_pretrained": "models._factory",
    "load": "facade",
    "model_info": "models._factory",
    "replace_global_pool": "models._surgery",
}

#: Modules that are attributes of the package without being imported by it.
_MODULES = frozenset(
    ("cli", "data", "errors", "explain", "export", "facade", "inference", "layers", "losses", "models")
    + ("preprocess", "recipes", "scores", "summary")
)

__all__ = ["__version__", *_DEFINED_IN]

__getattr__ = _resolver(__name__, _DEFINED_IN, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


_register_with_timm()
