"""When an agent mentions again what its job waits for."""

from itertools import pairwise

from launcher.status import next_message_s


def test_the_first_message_comes_soon_and_the_others_are_ever_rarer() -> None:
    moments = [0.0]
    while len(moments) < 12:
        moments.append(next_message_s(moments[-1]))
    assert moments[1:] == [2.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1240.0, 1840.0, 2440.0]
    assert all(after - before <= 600.0 for before, after in pairwise(moments))
