"""A file that ``capszoo export`` wrote, run by ONNX Runtime, as a module: a MODEL of ``predict``, ``eval``, ``serve``.

>>> from capszoo.inference import load_model
>>> model = load_model("digits.onnx")  # or the folder of a bundle  # doctest: +SKIP
>>> scores = model(images)  # normalised [b, c, h, w], as for the network itself  # doctest: +SKIP
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CapszooError, WeightsError, first_line, require
from .checks import check_facts, described
from .facts import set_own_facts


class OnnxModel(nn.Module):
    """An exported classifier in ONNX Runtime on the CPU: normalised images ``[b, c, h, w]`` to scores ``[b, n]``.

    The file states its preprocessing and its classes, which are the module's ``pretrained_cfg``. It has neither
    parameters nor gradients, and its size and its routing iterations are fixed.

    Args:
        path: the ``.onnx`` file.

    Attributes:
        path: the file.
        stated: what the file states of itself: ``model``, ``precision``, ``weights``, ``routing_iters`` and others.
        batch: smallest, usual and largest batch of the graph. A batch of any size is split and filled to them.

    Raises:
        CapszooError: ONNX Runtime is not installed or does not load the file, or ``capszoo export`` did not write it.
    """

    fixed_input_size = True

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        require("an exported file", ("onnxruntime",), "export")
        import onnxruntime

        self.path = Path(path)
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3  # warnings go to stderr from C++
        settings.intra_op_num_threads, settings.inter_op_num_threads = torch.get_num_threads(), 1
        try:
            # its bytes: ONNX Runtime takes only paths that are UTF-8, and no other file is read
            self._session = onnxruntime.InferenceSession(
                self.path.read_bytes(), settings, providers=["CPUExecutionProvider"]
            )
            texts: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        except Exception as error:  # ONNX Runtime's errors have no common base class
            reason = " ".join(first_line(error).split())
            bf16 = "give --precision fp16, or check it with `capszoo check`" if "bfloat16" in reason else ""
            raise CapszooError(
                f"{path}: ONNX Runtime does not load it ({reason})", bf16 or "export it again"
            ) from None
        self.stated = {key: _parsed(text) for key, text in texts.items()}
        spec = self.stated.get("preprocess")
        if not isinstance(spec, dict) or not spec.get("scores"):
            what = "its outputs have no scores" if spec else "it does not state how images are read"
            raise CapszooError(f"{path}: {what}", "give a file that `capszoo export` wrote, with scores")
        try:
            self._configure(spec)
        except WeightsError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CapszooError(
                f"{path}: its metadata are damaged ({first_line(error)})", "export it again"
            ) from None

    def _configure(self, spec: Mapping[str, Any]) -> None:
        size = (int(spec["channels"]), *map(int, spec["size"]))
        labels = self.stated["labels"]
        facts = described(
            {
                "input_size": size,
                "num_classes": len(labels),
                "label_names": tuple(labels),
                "mean": tuple(spec["mean"]),
                "std": tuple(spec["std"]),
                "interpolation": spec["interpolation"],
                "crop_pct": spec["crop_pct"],
                "crop_mode": spec.get("crop_mode"),
            },
            str(self.path),
        )
        architecture, _, tag = str(self.stated.get("weights", "")).partition(".")
        self.pretrained_cfg = {**facts, "architecture": architecture or self.stated["model"], "tag": tag}
        set_own_facts(self.pretrained_cfg, check_facts(spec, str(self.path), size))
        self.in_chans, self.img_size, self.num_classes = size[0], size[1:], len(labels)
        batch = spec["batch"]
        self.batch = (int(batch["min"]), int(batch["usual"]), int(batch["max"]))
        if not 1 <= self.batch[0] <= self.batch[2]:
            raise ValueError(f"a batch of {self.batch}")
        self._names = str(spec["input"]), str(spec["scores"])
        self._uint8 = spec["dtype"] == "uint8"
        column = (1, -1, 1, 1)
        self._mean, self._std = (torch.tensor(spec[key]).reshape(column) for key in ("mean", "std"))

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[b, n]``, float32, on the device of ``x``."""
        images = x.detach().float().cpu()
        if self._uint8:  # the graph normalises: back to the pixels
            images = ((images * self._std + self._mean) * 255).round().clamp(0, 255).to(torch.uint8)
        smallest, _, largest = self.batch
        scores = [torch.zeros(0, self.num_classes)]
        for part in images.split(largest) if len(images) else ():
            filled = torch.cat([part, part[-1:].expand(max(0, smallest - len(part)), -1, -1, -1)])
            feed = {self._names[0]: filled.contiguous().numpy()}
            (output,) = self._session.run([self._names[1]], feed)
            scores.append(torch.from_numpy(output)[: len(part)].float())
        return torch.cat(scores).to(x.device)


def _parsed(text: str) -> Any:
    """A value of the file's metadata, which holds texts and JSON."""
    try:
        return json.loads(text) if text[:1] in "[{" else text
    except (ValueError, RecursionError):
        return text
