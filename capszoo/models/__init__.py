"""The zoo's architectures; importing this package registers all of them with timm."""

# temporary while the families are being written: import those that exist
import importlib
from pathlib import Path

from ._base import CapsuleNet, CapsuleOutput
from ._pretrained import HUB_ORG, WeightsError, WeightsInfo

MODULES = ("capsnet_dynamic", "capsnet_em", "cnn_baselines", "encapnet", "idpa", "routing_pool")
for _name in MODULES:
    if (Path(__file__).parent / f"{_name}.py").exists():
        importlib.import_module(f"{__name__}.{_name}")
