"""These tests need the packages of the extra `integrations`; without them they are skipped."""

import contextlib

import pytest
import torch


def _import_torchvision() -> None:
    """torchvision from PyPI beside a CPU build of torch lacks two operators that it registers shapes for."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


_import_torchvision()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integrations" in str(item.path):  # warnings of other people's libraries are theirs
            item.add_marker(pytest.mark.filterwarnings("ignore"))
