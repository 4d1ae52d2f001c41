"""PyTorch's DistributedDataParallel for a model that is pruned: closed blocks send no gradients, and removed
blocks leave its buckets.

    pruner = Pruner(model, optimizer, ...)
    ddp = DataParallel(model, pruner)
    for images, labels in loader:                   # each rank its own part of the batch
        optimizer.zero_grad()
        loss(ddp(images), labels).backward()
        optimizer.step()
        pruner.step()                               # on every rank

Draws, rates and removals are the same on all ranks (see `ranks`). PyTorch's own class works, too, with
find_unused_parameters=True; it sends zeros for what is closed or gone, and must be built anew after
`pruner.finish()`, which makes parameters anew.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shallower.pruner import Pruner

HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]  # dictionaries


class DataParallel(DistributedDataParallel):
    """`model` on several ranks; takes what DistributedDataParallel takes.

    `bytes_reduced` counts the bytes of gradients that this rank has given to reductions.
    """

    module: nn.Module
    bytes_reduced: int
    _pruner: Pruner
    _given: dict[str, Any]
    _built_for: tuple[int, bool, bool]

    def __init__(self, model: nn.Module, pruner: Pruner, **options: Any) -> None:
        if pruner.model is not model:
            raise ValueError("The pruner is of another model; pass the one that it was built with.")
        size = dist.get_world_size(options.get("process_group"))
        if pruner.ranks.size != size:
            raise ValueError(
                f"The pruner averages over {pruner.ranks.size} ranks, but {size} train the model. Build it "
                "after `init_process_group`, and with the process_group that DataParallel gets."
            )
        self._wrap(model, pruner, options, sent=0)

    def _wrap(self, model: nn.Module, pruner: Pruner, given: dict[str, Any], *, sent: int) -> None:
        """(Re)build the buckets; all ranks come here together, for all remove the same blocks."""
        training = model.training
        hooks = {name: vars(self)[name] for name in HOOKS if name in vars(self)}
        unused = not pruner.finalized  # then nothing is closed any more, unless the user knows better
        super().__init__(model, **{"find_unused_parameters": unused, **given})  # clears what was there before
        for name, found in hooks.items():  # the user's, whose handles know these very dictionaries
            found.update(vars(self)[name])
            vars(self)[name] = found
        vars(self).update(_given=given, _pruner=pruner, bytes_reduced=sent)
        vars(self)["_built_for"] = self._shape()
        self.register_comm_hook(None, self._reduce)
        self.train(training)

    def _shape(self) -> tuple[int, bool, bool]:
        pruner = self._pruner
        return len(pruner.events), pruner.finalized, pruner.finished  # finishing makes parameters anew

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a rank that has no batch left would not take part in the reduction of the estimates."""
        raise NotImplementedError(
            "A pruned model cannot be trained on uneven numbers of batches: give every rank as many, as "
            "DistributedSampler does, or end all of them with the first that has none left."
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._shape() != self._built_for and torch.is_grad_enabled():
            sync = self.require_backward_grad_sync  # as within `no_sync()`
            given = {**self._given, "init_sync": False}
            self._wrap(self.module, self._pruner, given, sent=self.bytes_reduced)
            self.require_backward_grad_sync = sync
        return super().forward(*inputs, **kwargs)

    def _reduce(self, state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """The mean over the ranks of the gradients in a bucket, without those of closed blocks."""
        closed = self._closed()
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        wanted = [gradient for parameter, gradient in pairs if id(parameter) not in closed]
        done = bucket.buffer()
        if not wanted:
            nothing: Future[Tensor] = Future()
            nothing.set_result(done)
            return nothing
        whole = len(wanted) == len(bucket.gradients())
        sent = done if whole else torch.cat([gradient.flatten() for gradient in wanted])
        self.bytes_reduced += sent.numel() * sent.element_size()
        sent.div_(dist.get_world_size(self.process_group))
        work = dist.all_reduce(sent, group=self.process_group, async_op=True)
        assert work is not None

        def receive(_: Any) -> Tensor:
            if not whole:
                _spread(sent, wanted)
            return done

        return work.get_future().then(receive)

    def _closed(self) -> set[int]:
        pruner = self._pruner
        return {id(p) for n, gate in pruner.gates.items() if not gate.xi for p in pruner.prunable(n)}


def _spread(flat: Tensor, parts: Sequence[Tensor]) -> None:
    for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(values.view_as(part))
