"""Entry points for torch.hub: ``torch.hub.load(REPOSITORY, "idpa_resnet", pretrained=True)``.

One function per architecture. ``tag`` names the weights (``tag="cifar10"``) and implies ``pretrained``; without it
``pretrained=True`` loads the default weights. Further keyword arguments are those of ``capszoo.create_model``.
Written by ``scripts/generate.py`` (``make docs``) from the registry; a test compares the two.
"""

from typing import Any as _Any  # torch.hub lists every callable without an underscore

import torch

import capszoo

dependencies = ["torch", "timm", "safetensors", "huggingface_hub"]


def _create(name: str, pretrained: bool, tag: str, kwargs: dict[str, _Any]) -> torch.nn.Module:
    return capszoo.create_model(
        f"{name}.{tag}" if tag else name, pretrained=pretrained or bool(tag), **kwargs
    )


def caps_head(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Any timm backbone with any routing as its head, by backbone=… and routing=…; ResNet-18 and IDPA by default."""
    return _create("caps_head", pretrained, tag, kwargs)


def capsnet6_dynamic(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Six layers, two of them of capsules (Table 1, a): error 14.28 on CIFAR-10, 0.37 on MNIST."""
    return _create("capsnet6_dynamic", pretrained, tag, kwargs)


def capsnet6_em(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Six layers, two of them of capsules (Table 1, b): error 12.66 on CIFAR-10, 0.31 on MNIST."""
    return _create("capsnet6_em", pretrained, tag, kwargs)


def capsnet_dynamic(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Sabour et al. on MNIST: error 0.25 with reconstruction, 0.35 without; MultiMNIST 5.2."""
    return _create("capsnet_dynamic", pretrained, tag, kwargs)


def capsnet_dynamic_cifar(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Dynamic routing on a plain convolution: CIFAR-10 accuracy 84.08, CIFAR-100 56.96."""
    return _create("capsnet_dynamic_cifar", pretrained, tag, kwargs)


def capsnet_dynamic_multimnist(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Dynamic routing with 64-dimensional capsules, DiverseMultiMNIST: exact-set accuracy 83.39."""
    return _create("capsnet_dynamic_multimnist", pretrained, tag, kwargs)


def capsnet_dynamic_resnet(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Dynamic routing on a ResNet of 256 channels: CIFAR-10 accuracy 92.65, CIFAR-100 71.70."""
    return _create("capsnet_dynamic_resnet", pretrained, tag, kwargs)


def capsnet_em(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """EM routing on a plain convolution: CIFAR-10 accuracy 82.19 (2 iterations), CIFAR-100 37.73."""
    return _create("capsnet_em", pretrained, tag, kwargs)


def capsnet_em_norb(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Matrix capsules on smallNORB, A = B = C = D = 32: error 2.2; with 3 iterations 1.8, over several crops 1.4."""
    return _create("capsnet_em_norb", pretrained, tag, kwargs)


def capsnet_em_norb_small(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """The small matrix-capsule network, A = 64, B = 8, C = D = 16: smallNORB error 2.2."""
    return _create("capsnet_em_norb_small", pretrained, tag, kwargs)


def capsnet_em_resnet(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """EM routing on a ResNet: CIFAR-10 accuracy 92.15, CIFAR-100 58.08 (best of 1 to 5 iterations)."""
    return _create("capsnet_em_resnet", pretrained, tag, kwargs)


def cnn6(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Six-layer CNN with EncapNet's feature-map sizes (Table 1, c): error 14.43 on CIFAR-10, 0.38 on MNIST."""
    return _create("cnn6", pretrained, tag, kwargs)


def cnn6_wide(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """`cnn6`, 2.5 times as wide (Table 1, d): error 12.09 on CIFAR-10, 0.33 on MNIST."""
    return _create("cnn6_wide", pretrained, tag, kwargs)


def cnn_baseline(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """CNN baseline of the IDPA paper (layers: its Tables 2 and 3): accuracy 87.10 on CIFAR-10, 62.30 on CIFAR-100."""
    return _create("cnn_baseline", pretrained, tag, kwargs)


def cnn_multimnist(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Baseline of the IDPA paper with average pooling (Table 12): DiverseMultiMNIST accuracy 79.81."""
    return _create("cnn_multimnist", pretrained, tag, kwargs)


def cnn_multimnist_fc(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """`cnn_multimnist` with learned pooling (section 6): DiverseMultiMNIST accuracy 84.84."""
    return _create("cnn_multimnist_fc", pretrained, tag, kwargs)


def cnn_routingpool(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Four 5x5 convolutions of 64 and routing pooling: CIFAR-10 error 18.39 (average 19.35, max 21.39)."""
    return _create("cnn_routingpool", pretrained, tag, kwargs)


def cnn_sabour(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Baseline of the CapsNet paper: error 0.39 on MNIST, 8.1 on MultiMNIST; affNIST accuracy 66."""
    return _create("cnn_sabour", pretrained, tag, kwargs)


def efficient_capsnet(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Efficient-CapsNet on MNIST: 161,824 parameters, self-attention routing without iterations."""
    return _create("efficient_capsnet", pretrained, tag, kwargs)


def encapnet6(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Six layers with master and aide (Table 1, f): error 11.93 on CIFAR-10, 0.25 on MNIST."""
    return _create("encapnet6", pretrained, tag, kwargs)


def encapnet6_master(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """Six layers with the master alone (Table 1, e): error 13.87 on CIFAR-10, 0.31 on MNIST."""
    return _create("encapnet6_master", pretrained, tag, kwargs)


def encapnet_v1(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """EncapNet of 18 layers: CIFAR-10 error 4.55 / 3.13 / 3.10 without, with mild, with strong augmentation."""
    return _create("encapnet_v1", pretrained, tag, kwargs)


def encapnet_v2(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """EncapNet of 101 layers at 128 pixels, master alone in the first two modules: h-ImageNet error 43.15."""
    return _create("encapnet_v2", pretrained, tag, kwargs)


def encapnet_v3(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """EncapNet v2 at 224 pixels: h-ImageNet error 42.76 / 40.18 / 40.05."""
    return _create("encapnet_v3", pretrained, tag, kwargs)


def idpa_cnn(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """IDPA on a plain convolutional backbone (Table 8): CIFAR-10 accuracy 85.17."""
    return _create("idpa_cnn", pretrained, tag, kwargs)


def idpa_cnn_cifar100(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """IDPA on a plain backbone, 6x6 poses, one more capsule layer (Table 9): CIFAR-100 accuracy 57.32."""
    return _create("idpa_cnn_cifar100", pretrained, tag, kwargs)


def idpa_multimnist(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """DiverseMultiMNIST (Tables 10 and 11): accuracy 85.74 with vector poses, 80.59 with ``pose="matrix"``."""
    return _create("idpa_multimnist", pretrained, tag, kwargs)


def idpa_resnet(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """IDPA on a ResNet backbone: CIFAR-10 accuracy 95.14 (best test epoch, best of 1 to 5 iterations)."""
    return _create("idpa_resnet", pretrained, tag, kwargs)


def idpa_resnet_cifar100(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """IDPA on a ResNet, 6x6 poses, one more capsule layer: CIFAR-100 accuracy 78.02 (best of epochs and iterations)."""
    return _create("idpa_resnet_cifar100", pretrained, tag, kwargs)


def resnet18_encap(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet with EncapNet's feature-map sizes (Table 2): CIFAR-10 error 8.03, with feedback agreement 7.67."""
    return _create("resnet18_encap", pretrained, tag, kwargs)


def resnet20_avg(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-20 with average pooling, the twin of the capsule heads: CIFAR-10 error 7.94."""
    return _create("resnet20_avg", pretrained, tag, kwargs)


def resnet20_conv(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-20 with a convolution over the whole map, as many weights as self-routing: CIFAR-10 error 10.01."""
    return _create("resnet20_conv", pretrained, tag, kwargs)


def resnet20_dynamic(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-20 with dynamic routing: CIFAR-10 error 8.46, with two capsule layers 7.86."""
    return _create("resnet20_dynamic", pretrained, tag, kwargs)


def resnet20_em(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-20 with EM routing: CIFAR-10 error 10.25, with two capsule layers 12.52."""
    return _create("resnet20_em", pretrained, tag, kwargs)


def resnet20_idpa(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-20 with one layer of inverted dot-product attention routing (our choice of network)."""
    return _create("resnet20_idpa", pretrained, tag, kwargs)


def resnet20_routingcaps(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-20 features routed to class capsules: affNIST error 5.12 (λ=1, capsules of 32 channels)."""
    return _create("resnet20_routingcaps", pretrained, tag, kwargs)


def resnet20_routingpool(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-20 with routing pooling: CIFAR-10 error 8.49 (average pooling 8.73)."""
    return _create("resnet20_routingpool", pretrained, tag, kwargs)


def resnet20_selfrouting(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-20 with self-routing (SR-CapsNet): CIFAR-10 error 8.17, with two capsule layers 7.86."""
    return _create("resnet20_selfrouting", pretrained, tag, kwargs)


def resnet32_routingpool(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-32 with routing pooling: CIFAR-10 error 7.65 (average pooling 7.89)."""
    return _create("resnet32_routingpool", pretrained, tag, kwargs)


def resnet44_routingpool(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-44 with routing pooling: CIFAR-10 error 7.10 (average pooling 7.22)."""
    return _create("resnet44_routingpool", pretrained, tag, kwargs)


def resnet56_routingpool(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-56 with routing pooling: CIFAR-10 error 6.75 (average pooling 6.97)."""
    return _create("resnet56_routingpool", pretrained, tag, kwargs)


def resnet_routingpool(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
    """ResNet-20 with routing pooling; the same network as `resnet20_routingpool`."""
    return _create("resnet_routingpool", pretrained, tag, kwargs)
