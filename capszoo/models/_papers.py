"""Results reported in the papers for each architecture: data set, metric, value and source.

``PAPERS`` has an entry for every registered name, in the order of the papers' own tables; an empty one means that no
paper gives a figure for exactly this network. Figures are the papers' (errors and accuracies in percent on the test
set), never ours: ours are in the metadata beside the weights. ``capszoo info`` and the README's model table show
both.
"""

from __future__ import annotations

from typing import NamedTuple


class PaperFigure(NamedTuple):
    """One result of a paper.

    Attributes:
        dataset: name of the data set in the paper.
        metric: ``"error"`` or ``"accuracy"``, in percent.
        value: the figure.
        source: paper and table.
        note: the difference from other results of the same network.
    """

    dataset: str
    metric: str
    value: float
    source: str
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.dataset} {self.metric} {self.value:g}%{note}"


_SABOUR = "Sabour et al. 2017, arXiv:1710.09829"
_HINTON = "Hinton et al. 2018, Matrix capsules with EM routing"
_IDPA = "Tsai et al. 2020, arXiv:2002.04764"
_IDPA_RELEASE = "Tsai et al. 2020, README of the authors' release"
#: Table 1 of the IDPA paper selects capsule networks so.
_BEST = "best test epoch, best of 1 to 5 iterations"
_POOL = "Zhao and Huang 2019, Exploring dynamic routing as a pooling layer"
_EFFICIENT = "Mazzia et al. 2021, arXiv:2101.12491, as others quote it"
_SELF = "Hahn et al. 2019, Self-routing capsule networks, poster"
#: The releases of DeepCaps and HVC choose checkpoints so.
_BEST_EPOCH = "best test epoch"
#: The EncapNet paper says nothing about the augmentation of these figures.
_SILENT = "augmentation not stated"
_ENCAP = "Li et al. 2018, arXiv:1808.03749"


def _errors(source: str, *figures: tuple[str, float] | tuple[str, float, str]) -> tuple[PaperFigure, ...]:
    return tuple(PaperFigure(f[0], "error", f[1], source, *f[2:]) for f in figures)


def _accuracies(source: str, *figures: tuple[str, float] | tuple[str, float, str]) -> tuple[PaperFigure, ...]:
    return tuple(PaperFigure(f[0], "accuracy", f[1], source, *f[2:]) for f in figures)


_RESNET20_POOL = _errors(
    f"{_POOL}, table 2", ("CIFAR-10", 8.49, "mean of 3"), ("CIFAR-10", 8.73, "mean of 3, average pooling")
)

