"""capszoo: capsule networks with the interfaces of timm, pretrained weights and a tested export.

>>> import capszoo
>>> model = capszoo.create_model("resnet20_routingcaps", pretrained=True)

Importing the package registers every architecture with timm, so ``timm.create_model`` knows the names too.
"""

from __future__ import annotations

from pathlib import Path as _Path

__version__ = "0.1.0"

_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "hubconf.py").is_file() and (_checkout / "recipes" / "__init__.py").is_file():
    # a plain checkout has `recipes` and `export` beside the package; an install has them inside it
    __path__.append(str(_checkout))

from ._api import ModelInfo, UnknownModel, create_model, list_models, list_pretrained, model_info  # noqa: E402
from ._memory import keep_freed_memory  # noqa: E402
from .models import CapsuleNet, CapsuleOutput, WeightsError  # noqa: E402
from .models._feedback import FeedbackAgreement, encapnet_feedback  # noqa: E402
from .models._surgery import replace_global_pool  # noqa: E402

__all__ = [
    "CapsuleNet",
    "CapsuleOutput",
    "FeedbackAgreement",
    "ModelInfo",
    "UnknownModel",
    "WeightsError",
    "__version__",
    "create_model",
    "encapnet_feedback",
    "keep_freed_memory",
    "list_models",
    "list_pretrained",
    "model_info",
    "replace_global_pool",
]
