"""Where the time of a gated training step goes, by PyTorch's profiler: ResNet-56, theta 0.75.

In single precision as it comes, and with channels_last, bfloat16 and compiled blocks. No bound and no
pair: shares of one step, which name what there is to gain next.
"""

import torch
import torch.nn.functional as F
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
OTHER = "everything else, the pruner included"


def shares(*, fast: bool) -> tuple[dict[str, float], float]:
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
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
            loss = F.cross_entropy(model(inputs).float(), labels)
        loss.backward()
        optimizer.step()
        pruner.step()

    step(True), step(False), step()  # every block has run open and closed, so nothing is compiled any more
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            step()
    spent = dict.fromkeys((*KINDS, OTHER), 0.0)
    for event in seen.key_averages():
        kind = next((k for k, starts in KINDS.items() if event.key.startswith(starts)), OTHER)
        spent[kind] += event.self_cpu_time_total
    total = sum(spent.values())
    return {kind: time / total for kind, time in spent.items()}, total / STEPS / 1e3


def main() -> None:
    torch.set_num_threads(THREADS)
    (plain, slow), (fast, quick) = shares(fast=False), shares(fast=True)
    print("| what | single precision | channels_last, bfloat16, compiled |\n| --- | ---: | ---: |")
    for kind in plain:
        print(f"| {kind} | {100 * plain[kind]:.1f} % | {100 * fast[kind]:.1f} % |")
    print(f"| a step of {BATCH} images | {slow:.0f} ms | {quick:.0f} ms |")


if __name__ == "__main__":
    main()
