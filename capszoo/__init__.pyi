from types import ModuleType

from . import cli as cli
from . import data as data
from . import errors as errors
from . import explain as explain
from . import facade as facade
from . import inference as inference
from . import layers as layers
from . import losses as losses
from . import models as models
from . import preprocess as preprocess
from . import scores as scores
from . import summary as summary
from ._utils.process import keep_freed_memory as keep_freed_memory
from ._version import __version__ as __version__
from .errors import UnknownModel as UnknownModel
from .errors import WeightsError as WeightsError
from .facade import ExportedModel as ExportedModel
from .facade import LoadedModel as LoadedModel
from .facade import load as load
from .inference import ImagePrediction as ImagePrediction
from .inference import ScoredClass as ScoredClass
from .models import CapsuleNet as CapsuleNet
from .models import CapsuleOutput as CapsuleOutput
from .models._factory import ModelInfo as ModelInfo
from .models._factory import create_model as create_model
from .models._factory import list_models as list_models
from .models._factory import list_pretrained as list_pretrained
from .models._factory import model_info as model_info
from .models._feedback import FeedbackAgreement as FeedbackAgreement
from .models._feedback import encapnet_feedback as encapnet_feedback
from .models._heads import CapsuleHead as CapsuleHead
from .models._heads import create_head as create_head
from .models._surgery import replace_global_pool as replace_global_pool
from .models.caps_head import attach_head as attach_head

export: ModuleType
recipes: ModuleType
