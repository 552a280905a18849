"""``medmnist:NAME``: the official files of MedMNIST v2, the twelve sets of 28 x 28 pixels.

Paper: Yang et al., "MedMNIST v2 - A large-scale lightweight benchmark for 2D and 3D biomedical image classification"
(Scientific Data 2023). A file ``NAME.npz`` has the arrays ``{train,val,test}_images``, uint8 [n, 28, 28] or
[n, 28, 28, 3], and ``{train,val,test}_labels``, integers [n, 1], or [n, 14] of zeros and ones for ChestMNIST.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .._utils.files import read_npz
from ..errors import CapszooError, unknown_name
from .errors import DataError, UnknownDataset
from .readers import MAX_FILE_BYTES
from .roots import environment_roots, given_root

SPLITS = ("train", "val", "test")
_SIDE = 28


@dataclass(frozen=True)
class MedMnist:
    """Facts of a set: channels, images of train, val and test, the md5 of its file, names of the classes."""

    channels: int
    counts: tuple[int, int, int]
    md5: str
    classes: str
    multi_label: bool = False

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(self.classes.split("; "))


_ORGANS = (
    "bladder; femur-left; femur-right; heart; kidney-left; kidney-right; liver; "
    "lung-left; lung-right; pancreas; spleen"
)

#: The facts of ``medmnist/info.py`` in the authors' package medmnist 3.0.2. The files themselves were not available
#: here, so that the checksums are as stated there.
MEDMNIST: dict[str, MedMnist] = {
    "pathmnist": MedMnist(
        3,
        (89_996, 10_004, 7_180),
        "a8b06965200029087d5bd730944a56c1",
        "adipose; background; debris; lymphocytes; mucus; smooth muscle; normal colon mucosa; "
        "cancer-associated stroma; colorectal adenocarcinoma epithelium",
    ),
    "chestmnist": MedMnist(
        1,
        (78_468, 11_219, 22_433),
        "02c8a6516a18b556561a56cbdd36c4a8",
        "atelectasis; cardiomegaly; effusion; infiltration; mass; nodule; pneumonia; pneumothorax; consolidation; "
        "edema; emphysema; fibrosis; pleural; hernia",
        multi_label=True,
    ),
    "dermamnist": MedMnist(
        3,
        (7_007, 1_003, 2_005),
        "0744692d530f8e62ec473284d019b0c7",
        "actinic keratoses and intraepithelial carcinoma; basal cell carcinoma; benign keratosis-like lesions; "
        "dermatofibroma; melanoma; melanocytic nevi; vascular lesions",
    ),
    "octmnist": MedMnist(
        1,
        (97_477, 10_832, 1_000),
        "c68d92d5b585d8d81f7112f81e2d0842",
        "choroidal neovascularization; diabetic macular edema; drusen; normal",
    ),
    "pneumoniamnist": MedMnist(1, (4_708, 524, 624), "28209eda62fecd6e6a2d98b1501bb15f", "normal; pneumonia"),
    "retinamnist": MedMnist(3, (1_080, 120, 400), "bd4c0672f1bba3e3a89f0e4e876791e4", "0; 1; 2; 3; 4"),
    "breastmnist": MedMnist(
        1, (546, 78, 156), "750601b1f35ba3300ea97c75c52ff8f6", "malignant; normal, benign"
    ),
    "bloodmnist": MedMnist(
        3,
        (11_959, 1_712, 3_421),
        "7053d0359d879ad8a5505303e11de1dc",
        "basophil; eosinophil; erythroblast; immature granulocytes(myelocytes, metamyelocytes and promyelocytes); "
        "lymphocyte; monocyte; neutrophil; platelet",
    ),
    "tissuemnist": MedMnist(
        1,
        (165_466, 23_640, 47_280),
        "ebe78ee8b05294063de985d821c1c34b",
        "Collecting Duct, Connecting Tubule; Distal Convoluted Tubule; Glomerular endothelial cells; "
        "Interstitial endothelial cells; Leukocytes; Podocytes; Proximal Tubule Segments; Thick Ascending Limb",
    ),
    "organamnist": MedMnist(1, (34_561, 6_491, 17_778), "68e3f8846a6bd62f0c9bf841c0d9eacc", _ORGANS),
    "organcmnist": MedMnist(1, (12_975, 2_392, 8_216), "b9ceb9546e10131b32923c5bbeaea2b1", _ORGANS),
    "organsmnist": MedMnist(1, (13_932, 2_452, 8_827), "9ab87b696fb54e2a387ebe992d6ed5f1", _ORGANS),
}


def medmnist_url(name: str) -> str:
    """The address of a set's official file, as the authors' package states it."""
    return f"https://zenodo.org/records/10519652/files/{name}.npz?download=1"


def medmnist_set(name: str) -> MedMnist:
    """The facts of ``medmnist:NAME``; raises ``DataError`` for an unknown one."""
    if name not in MEDMNIST:
        raise UnknownDataset(unknown_name("set of MedMNIST", name, MEDMNIST))
    return MEDMNIST[name]


def medmnist_file(name: str, data: str | Path | None) -> Path | None:
    """The set's file in a data folder or its sub-folder ``medmnist``; None if there is none."""
    roots = [given_root(data)] if data is not None else environment_roots()
    places = (root / sub / f"{name}.npz" for root in roots for sub in ("", "medmnist"))
    return next((place for place in places if place.is_file()), None)


