"""A regression: Gaussian likelihood, a price in nats, and the certificate of what is left.

python examples/regression.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shallower import Pruner, certify
from shallower.models import mlp

SAMPLES, NOISE = 2000, 0.1


def made(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """A bent surface and some noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 5, generator=generator)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return x, y + NOISE * torch.randn(number, 1, generator=generator)


def main(epochs: int = 60) -> None:
    torch.manual_seed(0)
    x, y = made(SAMPLES, 1)
    model = mlp(5, 32, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    pruner = Pruner(model, optimizer, dataset_size=SAMPLES, log_gamma=-400.0, theta=0.5, theta_lr=5e-3)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        """-log p(y | x) of a Normal with the standard deviation NOISE, without its constant."""
        return 0.5 * F.mse_loss(model(batch[0]), batch[1]) / NOISE**2

    for epoch in range(epochs):
        if epoch == epochs * 3 // 4:
            pruner.finalize()
            for group in optimizer.param_groups:
                group["lr"] /= 10
        for index in torch.randperm(SAMPLES).split(64):
            optimizer.zero_grad()
            loss((x[index], y[index])).backward()
            optimizer.step()
            pruner.step()
    batches = list(zip(x.split(50), y.split(50), strict=True))
    certificate = certify(model, pruner, batches, loss)
    for row in certificate.survivors:
        print(f"{row.block}: earns {row.benefit:.0f} nats of {row.price:.0f}: {row.verdict}")
    for rung in certificate.ladder:
        print(f"{rung.block} would go from log gamma {rung.log_gamma:.0f} on: loss {rung.loss:.2f}")
    net = pruner.finish().eval()
    test_x, test_y = made(1000, 2)
    with torch.no_grad():
        error = F.mse_loss(net(test_x), test_y).sqrt()
    print(f"{len(pruner.alive)} of {len(pruner.names)} blocks left, test RMSE {error:.3f}, noise {NOISE}")


if __name__ == "__main__":
    main()
