"""Where the time of a gated training step goes, by PyTorch's profiler: ResNet-56, theta 0.75.

In single precision as it comes, and with channels_last and compiled blocks, in bfloat16 where this processor
is faster with it. No bound and no pair: shares of the seconds of a step, which name what to gain next.
"""

import torch
import torch.nn.functional as F
from side_by_side import seconds
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shallower import Pruner, models

THREADS, BATCH, STEPS = 1, 64, 4
KINDS = {  # what an event's name begins with; the first that fits
    "convolutions, backward": ("aten::convolution_backward",),
    "convolutions, forward": ("aten::mkldnn_convolution", "mkldnn::", "aten::convolution"),
    "batch norm": ("aten::native_batch_norm", "aten::batch_norm"),
    "compiled code between convolutions": ("## Call CompiledFxGraph", "CompiledFunction"),
    "inner products of the estimates": ("aten::dot", "Watch"),
    "optimiser": ("Optimizer.", "aten::_fused"),
}
OTHER = "everything else, Python and the pruner included"


def pays() -> bool:
    """Whether a convolution in bfloat16 is faster here."""
    spent = {}
    for kind in (torch.float32, torch.bfloat16):
        layer, z = nn.Conv2d(16, 16, 3, padding=1).to(kind), torch.randn(16, 16, 32, 32).to(kind)
        with torch.no_grad():
            layer(z)
            spent[kind] = seconds(lambda layer=layer, z=z: [layer(z) for _ in range(5)])
    return spent[torch.bfloat16] < spent[torch.float32]


def shares(*, fast: bool, half: bool) -> tuple[dict[str, float], float]:
    """The share of each kind in a step, and the milliseconds of the step."""
    torch.manual_seed(0)
    layout = torch.channels_last if fast else torch.contiguous_format
    model = models.resnet56(final_norm="bare").to(memory_format=layout)  # type: ignore[call-overload]
    inputs = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=layout)
    labels = torch.randint(0, 10, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=True)
    pruner = Pruner(model, optimizer, dataset_size=50_000, log_gamma=-1.0, theta=0.75, theta_lr=1e-9)
    if fast:
        pruner.compile()

    def step(xi: bool | None = None) -> None:
        for gate in pruner.gates.values():
            gate.xi = gate.xi if xi is None else xi
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = F.cross_entropy(model(inputs).float(), labels)
        loss.backward()
        optimizer.step()
        pruner.step()

    step(True), step(False), step()  # every block has run open and closed, so nothing is compiled any more
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        total = 1e6 * seconds(lambda: [step() for _ in range(STEPS)])
    spent = dict.fromkeys(KINDS, 0.0)
    for event in seen.key_averages():
        kind = next((k for k, starts in KINDS.items() if event.key.startswith(starts)), None)
        if kind is not None:
            spent[kind] += event.self_cpu_time_total
    spent[OTHER] = total - sum(spent.values())
    return {kind: part / total for kind, part in spent.items()}, total / STEPS / 1e3


def main() -> None:
    torch.set_num_threads(THREADS)
    half = pays()
    (plain, slow), (fast, quick) = shares(fast=False, half=False), shares(fast=True, half=half)
    kind = "bfloat16" if half else "single precision"
    print(f"| what | single precision | channels_last, {kind}, compiled |\n| --- | ---: | ---: |")
    for kind in plain:
        print(f"| {kind} | {100 * plain[kind]:.1f} % | {100 * fast[kind]:.1f} % |")
    print(f"| a step of {BATCH} images | {slow:.0f} ms | {quick:.0f} ms |")


if __name__ == "__main__":
    main()
