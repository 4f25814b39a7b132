import pytest

from launcher.joining.join import (
    Deployed,
    Embedded,
    Endpoint,
    MayServe,
    NoRendezvous,
    find_rendezvous,
    first_of_hostlist,
    parse_endpoint,
)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node1", Endpoint("node1", 29400)),
        ("node1:1234", Endpoint("node1", 1234)),
        ("10.0.0.1:80", Endpoint("10.0.0.1", 80)),
        ("[fe80::1]:99", Endpoint("fe80::1", 99)),
        ("[::1]", Endpoint("::1", 29400)),
        ("fe80::1", Endpoint("fe80::1", 29400)),
    ],
)
def test_endpoints_are_read(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["node1:", ":29400", "node1:http", "node1:0", "node1:65536"])
def test_what_is_no_endpoint_says_how_to_write_one(text: str) -> None:
    with pytest.raises(NoRendezvous, match="HOST:PORT"):
        parse_endpoint(text)


def test_endpoints_survive_printing() -> None:
    for endpoint in (Endpoint("a", 1), Endpoint("fe80::1", 2)):
        assert parse_endpoint(str(endpoint)) == endpoint


def test_one_node_meets_in_this_process() -> None:
    assert find_rendezvous("", 1, "h", {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}) == Embedded()


def test_one_address_may_be_served_and_several_are_a_service() -> None:
    assert find_rendezvous("a:1", 2, "h", {}) == MayServe(Endpoint("a", 1), "--rendezvous")
    assert find_rendezvous("a:1, b:2", 2, "h", {}) == Deployed((Endpoint("a", 1), Endpoint("b", 2)))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-3]", "node1"),
        ("gpu[03-07,12],cpu1", "gpu03"),
        ("r[2,4]n[05-06]", "r2n05"),
        ("a[1-2]-ib", "a1-ib"),
    ],
)
def test_slurms_short_form_of_hosts(nodes: str, first: str) -> None:
    assert first_of_hostlist(nodes) == first


def test_on_slurm_the_first_node_serves() -> None:
    env = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "gpu[03-07]"}
    found = find_rendezvous("", 5, "gpu05", env)
    assert found == MayServe(Endpoint("gpu03", 23456), "the first node of the Slurm job")


def test_on_kubernetes_the_pod_of_index_0_serves() -> None:
    found = find_rendezvous("", 4, "train-3.workers.ns.svc.cluster.local", {"JOB_COMPLETION_INDEX": "3"})
    assert isinstance(found, MayServe)
    assert found.endpoint == Endpoint("train-0.workers.ns.svc.cluster.local", 29400)


def test_without_a_place_to_meet_three_things_to_try_are_named() -> None:
    with pytest.raises(NoRendezvous, match=r"--rendezvous HOST:PORT.* srun .* Kubernetes"):
        find_rendezvous("", 2, "laptop", {"JOB_COMPLETION_INDEX": "3"})
