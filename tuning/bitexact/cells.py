"""The cells of the suite: one training step of a model under each of torch's ways to run it on several ranks.

======================  ================================================================================  =============
cell                    how                                                                               ranks
======================  ================================================================================  =============
single                  one device                                                                        1
dp                      ``DistributedDataParallel``                                                       4
fsdp2                   ``fully_shard`` of each block and of the model                                    4
tp                      ``parallelize_module``: columns, rows, and heads of the SSD mixer                 2 (x 2 alike)
pp                      ``Schedule1F1B``, one stage on each rank                                          4
vpp                     ``ScheduleInterleaved1F1B``, two stages on each rank                              2 (x 2 alike)
ep                      experts as ``DTensor`` shards, tokens exchanged by all-to-all                     4
fsdp2_tp                ``fully_shard`` over rows of the mesh, ``parallelize_module`` over its columns    2 x 2
vpp_fsdp2               interleaved stages over columns, each stage ``fully_shard`` over rows             2 x 2
======================  ================================================================================  =============

Every cell trains on the same batch from the same parameters, so losses agree up to rounding from cell to cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tuning.bitexact.models import Experts, Model, Shape, local
from tuning.bitexact.suite import RANKS

__all__ = ["RUNNERS", "Runner"]

Runner = Callable[[Shape, torch.device, int, Callable[[Any], Any]], dict[str, Any]]
"""Shape, device, seed of the data, and what prepares a model, to loss, output and gradients of this rank."""


def _batch(s: Shape, device: torch.device, seed: int, rank: int = 0, ranks: int = 1) -> tuple[Any, Any]:
    """This rank's share of the tokens, and the tokens that follow."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(0, s.vocabulary, (s.batch, s.seqlen + 1), generator=generator).to(device)
    share = tokens.chunk(ranks)[rank]
    return share[:, :-1].contiguous(), share[:, 1:].contiguous()


def _loss(output: Any, target: Any) -> Any:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())


def _step(model: Any, batch: tuple[Any, Any], plain: Any = None) -> dict[str, Any]:
    output = model(batch[0])
    loss = _loss(output, batch[1])
    loss.backward()
    return {"output": output.detach(), "loss": loss.detach(), "grads": _gradients(model if plain is None else plain)}


