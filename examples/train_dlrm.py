"""Train TorchRec's DLRM as a tower program under torchrun; the model is written as for one device.

    torchrun --nproc-per-node=4 examples/train_dlrm.py                # one host, four ranks
    torchrun --nproc-per-node=4 examples/train_dlrm.py --hosts 2      # the same ranks, taken as two hosts of two
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 examples/train_dlrm.py  # on each host

Uses CUDA and NCCL where every rank has a GPU, CPU and gloo elsewhere. Without torchrun it trains the program on one device.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import dmt_compile

FEATURES, ROWS, DIM, DENSE, BATCH = 8, 1000, 16, 13, 64


def flat_model(device: torch.device) -> DLRMTrain:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f{i}"]) for i in range(FEATURES)
    ]
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables, device=device), DENSE, [32, DIM], [64, 1], dense_device=device))


def random_batch(seed: int, device: torch.device) -> Batch:
    """Two ids per feature; the label tells whether the first dense feature is positive."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(BATCH, DENSE, generator=generator)
    ids = torch.randint(0, ROWS, (2 * FEATURES * BATCH,), generator=generator)
    lengths = torch.full((FEATURES * BATCH,), 2, dtype=torch.int32)
    sparse = KeyedJaggedTensor(keys=[f"f{i}" for i in range(FEATURES)], values=ids, lengths=lengths)
    return Batch(dense, sparse, (dense[:, 0] > 0).long()).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, help="take the ranks as this many hosts (default: as torchrun started them)")
    parser.add_argument("--steps", type=int, default=41, help="training steps (default 41)")
    options = parser.parse_args()
    torchrun = "LOCAL_RANK" in os.environ
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cuda = torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if torchrun:
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
        world = dist.get_world_size()
        topology = dmt_compile.Topology(options.hosts, world // options.hosts) if options.hosts else dmt_compile.Topology.from_env()
        program = dmt_compile.towerize(flat_model(device), topology)
        module = program.distribute()
        tables, dense = list(module.table_parameters()), list(module.dense_parameters())
    else:
        print("not started with torchrun: training on one device")
        module = dmt_compile.towerize(flat_model(device), dmt_compile.Topology(1, 1))
        tables = [p for name, p in module.named_parameters() if ".embedding_bags." in name]
        dense = [p for name, p in module.named_parameters() if ".embedding_bags." not in name]
    rank = dist.get_rank() if torchrun else 0

    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, lr=0.01)]
    if tables:  # a rank may own none
        optimizers.append(RowWiseAdagrad(tables, lr=0.02))
    for step in range(options.steps):
        loss, _ = module(random_batch(step * 1000 + rank, device))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2d}, loss of rank 0: {loss.item():.4f}", flush=True)

    # The flat model's keys and shapes, whatever the plan: it loads into the flat model, or into a program with other towers.
    state = module.full_state_dict() if torchrun else module.state_dict()
    module.load_state_dict(state)
    flat_model(device).load_state_dict(state)
    if rank == 0:
        print(f"{len(state)} tensors loaded into the flat model", flush=True)
    if torchrun:
        sent = module.traffic
        print(f"rank {rank} sent {sent.inside_host:,} bytes inside its host, {sent.across_hosts:,} across hosts", flush=True)
        module.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
