"""Xid errors: lines as drivers of several releases have written them to public kernel logs, and what they mean."""

from __future__ import annotations

import pytest

from launcher.machine.xids import XIDS, Need, Xid, XidOrigin, read_kmsg, read_lines, short_bus

# (line, bus, number, pid, program, whose fault, what the GPU needs)
LINES = [
    (
        "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on "
        "(GPC 7, TPC 7, SM 0): Illegal Instruction Parameter",
        *("0000:cb:00", 13, 0, "", XidOrigin.PROGRAM, Need.NOTHING),
    ),
    (
        "NVRM: Xid (PCI:0000:cb:00): 109, pid=1797828, name=pt_main_thread, Ch 00000008, errorString CTX SWITCH "
        "TIMEOUT, Info 0x58005",
        *("0000:cb:00", 109, 1797828, "pt_main_thread", XidOrigin.EITHER, Need.WATCH),
    ),
    (
        "NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149",
        *("0000:dc:00", 45, 1818990, "python3", XidOrigin.PROGRAM, Need.NOTHING),
    ),
    (
        "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        *("0000:05:00", 79, 0, "", XidOrigin.DEVICE, Need.REBOOT),
    ),
    (
        "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
        *("0000:01:00", 79, 0, "", XidOrigin.DEVICE, Need.REBOOT),
    ),
    (
        "NVRM: Xid (0000:03:00): 14, Channel 00000001",
        *("0000:03:00", 14, 0, "", XidOrigin.EITHER, Need.WATCH),
    ),
    (
        "NVRM: Xid (PCI:0000:b9:00): 74, pid=<unknown>, name=<unknown>, NVLink: fatal error detected on link "
        "6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
        *("0000:b9:00", 74, 0, "", XidOrigin.LINK, Need.WATCH),
    ),
    (
        "NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error",
        *("0000:9b:00", 94, 1234, "python3", XidOrigin.DEVICE, Need.WATCH),
    ),
    (
        "NVRM: Xid (PCI:0000:23:00): 120, GSP task exception: load access page fault (cause:0xd) @ pc:0x13636b2, "
        "partition:2#0, task:3, gfid: 0",
        *("0000:23:00", 120, 0, "", XidOrigin.DEVICE, Need.RESET),
    ),
    (
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 "
        "0x00000000 0x00100000 0x00000004)",
        *("0018:01:00", 145, 0, "", XidOrigin.LINK, Need.WATCH),
    ),
    (
        "NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000 "
        "0x00000000 0x00000000 0x00000000)",
        *("0009:01:00", 149, 0, "", XidOrigin.LINK, Need.RESET),
    ),
    (
        "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
        *("0009:01:00", 154, 0, "", XidOrigin.DEVICE, Need.RESET),
    ),
    (
        "NVRM: Xid (PCI:0019:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
        *("0019:01:00", 154, 0, "", XidOrigin.DEVICE, Need.NOTHING),
    ),
]


@pytest.mark.parametrize(("line", "bus", "code", "pid", "program", "origin", "need"), LINES)
def test_lines_of_kernel_logs(
    line: str, bus: str, code: int, pid: int, program: str, origin: XidOrigin, need: Need
) -> None:
    (xid,) = read_lines([(7.0, line)])
    assert (xid.bus, xid.code, xid.at_s, xid.pid, xid.program) == (bus, code, 7.0, pid, program)
    assert (xid.meaning.origin, xid.meaning.need) == (origin, need)
    assert xid.advice


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build",
        "NVRM: Xid error: xyz, invalid data",
        "NVRM: The NVIDIA probe routine failed for 1 device(s).",
        "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing",
        "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link INIT",
    ],
)
def test_other_lines_are_not_errors(line: str) -> None:
    assert read_lines([(0.0, line)]) == ()


def test_a_gpu_that_leaves_the_bus_without_a_number_counts_as_79() -> None:
    whole = (
        "NVRM: The NVIDIA GPU 0000:b3:00.0\n               NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "               NVRM: fallen off the bus and is not responding to commands."
    )
    in_pieces = [
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    for lines in ([whole], in_pieces, ["NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus."]):
        (xid,) = read_lines((1.0, line) for line in lines)
        assert (xid.bus, xid.code) == ("0000:b3:00", 79)
    both = ["NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.", in_pieces[0], in_pieces[2]]
    assert len(read_lines((1.0, line) for line in both)) == 1


def test_records_of_the_kernel_have_a_time_and_may_have_several_lines() -> None:
    record = (
        "3,1045,1843308145,-;NVRM: The NVIDIA GPU 0000:b3:00.0\\x0a               NVRM: (PCI ID: 10de:26b5) installed "
        "in this system has\\x0a               NVRM: fallen off the bus and is not responding to commands."
    )
    assert [(xid.code, xid.at_s) for xid in read_kmsg([record, " SUBSYSTEM=pci", "no record"])] == [
        (79, 1843.308145)
    ]


@pytest.mark.parametrize("address", ["00000000:CB:00.0", "0000:cb:00.0", "cb:00", "0000:cb:00"])
def test_bus_addresses_are_compared_in_one_form(address: str) -> None:
    assert short_bus(address) == "0000:cb:00"


def test_an_error_is_described_with_its_program_and_what_to_do() -> None:
    xid = Xid("0000:cb:00", 31, pid=812, program="python")
    assert "(usually caused by the script), in python (pid 812)" in str(xid)
    assert "compute-sanitizer" in xid.advice
    assert "reboot" in Xid("0000:cb:00", 79).advice
    assert "nvlink" in Xid("0000:cb:00", 74).advice
    assert "NVIDIA's list" in str(Xid("0000:cb:00", 999))


def test_errors_of_a_program_need_nothing_of_the_gpu() -> None:
    assert {need for m in XIDS.values() if m.origin is XidOrigin.PROGRAM for need in [m.need]} == {
        Need.NOTHING
    }
