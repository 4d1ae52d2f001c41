"""Dense networks: the paper's MNIST FC-L, its general equation (1), and a small one for tables."""

from collections import OrderedDict
from collections.abc import Callable
from typing import get_args

import torch
from torch import nn

from shallower.models._common import Form, at_least, layer_block, one_of
from shallower.residual import Residual


def fc(
    depth: int,
    *,
    width: int = 100,
    inputs: int = 784,
    classes: int = 10,
    form: Form = "relu-outside",
    gain: float = 1.0,
) -> nn.Sequential:
    """MNIST FC-L with L = `depth`: an input layer, L - 1 blocks of one dense layer, an output layer.

        relu-outside    z_next = relu(z + W z + b)
        relu-inside     z_next = z + relu(W z + b)

    The theory asks for a branch that ends in W, which only the first form has. Blocks start at
    `gain` times PyTorch's default initial weights. Images are flattened.
    """
    at_least(1, depth=depth, width=width, inputs=inputs, classes=classes)
    one_of(get_args(Form), form=form)
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU()),
            blocks=nn.Sequential(
                *(layer_block(nn.Linear(width, width), form, gain) for _ in range(depth - 1))
            ),
            head=nn.Linear(width, classes),
        )
    )


def mlp(inputs: int, width: int, depth: int, outputs: int) -> nn.Sequential:
    """A network for small tables: an input layer, `depth` blocks of two dense layers, an output layer.

        z_next = z + W2 relu(W1 z + b1) + b2

    Images are flattened.
    """
    at_least(1, inputs=inputs, width=width, depth=depth, outputs=outputs)

    def block() -> Residual:
        return Residual(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))

    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU()),
            blocks=nn.Sequential(*(block() for _ in range(depth))),
            head=nn.Linear(width, outputs),
        )
    )


def general(
    depth: int,
    inputs: int,
    width: int,
    outputs: int,
    *,
    hidden: int | None = None,
    activation: Callable[[], nn.Module] = nn.Tanh,
) -> nn.Sequential:
    """The paper's equation (1) with L = `depth`: L - 1 blocks with a learned linear path, then W^L.

        z_next = W3 z + W2 a(W1 z + b1) + b2,    a(0) = 0

    The first block takes `inputs` to `width`; `hidden` is the number of rows of W1, `width` unless
    given. The theory also asks for an `activation` that is continuously differentiable. W3 starts
    orthogonal, so that a deep linear path neither shrinks nor stretches what it carries. The output
    is W^L z + b^L: the last activation belongs to the loss.
    """
    hidden = width if hidden is None else hidden
    at_least(1, depth=depth, inputs=inputs, width=width, outputs=outputs, hidden=hidden)
    _require_zero_at_zero(activation)

    def block(features: int) -> Residual:
        linear_path = nn.Linear(features, width, bias=False)
        nn.init.orthogonal_(linear_path.weight)
        branch = nn.Sequential(nn.Linear(features, hidden), activation(), nn.Linear(hidden, width))
        return Residual(branch, skip=linear_path)

    sizes = [inputs] + [width] * (depth - 1)
    return nn.Sequential(
        OrderedDict(
            blocks=nn.Sequential(*(block(features) for features in sizes[:-1])),
            head=nn.Linear(sizes[-1], outputs),
        )
    )


def _require_zero_at_zero(activation: Callable[[], nn.Module]) -> None:
    with torch.device("cpu"), torch.no_grad():
        module = activation()
        value = module(torch.zeros(1)).item()
    if value != 0:
        raise ValueError(
            f"{type(module).__name__} takes 0 to {value:.4g}; equation (1) needs a(0) = 0, so that "
            "zero weights mean an idle block. Pass one that has it, such as activation=nn.Tanh."
        )