PAPERS: dict[str, tuple[PaperFigure, ...]] = {
    "capsnet_dynamic": (
        *_errors(
            f"{_SABOUR}, table 1",
            ("MNIST", 0.25, "±0.005, reconstruction"),
            ("MNIST", 0.35, "±0.036, no reconstruction"),
            ("MNIST", 0.29, "±0.011, 1 iteration, reconstruction"),
            ("MNIST", 0.34, "±0.032, 1 iteration, no reconstruction"),
            ("MultiMNIST", 5.2),
            ("MultiMNIST", 7.5, "1 iteration"),
        ),
        *_accuracies(_SABOUR, ("affNIST", 79, "stopped early, 99.23% on expanded MNIST")),
        *_errors(_SABOUR, ("smallNORB", 2.7), ("CIFAR-10", 10.6, "ensemble of 7")),
    ),
    "cnn_sabour": (
        *_errors(f"{_SABOUR}, table 1", ("MNIST", 0.39), ("MultiMNIST", 8.1)),
        *_accuracies(_SABOUR, ("affNIST", 66, "99.22% on expanded MNIST")),
    ),
    "capsnet_dynamic_cifar": _accuracies(
        f"{_IDPA}, table 1", ("CIFAR-10", 84.08, _BEST), ("CIFAR-100", 56.96, _BEST)
    ),
    "capsnet_dynamic_resnet": _accuracies(
        f"{_IDPA}, table 1", ("CIFAR-10", 92.65, _BEST), ("CIFAR-100", 71.70, _BEST)
    ),
    "capsnet_dynamic_multimnist": _accuracies(f"{_IDPA}, figure 5", ("DiverseMultiMNIST", 83.39)),
    "capsnet_em": _accuracies(
        f"{_IDPA}, table 1", ("CIFAR-10", 82.19, "best test epoch, 2 iterations"), ("CIFAR-100", 37.73, _BEST)
    ),
    "capsnet_em_resnet": _accuracies(
        f"{_IDPA}, table 1", ("CIFAR-10", 92.15, _BEST), ("CIFAR-100", 58.08, _BEST)
    ),
    "capsnet_em_norb": _errors(
        f"{_HINTON}, section 5",
        ("smallNORB", 2.2, "2 iterations, the middle crop alone"),
        ("smallNORB", 1.8, "3 iterations, the middle crop alone"),
        ("smallNORB", 1.4, "3 iterations, class activations averaged over several crops"),
    ),
    "capsnet_em_norb_small": _errors(f"{_HINTON}, section 5", ("smallNORB", 2.2)),
    "idpa_cnn": _accuracies(f"{_IDPA}, table 1", ("CIFAR-10", 85.17, _BEST)),
    "idpa_cnn_cifar100": _accuracies(f"{_IDPA}, table 1", ("CIFAR-100", 57.32, _BEST)),
    "idpa_resnet": _accuracies(f"{_IDPA}, table 1", ("CIFAR-10", 95.14, _BEST))
    + _accuracies(_IDPA_RELEASE, ("CIFAR-10", 94.85, "mean"), ("CIFAR-10", 94.73, "mean, 1 iteration")),
    "idpa_resnet_cifar100": _accuracies(f"{_IDPA}, table 1", ("CIFAR-100", 78.02, _BEST))
    + _accuracies(_IDPA_RELEASE, ("CIFAR-100", 76.27, "mean"), ("CIFAR-100", 76.02, "mean, 1 iteration")),
    "idpa_multimnist": _accuracies(
        _IDPA,
        ("DiverseMultiMNIST", 85.74, "vector poses"),
        ("DiverseMultiMNIST", 80.59, "matrix poses"),
        ("DiverseMultiMNIST", 91.17, "matrix poses, widened to 42M parameters"),
    ),
    "cnn_multimnist": _accuracies(f"{_IDPA}, figure 5", ("DiverseMultiMNIST", 79.81)),
    "cnn_multimnist_fc": _accuracies(f"{_IDPA}, section 6", ("DiverseMultiMNIST", 84.84)),
    "cnn_baseline": _accuracies(f"{_IDPA}, table 1", ("CIFAR-10", 87.10), ("CIFAR-100", 62.30)),
    "cnn_routingpool": _errors(
        f"{_POOL}, table 1",
        ("Fashion-MNIST", 7.52),
        ("Fashion-MNIST", 7.61, "average pooling"),
        ("Fashion-MNIST", 7.86, "max pooling"),
        ("SVHN", 6.02),
        ("SVHN", 6.47, "average pooling"),
        ("SVHN", 6.51, "max pooling"),
        ("CIFAR-10", 18.39),
        ("CIFAR-10", 19.35, "average pooling"),
        ("CIFAR-10", 21.39, "max pooling"),
    ),
    "resnet_routingpool": _RESNET20_POOL,
    "resnet20_routingpool": _RESNET20_POOL,
    "resnet32_routingpool": _errors(
        f"{_POOL}, table 2", ("CIFAR-10", 7.65, "mean of 3"), ("CIFAR-10", 7.89, "mean of 3, average pooling")
    ),
    "resnet44_routingpool": _errors(
        f"{_POOL}, table 2", ("CIFAR-10", 7.10, "mean of 3"), ("CIFAR-10", 7.22, "mean of 3, average pooling")
    ),
    "resnet56_routingpool": _errors(
        f"{_POOL}, table 2", ("CIFAR-10", 6.75, "mean of 3"), ("CIFAR-10", 6.97, "mean of 3, average pooling")
    ),
    "resnet20_routingcaps": _errors(
        f"{_POOL}, table 4",
        ("affNIST", 5.12, "λ=1, 32 neurons, published test images"),
        ("expanded MNIST", 1.70, "λ=1, 32 neurons"),
        ("affNIST", 5.37, "λ=5, 32 neurons, published test images"),
        ("expanded MNIST", 1.76, "λ=5, 32 neurons"),
        ("affNIST", 6.59, "λ=10, 32 neurons, published test images"),
        ("expanded MNIST", 2.29, "λ=10, 32 neurons"),
        ("affNIST", 9.59, "λ=15, 32 neurons, published test images"),
        ("expanded MNIST", 3.81, "λ=15, 32 neurons"),
    )
    + _errors(f"{_POOL}, section 4.3", ("MultiMNIST", 5.2)),
    "efficient_capsnet": _accuracies(_EFFICIENT, ("MNIST", 99.74, "mean")),
    "deepcaps": _accuracies(
        "Rajasegaran et al. 2019, arXiv:1904.09546",
        ("Fashion-MNIST", 94.73, _BEST_EPOCH),
        ("MNIST", 99.72, _BEST_EPOCH),
        ("CIFAR-10", 92.74, f"seven networks at 64 pixels, {_BEST_EPOCH}"),
    ),
    "hvc": _accuracies(
        "Byerly et al. 2020, arXiv:2001.09136", ("MNIST", 99.83, f"best of several networks, {_BEST_EPOCH}")
    ),
    "resnet20_avg": _errors(_SELF, ("CIFAR-10", 7.94, "±0.21"), ("SVHN", 3.55)),
    "resnet20_conv": _errors(_SELF, ("CIFAR-10", 10.01, "±0.99"), ("SVHN", 3.98)),
    "resnet20_dynamic": _errors(
        _SELF,
        ("CIFAR-10", 8.46, "±0.27"),
        ("CIFAR-10", 7.86, "±0.21, 2 capsule layers"),
        ("SVHN", 3.49),
        ("SVHN", 3.17, "2 capsule layers"),
    ),
    "resnet20_em": _errors(
        _SELF,
        ("CIFAR-10", 10.25, "±0.45"),
        ("CIFAR-10", 12.52, "±0.32, 2 capsule layers"),
        ("SVHN", 3.85),
        ("SVHN", 3.70, "2 capsule layers"),
    ),
    "resnet20_heinsen": (),
    "resnet20_idpa": (),
    "resnet20_selfrouting": _errors(
        _SELF,
        ("CIFAR-10", 8.17, "±0.18"),
        ("CIFAR-10", 7.86, "±0.12, 2 capsule layers"),
        ("SVHN", 3.34),
        ("SVHN", 3.12, "2 capsule layers"),
    ),
    "caps_head": (),
    "encapnet_v1": (
        *_errors(
            f"{_ENCAP}, table 4",
            ("CIFAR-10", 4.55, "no augmentation"),
            ("CIFAR-10", 3.13, "mild augmentation, several crops"),
            ("CIFAR-10", 3.10, "strong augmentation, several crops; mean 3.56±0.12"),
            ("CIFAR-100", 26.77, "no augmentation"),
            ("CIFAR-100", 24.01, "mild augmentation, several crops; mean 24.85±0.11"),
            ("CIFAR-100", 24.18, "strong augmentation, several crops"),
            ("SVHN", 2.01, "no augmentation"),
            ("SVHN", 1.64, "mild augmentation, several crops"),
            ("SVHN", 1.52, "strong augmentation, several crops; mean 1.87±0.11"),
            ("h-ImageNet", 48.23, _SILENT),
            ("ImageNet", 7.51, "top-5"),
        ),
        *_errors(
            f"{_ENCAP}, table 3",
            (
                "CIFAR-10",
                9.83,
                "master capsules alone, without augmentation or skip connections; ours has both",
            ),
        ),
    ),
    "encapnet_v2": _errors(f"{_ENCAP}, table 4", ("h-ImageNet", 43.15, _SILENT)),
    "encapnet_v3": _errors(
        f"{_ENCAP}, table 4",
        ("h-ImageNet", 42.76, "no augmentation"),
        ("h-ImageNet", 40.18, "mild augmentation, several crops"),
        ("h-ImageNet", 40.05, "strong augmentation, several crops"),
    ),
    "resnet18_encap": _errors(
        f"{_ENCAP}, table 3",
        ("CIFAR-10", 8.03, _SILENT),
        ("CIFAR-10", 7.72, "KL regularisation"),
        ("CIFAR-10", 7.67, "Sinkhorn unit"),
    ),
    "capsnet6_dynamic": _errors(
        f"{_ENCAP}, tables 1 and 5",
        ("CIFAR-10", 14.28, _SILENT),
        ("MNIST", 0.37, _SILENT),
        ("CIFAR-10", 14.79, "1 iteration"),
        ("CIFAR-10", 14.41, "2 iterations"),
        ("CIFAR-10", 14.25, "4 iterations"),
    ),
    "capsnet6_em": _errors(f"{_ENCAP}, table 1", ("CIFAR-10", 12.66, _SILENT), ("MNIST", 0.31, _SILENT)),
    "encapnet6_master": _errors(f"{_ENCAP}, table 1", ("CIFAR-10", 13.87, _SILENT), ("MNIST", 0.31, _SILENT)),
    "encapnet6": _errors(
        f"{_ENCAP}, table 1",
        ("CIFAR-10", 11.93, f"{_SILENT}; half as large by its table"),
        ("MNIST", 0.25, _SILENT),
    ),
    "cnn6": _errors(f"{_ENCAP}, table 1", ("CIFAR-10", 14.43, _SILENT), ("MNIST", 0.38, _SILENT)),
    "cnn6_wide": _errors(f"{_ENCAP}, table 1", ("CIFAR-10", 12.09, _SILENT), ("MNIST", 0.33, _SILENT)),
}
