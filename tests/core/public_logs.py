"""Lines of real logs, quoted from public issue threads, and what may be said about them.

`says` is the class that the thread confirms, or "" if the line alone does not show a cause: then nothing may
be guessed.
`between`: the fault may be at either end of a connection. The table of `launcher/failure/symptoms.py` was
written with the lines of DEVELOPED at hand. Those of HELD_OUT were collected after it was finished: 27 lines, of which
it judged 22 as their threads do, left 4 unknown, and judged 1 wrong, a harmless warning of RDMA (`ibv_set_ece`). This
one is now among DEVELOPED.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    thread: str  # of github.com: owner/name#number
    text: str
    says: str
    between: bool = False


_USER, _MEMORY, _HARDWARE, _NETWORK = "user-exception", "out-of-memory", "hardware", "network"
_PEER, _UNKNOWN = "consequence", ""


def _between(thread: str, text: str) -> Line:
    return Line(thread, text, _NETWORK, between=True)


DEVELOPED = (
    # --- InfiniBand and RoCE
    _between(
        "NVIDIA/nccl#1405",
        "ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.216.210.236<54862> with status=12 opcode=0 "
        "len=0 vendor err 129 (Recv)",
    ),
    _between(
        "NVIDIA/nccl#1664",
        "NET/IBP:Got completion from peer 7.6.13.83<36315> with status=12 opcode=32698 len=32696 vendor err 129 (Send)",
    ),
    _between(
        "NVIDIA/nccl#1434",
        "transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.3.0.61<39430> with error 12, opcode "
        "129, len 0, vendor err 129 (Recv)",
    ),
    _between(
        "NVIDIA/nccl#1434",
        "transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.1.15.233<60403> with error 4, opcode "
        "32601, len 32600, vendor err 81 (Send)",
    ),
    _between(
        "NVIDIA/nccl#1737",
        "ib_plugin.c:1007 NCCL WARN NET/IB : Got completion from peer 10.1.32.3<54891> with error 5, opcode 0, len 0, "
        "vendor err 249",
    ),
    _between(
        "NVIDIA/nccl#1710",
        "transport/net_ib.cc:1909 NCCL WARN NET/IB : Got completion from peer 10.1.3.201<33057> with status=9 opcode=0 "
        "len=0 vendor err 138 (Send)",
    ),
    _between(
        "NVIDIA/nccl#2219", "NET/IB: Got completion from peer ... status=IBV_WC_RETRY_EXC_ERR(12) opcode=..."
    ),
    Line(
        "NVIDIA/nccl#1710",
        "transport/net_ib.cc:101 NCCL WARN NET/IB : mlx5_0:1 Got async event : local access violation work queue error",
        _NETWORK,
    ),
    Line("NVIDIA/nccl#1819", "NCCL WARN NET/IB : mlx5_0:1 Got async event : GID table change", _UNKNOWN),
    Line(
        "openucx/ucx#7349",
        "ib_device.c:482  UCX  WARN  IB Async event on mlx5_0: client reregistration on port 1",
        _UNKNOWN,
    ),
    _between(
        "NVIDIA/nccl-tests#227",
        "ibvwrap.c:160 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
    ),
    _between(
        "NVIDIA/nccl#2013",
        "ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx_x:1, curr "
        "state "
        "INIT, next state RTR, local GID index 3",
    ),
    _between(
        "NVIDIA/nccl-tests#185",
        "misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable",
    ),
    _between("uccl-project/uccl#641", "Failed to modify QP to RTR: Connection timed out"),
    Line(
        "openucx/ucx#6264",
        "mlx5_core 0000:41:00.0: mlx5_cmd_out_err:800:(pid 233522): CREATE_MKEY(0x200) op_mod(0x0) failed, status "
        "limits exceeded(0x8), syndrome (0x18af6), err(-12)",
        _UNKNOWN,
    ),
    Line(
        "linux-nvme/nvme-cli#3268",
        "infiniband rocep33s0f0: mlx5_poll_one:530:(pid 0): syndrome 0x5, vendor syndrome 0xf9",
        _UNKNOWN,
    ),
    # --- sockets
    _between(
        "hkproj/pytorch-transformer-distributed#1",
        "socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host",
    ),
    Line(
        "NVIDIA/nccl#2076",
        "socketProgressOpt: Call to recv from 172.16.0.1<33759> failed : Connection reset by peer",
        _PEER,
    ),
    Line(
        "NVIDIA/nccl#795",
        "misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.200.84.247<58355> failed : Broken pipe",
        _PEER,
    ),
    Line(
        "NVIDIA/nccl#795",
        "proxy.cc:1119 NCCL WARN [Proxy Service 9] Failed to execute operation Connect from rank 9, retcode 6",
        _UNKNOWN,
    ),
    Line(
        "NVIDIA/nccl#1514",
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\n"
        "ncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer user<50260>",
        _PEER,
    ),
    Line(
        "NVIDIA/nccl#1232", "NCCL WARN socketProgress: Connection closed by remote peer node2<42830>", _PEER
    ),
    Line(
        "NVIDIA/nccl-tests#166",
        "proxy.cc:1143 NCCL WARN Socket recv failed while polling for opId=0x7f4774cc9620",
        _UNKNOWN,
    ),
    # --- EFA
    _between(
        "aws/aws-ofi-nccl#161", "NCCL WARN NET/OFI Request completed with error. RC: 21. Error: unknown error"
    ),
    _between(
        "aws/aws-ofi-nccl#156",
        "ofi_process_cq:1039 NCCL WARN NET/OFI Request 0x7fbb944701b8 completed with error. RC: 20. Error: unknown "
        "error.",
    ),
    Line(
        "aws/aws-ofi-nccl#889",
        "NCCL WARN NET/OFI Creating new endpoint for domain 0x7f9befa99380 failed: Invalid argument",
        _NETWORK,
    ),
    Line(
        "aws/aws-ofi-nccl#24",
        "NCCL WARN NET/OFI Couldn't open AV. RC: -22, ERROR: Invalid argument",
        _NETWORK,
    ),
    Line(
        "awslabs/awsome-distributed-ai#203",
        "register_rail_mr_buffer:617 NCCL WARN NET/OFI Unable to register memory (type = 2) for device 4. RC: -22",
        _NETWORK,
    ),
    Line(
        "awslabs/awsome-distributed-ai#386",
        "nccl_net_ofi_create_plugin:1067 NCCL WARN NET/OFI aws-ofi-nccl initialization failed",
        _UNKNOWN,  # NCCL went on over sockets
    ),
    # --- memory
    Line("NVIDIA/nccl#1235", "include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'", _MEMORY),
    Line(
        "NVIDIA/nccl#525",
        "include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
        _MEMORY,
    ),
    Line(
        "NVIDIA/nccl#525",
        "include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-1462445a6f01cbfc-1-2-3 "
        "(size 9637888)",
        _MEMORY,
    ),
    Line(
        "NVIDIA/nccl-tests#166",
        "misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes",
        _MEMORY,
    ),
    Line(
        "NVIDIA/nccl#1589",
        "misc/shmutils.cc:129 NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-glnlGK (size "
        "14156128), error: No such file or directory (2)",
        _UNKNOWN,
    ),
    Line(
        "NVIDIA/nccl-tests#206",
        "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        _MEMORY,  # the limit on locked memory
    ),
    # --- GPUs
    Line(
        "NVIDIA/semantic-segmentation#33",
        "cuda runtime error (39) : uncorrectable ECC error encountered at "
        "/pytorch/aten/src/THC/THCCachingHostAllocator.cpp:265",
        _HARDWARE,
    ),
    Line(
        "kohya-ss/sd-scripts#1434",
        "[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: CUDA error: "
        "uncorrectable ECC error encountered",
        _HARDWARE,
    ),
    Line(
        "nagadit/DeepFaceLab_Linux#89",
        "failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        _HARDWARE,
    ),
    Line(
        "kubernetes-sigs/dra-driver-nvidia-gpu#982",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        _HARDWARE,
    ),
    Line(
        "kubernetes-sigs/dra-driver-nvidia-gpu#982",
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062) returned "
        "from status @ kernel_channel.c:2827",
        _HARDWARE,
    ),
    Line(
        "NVIDIA/srt-slurm#307",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        _HARDWARE,
    ),
    Line(
        "NVIDIA/nccl#1935", "ncclUnhandledCudaError: Last error:\nCuda failure 999 'unknown error'", _HARDWARE
    ),
    Line(
        "NVIDIA/nccl#1410", "ncclUnhandledCudaError: Last error:\nCuda failure 1 'invalid argument'", _UNKNOWN
    ),
    Line("NVIDIA/nccl#1029", "NCCL WARN Cuda failure 'initialization error'", _UNKNOWN),
    Line("NVIDIA/nccl-tests#264", "Test CUDA failure common.cu:941 'system not yet initialized'", _HARDWARE),
    Line("hiyouga/LlamaFactory#8968", "Cuda failure 802 'system not yet initialized'", _HARDWARE),
    # --- the kernel's log
    Line("NVIDIA/NVSentinel#155", "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus", _HARDWARE),
    Line("NVIDIA/NVSentinel#155", "NVRM: fallen off the bus and is not responding to commands.", _HARDWARE),
    Line("Cyridd/cmpunlocker#4", "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:894)", _HARDWARE),
    Line(
        "akash-network/support#244",
        "NVRM: Xid (PCI:0000:00:05): 43, pid=1045242, name=pt_main_thread, Ch 00000008",
        _UNKNOWN,
    ),
    Line(
        "akash-network/support#244",
        "NVRM: Xid (PCI:0000:00:07): 31, pid=2512125, name=python3.10, Ch 00000008, intr 00000000. MMU Fault: ENGINE "
        "GRAPHICS GPCCLIENT_T1_8 faulted @ 0x73ac_1c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
        _UNKNOWN,
    ),
    Line(
        "akash-network/support#244",
        "NVRM: Xid (PCI:0000:00:08): 94, pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No",
        _HARDWARE,
    ),
    Line(
        "leptonai/gpud#1174",
        "NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000)",
        _HARDWARE,
    ),
    Line(
        "leptonai/gpud#1174",
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008)",
        _UNKNOWN,
    ),
    Line(
        "NVIDIA/open-gpu-kernel-modules#1150",
        "NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149",
        _UNKNOWN,
    ),
    Line("NVIDIA/open-gpu-kernel-modules#1230", "NVRM: GPU6 RPC event history (CPU <- GSP):", _UNKNOWN),
    # --- the script
    Line(
        "NVIDIA/Megatron-LM#661",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : "
        "rank 3 and rank 0 both on CUDA device f000",
        _USER,
    ),
    Line(
        "horovod/horovod#3929",
        "init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000",
        _USER,
    ),
    Line(
        "InternLM/lmdeploy#3258",
        "[PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception: CUDA "
        "error: an "
        "illegal memory access was encountered",
        _USER,
    ),
    Line("vllm-project/vllm#17098", "Triton Error [CUDA]: an illegal memory access was encountered", _USER),
)
HELD_OUT = (
    _between(
        "NVIDIA/nccl-tests#166",
        "misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused "
        "connection "
        "abort",
    ),
    _between(
        "NVIDIA/nccl#1618",
        "misc/socket.cc:586 NCCL WARN socketPollConnect poll() returned 1, no POLLOUT events",
    ),
    _between(
        "NVIDIA/nccl#1618",
        "misc/socket.cc:602 NCCL WARN socketPollConnect poll() failed, ret 1, error Connection timed out, revents 8, "
        "connect to 172.16.30.229:39953",
    ),
    Line(
        "NVIDIA/nccl#914",
        "misc/socket.cc:521 NCCL WARN Net : Connection closed by remote peer 10.104.148.191<37877>",
        _PEER,
    ),
    Line("NVIDIA/nccl#914", "proxy.cc:862 NCCL WARN Proxy Call to rank 14 failed (Connect)", _UNKNOWN),
    Line(
        "NVIDIA/nccl#230",
        "transport/net_ib.cu:80 NCCL WARN NET/IB : Got async event : local catastrophic error",
        _NETWORK,
    ),
    Line("NVIDIA/nccl#230", "misc/ibvwrap.cu:220 NCCL WARN Call to ibv_get_async_event failed", _NETWORK),
    Line(
        "NVIDIA/nccl#1919",
        "transport/net_ib.cc:154 NCCL WARN NET/IB : mlx5_1:1 async fatal event on QP (0x7309dc3bb338): invalid request "
        "local work queue error",
        _NETWORK,
    ),
    Line("NVIDIA/nccl#905", "NCCL WARN NET/IB : Got async event : port error", _NETWORK),
    Line(
        "NVIDIA/nccl#1905",
        "transport/net_ib.cc:139 NCCL WARN communicator encountered a fatal error (detected in ncclIbTest)",
        _UNKNOWN,
    ),
    Line(
        "NVIDIA/nccl#1905",
        "transport/net_ib.cc:180 NCCL WARN NET/IB : mlx5_ib0:1 async fatal event on QP (0x7f69f01519a8): local access "
        "violation work queue error",
        _NETWORK,
    ),
    _between(
        "NVIDIA/nccl#1905",
        "transport/net_ib.cc:2451 NCCL WARN NET/IB: Got completion from peer 172.16.12.34<38081> with status=4 "
        "opcode=0 "
        "len=0 vendor err 83 (Send) hca mlx5_ib0",
    ),
    _between(
        "NVIDIA/nccl#1814",
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.1<55921> with status=12 opcode=1 len=0 vendor err 129 "
        "(Send) "
        "localGid ::ffff:29.87.4.221 remoteGids::ffff:29.87.88.182",
    ),
    _between("NVIDIA/nccl#1657", "Call to ibv_modify_qp failed with error No such device errno 19"),
    Line(
        "NVIDIA/nccl#1657", "Call to ibv_set_ece failed with error Operation not supported errno 95", _UNKNOWN
    ),
    Line(
        "akash-network/support#209",
        "NVRM: Xid (PCI:0000:a1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        _HARDWARE,
    ),
    Line(
        "akash-network/support#209",
        "Unable to determine the device handle for GPU0000:A1:00.0: Unknown Error",
        _HARDWARE,
    ),
    Line(
        "Bumblebee-Project/Bumblebee#677",
        "NVRM: Xid (PCI:0000:01:00): 32, Channel ID 00000000 intr 00004000",
        _UNKNOWN,
    ),
    Line(
        "NVIDIA/open-gpu-kernel-modules#1151",
        "NVRM: RmInitAdapter: osInitNvMapping failed, bailing out of RmInitAdapter",
        _HARDWARE,
    ),
    Line(
        "NVIDIA/open-gpu-kernel-modules#1151",
        "NVRM: GPU 0000:09:00.0: rm_init_adapter failed, device minor number 0",
        _HARDWARE,
    ),
    Line(
        "hiyouga/LlamaFactory#7396",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, "
        "NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
        _PEER,
    ),
    Line(
        "pytorch/pytorch#118369",
        "[E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=64088, "
        "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25625251 milliseconds before timing out.",
        _PEER,
    ),
    Line(
        "hiyouga/LlamaFactory#8261",
        "[PG ID 1 PG GUID 1 Rank 3] timed out after waiting for 60000ms flight recorder dumps to finish.",
        _UNKNOWN,
    ),
    Line(
        "sgl-project/sglang#271",
        "[PG 1 Rank 0] Process group watchdog thread terminated with exception: CUDA error: device-side assert "
        "triggered",
        _USER,
    ),
    Line(
        "modelscope/ms-swift#3264",
        "[PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception: CUDA "
        "error: an "
        "illegal instruction was encountered",
        _UNKNOWN,
    ),
    Line(
        "meta-llama/llama-cookbook#129",
        "[Rank 0] NCCL watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
        _USER,
    ),
    Line(
        "vllm-project/vllm#21731",
        'Assertion `idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.',
        _USER,
    ),
)
