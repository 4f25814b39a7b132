"""A loop as reference scripts for images have it: a sampler, workers that persist, an average over ranks."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class FakeImages(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, at):
        generator = torch.Generator().manual_seed(at)
        return torch.randn(3, 8, 8, generator=generator), at % 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(144, 4),
    )
    model = DDP(net)
    data = FakeImages()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=1, persistent_workers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for images, target in loader:
            loss = torch.nn.functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        print(dist.get_rank(), epoch, f"{(total[0] / total[1]).item():.7f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
