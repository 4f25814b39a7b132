"""Everything that starts processes of its own or pickles what the script defines."""

import concurrent.futures
import enum
import multiprocessing
import os
import pickle
import sys
from dataclasses import dataclass


@dataclass
class Point:
    x: int


class Color(enum.Enum):
    RED = 1


class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Point(index).x, os.getpid()


def doubled(point):
    return Point(2 * point.x)


def loaded(method):
    from torch.utils.data import DataLoader

    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=method)
    rows = list(loader)
    workers = {pid for _, pids in rows for pid in pids.tolist()}
    assert os.getpid() not in workers
    return sorted(x for xs, _ in rows for x in xs.tolist())


if __name__ == "__main__":
    assert pickle.loads(pickle.dumps([Point(1), Color.RED, doubled])) == [Point(1), Color.RED, doubled]
    assert Point.__module__ == "__main__"
    method = sys.argv[1]
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        print(method, "pool", pool.map(doubled, [Point(1), Point(2)]))
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        print(method, "executor", executor.submit(doubled, Point(3)).result())
    print(method, "loader", loaded(method))
    queue = context.SimpleQueue()
    child = context.Process(target=queue.put, args=(Point(5),))
    child.start()
    print(method, "process", queue.get(), child.join(), child.exitcode)