def _gradients(model: Any) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _mesh(device: torch.device, *names: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (RANKS,) if len(names) == 1 else (2, RANKS // 2)
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def _single(s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    return _step(prepare(Model(s).to(device)), _batch(s, device, seed))


def _dp(s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    model = prepare(Model(s).to(device))
    return _step(DistributedDataParallel(model), _batch(s, device, seed, dist.get_rank(), RANKS), model)


def _shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp2(s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    model = _shard(prepare(Model(s).to(device)), _mesh(device, "dp"))
    return _step(model, _batch(s, device, seed, dist.get_rank(), RANKS))


def _parallelize(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks.values():
        names = [f"{part}.{name}" for part in ("mixer", "mlp") for name, _ in getattr(block, part).named_children()]
        plan: Any = {
            name: RowwiseParallel() if name.endswith((".out", ".down")) else ColwiseParallel() for name in names
        }
        parallelize_module(block, mesh, plan)
        for name, parameter in list(block.mixer.named_parameters(recurse=False)):
            shards = distribute_tensor(parameter.detach(), mesh, [Shard(0)])  # by head, as the projections are
            block.mixer.register_parameter(name, torch.nn.Parameter(shards))
    return model


def _tp(s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    model = _parallelize(prepare(Model(s).to(device)), _mesh(device, "alike", "tp")["tp"])
    return _step(model, _batch(s, device, seed))


def _fsdp2_tp(s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    mesh = _mesh(device, "dp", "tp")
    model = _shard(_parallelize(prepare(Model(s).to(device)), mesh["tp"]), mesh["dp"])
    return _step(model, _batch(s, device, seed, mesh.get_local_rank("dp"), 2))


def _pipeline(
    s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any], mesh: Any, each: int, shard: Any = None
) -> dict[str, Any]:
    """``each`` stages on each rank of ``mesh``; with ``shard``, a mesh over which each stage is sharded."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    rank, ranks = mesh.get_local_rank(), mesh.size()
    count = ranks * each
    layers = s.layers // count
    numbers = [rank + ranks * turn for turn in range(each)]
    models = [prepare(Model(s).cut(range(n * layers, (n + 1) * layers)).to(device)) for n in numbers]
    if shard is not None:
        models = [_shard(model, shard) for model in models]
    inputs, target = _batch(s, device, seed, *((0, 1) if shard is None else (shard.get_local_rank(), 2)))
    stages: list[Any] = [
        PipelineStage(model, n, count, device, group=mesh.get_group()) for n, model in zip(numbers, models, strict=True)
    ]
    schedule: Any = (
        Schedule1F1B(stages[0], count, loss_fn=_loss)
        if each == 1
        else ScheduleInterleaved1F1B(stages, count, loss_fn=_loss)
    )
    losses: list[Any] = []
    if count - 1 in numbers:
        found = schedule.step(*([inputs] if 0 in numbers else []), target=target, losses=losses)
    else:
        found = schedule.step(*([inputs] if 0 in numbers else []))
    result: dict[str, Any] = {"grads": {}}
    for model in models:
        result["grads"].update(_gradients(model))
    if losses:
        result |= {"output": found.detach(), "losses": [loss.detach() for loss in losses]}
        result["loss"] = torch.stack(result["losses"]).mean()
    return result


def _pp(s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    return _pipeline(s, device, seed, prepare, _mesh(device, "pp"), 1)


def _vpp(s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    return _pipeline(s, device, seed, prepare, _mesh(device, "alike", "pp")["pp"], 2)


def _vpp_fsdp2(s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    mesh = _mesh(device, "dp", "pp")
    return _pipeline(s, device, seed, prepare, mesh["pp"], 2, mesh["dp"])


class _ExpertParallel:
    """Experts sharded over a mesh; tokens travel to the rank that has their expert and back."""

    def __init__(self) -> None:
        self.splits: tuple[list[int], list[int]] = ([], [])
        self.blocks: list[int] = []
        self.ranks = 0

    def apply(self, experts: Experts, mesh: Any) -> None:
        """Shard the parameters and put the exchange around ``forward``."""
        from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

        def shard(_: str, module: Any, mesh: Any) -> None:
            for name, parameter in list(module.named_parameters(recurse=False)):
                shards = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                module.register_parameter(name, torch.nn.Parameter(shards))

        distribute_module(experts, mesh, shard, self._send, self._bring_back)

    def _send(self, _: Any, inputs: Any, mesh: Any) -> Any:
        tokens, counts = inputs
        self.ranks = mesh.size()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=mesh.get_group())
        sent, come = (c.view(self.ranks, -1).sum(1).tolist() for c in (counts, arriving))
        self.splits, self.blocks = (sent, come), arriving.tolist()
        mixed = _exchange(tokens, come, sent, mesh)
        # They come by rank and then by expert; the experts want them by expert.
        parts = mixed.split(self.blocks)
        each = len(self.blocks) // self.ranks
        by_expert = torch.cat([parts[rank * each + e] for e in range(each) for rank in range(self.ranks)])
        return by_expert, arriving.view(self.ranks, each).sum(0)

    def _bring_back(self, _: Any, outputs: Any, mesh: Any) -> Any:
        each = len(self.blocks) // self.ranks
        order = [rank * each + e for e in range(each) for rank in range(self.ranks)]
        parts = dict(zip(order, outputs.split([self.blocks[n] for n in order]), strict=True))
        by_rank = torch.cat([parts[n] for n in range(len(self.blocks))])
        return _exchange(by_rank, self.splits[0], self.splits[1], mesh)


def _exchange(tokens: Any, come: list[int], sent: list[int], mesh: Any) -> Any:
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(tokens, come, sent, mesh.get_group()) + 0  # waits for the exchange


def _ep(s: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    mesh = _mesh(device, "ep")
    model = prepare(Model(s).to(device))
    for module in model.modules():
        if isinstance(module, Experts):
            _ExpertParallel().apply(module, mesh)
    found = _step(model, _batch(s, device, seed, dist.get_rank(), RANKS))
    for gradient in found["grads"].values():
        # An expert's gradient has come from all ranks; the others' is of this rank's tokens alone.
        if local(gradient) is gradient:
            dist.all_reduce(gradient)
        gradient.div_(RANKS)  # each rank's loss is a mean over its share
    return found


RUNNERS: dict[str, Runner] = {
    "single": _single,
    "dp": _dp,
    "fsdp2": _fsdp2,
    "tp": _tp,
    "pp": _pp,
    "vpp": _vpp,
    "ep": _ep,
    "fsdp2_tp": _fsdp2_tp,
    "vpp_fsdp2": _vpp_fsdp2,
}
"""Cell to what runs it."""