def read_medmnist(name: str, split: str, data: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Read a split of a set's official file; the splits are the authors'.

    Args:
        name: a key of ``MEDMNIST``.
        split: "train", "val" or "test".
        data: folder of the file; None uses ``CAPSZOO_DATA``.

    Returns:
        Images uint8 [n, c, 28, 28]; classes int64 [n], or for ChestMNIST zeros and ones float [n, 14].

    Raises:
        DataError: an unknown name, no file, or another file than the official one; one line.
    """
    facts = medmnist_set(name)
    file = medmnist_file(name, data)
    if file is None:
        raise DataError(
            f"{name}.npz is in no data folder",
            f"`capszoo data fetch medmnist:{name} --to FOLDER`, then name FOLDER with CAPSZOO_DATA or --data",
        )
    count = facts.counts[SPLITS.index(split)]
    keys = f"{split}_images", f"{split}_labels"
    try:
        arrays = read_npz(file, keys, max_bytes=MAX_FILE_BYTES)
    except CapszooError as error:
        raise DataError(error.message, f"fetch it again: capszoo data fetch medmnist:{name}") from error
    pixels, labels = (arrays[key] for key in keys)
    columns = len(facts.label_names) if facts.multi_label else 1
    expected = (count, _SIDE, _SIDE) if facts.channels == 1 else (count, _SIDE, _SIDE, facts.channels)
    for key, array, shape in ((keys[0], pixels, expected), (keys[1], labels, (count, columns))):
        if array.shape != shape:
            raise DataError(f"{file}: {key} has the shape {array.shape}, MedMNIST's {shape}: fetch it again")
    if pixels.dtype != "uint8" or labels.dtype.kind not in "iu":
        raise DataError(f"{file}: {pixels.dtype} images and {labels.dtype} labels are not MedMNIST's")
    most = 1 if facts.multi_label else len(facts.label_names) - 1
    if labels.min() < 0 or labels.max() > most:
        raise DataError(f"{file}: {keys[1]} run from {labels.min()} to {labels.max()}, not from 0 to {most}")
    images = torch.from_numpy(pixels)
    images = images.unsqueeze(1) if facts.channels == 1 else images.permute(0, 3, 1, 2).contiguous()
    targets = torch.from_numpy(labels.astype("int64"))
    return images, targets.float() if facts.multi_label else targets.squeeze(1)
