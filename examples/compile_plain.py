"""A training loop that already calls torch.compile, on ranks: one argument changes.

    torchrun --nproc-per-node=4 examples/compile_plain.py             # one host, four ranks
    torchrun --nproc-per-node=4 examples/compile_plain.py --hosts 2   # the same ranks, taken as two hosts of two
    python examples/compile_plain.py --explain                        # what becomes of Dynamo's graph, without ranks

Uses CUDA and NCCL where every rank has a GPU, CPU and gloo elsewhere. `--inner` names what compiles the rewritten graph.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import dmt_compile
from dmt_compile.backend import full_state_dict

FIELDS, ROWS, DIM, DENSE, BATCH = 8, 1000, 16, 13, 64


class Ranker(nn.Module):
    """A table for each field, a bottom MLP, pairwise products, a top MLP: written for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(ROWS, DIM) for _ in range(FIELDS)])
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((FIELDS + 1) ** 2 + DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(table(ids[:, field]) for field, table in enumerate(self.tables))], dim=1)
        pairs = (vectors @ vectors.mT).flatten(1)
        return self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)


def random_batch(seed: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The label tells whether the first dense feature is positive."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(size, DENSE, generator=generator)
    ids = torch.randint(0, ROWS, (size, FIELDS), generator=generator)
    return dense.to(device), ids.to(device), (dense[:, 0] > 0).float().to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, help="take the ranks as this many hosts (default: as torchrun started them)")
    parser.add_argument("--steps", type=int, default=41, help="training steps (default 41)")
    parser.add_argument("--inner", default="inductor", help="what compiles the rewritten graph (default inductor)")
    parser.add_argument("--explain", action="store_true", help="print what becomes of Dynamo's graph, and end")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.explain:
        dense, ids, _ = random_batch(0, BATCH, torch.device("cpu"))
        print(dmt_compile.explain(Ranker(), dense, ids, topology=dmt_compile.Topology(hosts=2, ranks_per_host=2)))
        return
    torchrun = "LOCAL_RANK" in os.environ
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cuda = torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    backend_options: dict[str, object] = {"inner": options.inner}
    if torchrun:
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
        if options.hosts:
            backend_options["topology"] = dmt_compile.Topology(options.hosts, dist.get_world_size() // options.hosts)
    rank = dist.get_rank() if torchrun else 0

    model = Ranker().to(device)
    compiled = torch.compile(model, backend="dmt", options=backend_options, fullgraph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(options.steps):
        # Batches of other sizes on every rank.
        dense, ids, label = random_batch(step * 1000 + rank, BATCH + 4 * rank, device)
        loss = nn.functional.binary_cross_entropy_with_logits(compiled(dense, ids), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2d}, loss of rank 0: {loss.item():.4f}", flush=True)

    state = full_state_dict(compiled)
    Ranker().to(device).load_state_dict(state)
    if rank == 0:
        print(f"{len(state)} tensors loaded into the flat model", flush=True)
    if torchrun:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
