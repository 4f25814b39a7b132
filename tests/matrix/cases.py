"""What is tried with each release: tests of this project, by what they show. All of them together take 4 minutes."""

from __future__ import annotations

from dataclasses import dataclass

_LIKE_TORCH = "tests/contract/ddp_like_torch/test_like_torch.py::test_the_two_cannot_be_told_apart"
_OVER_BACKENDS = "tests/ddp_backends/test_training_over_them.py"


@dataclass(frozen=True)
class Case:
    name: str
    shows: str
    tests: tuple[str, ...]  # files, tests, or cases of tests


CASES: tuple[Case, ...] = (
    Case(
        "names",
        "torch's private names are as expected; no status mark is lost",
        (
            "tests/quality/test_torch_names.py::test_the_installed_torch_has_what_the_list_says",
            "tests/quality/test_torch_names.py::test_torchs_module_calls_only_what_our_reducer_has",
            "tests/quality/test_torch_names.py::test_what_our_classes_override_is_listed",
            "tests/ddp/test_torch_api.py",
            "tests/ddp/test_older_torch.py",
        ),
    ),
    Case(
        "launch",
        "a job starts warm, restarts, and ends",
        (
            "tests/shell/test_restarts.py::test_generations_count_up_and_each_has_a_store_of_its_own",
            "tests/shell/test_lost_store.py",
        ),
    ),
    Case(
        "kill",
        "a rank that is killed is named",
        (
            "tests/shell/test_restarts.py::test_exit_code_and_cause"
            "[os.kill(os.getpid(), signal.SIGKILL)-137-SIGKILL]",
        ),
    ),
    Case(
        "hang",
        "a rank that hangs is named, with its stack",
        ("tests/shell/test_hangs.py::test_the_report_holds_the_stack_of_the_rank",),
    ),
    Case(
        "recorder",
        "torch's flight recorder shows who is missing from a collective over Gloo",
        ("tests/ddp/test_torch_api.py::test_each_backend_has_its_recorder",),
    ),
    Case(
        "peers",
        "a lost peer is named",
        ("tests/shell/test_lost_peers.py::test_a_script_without_our_library_gets_torchs_error_with_a_note",),
    ),
    Case("marks", "collectives of all kinds of groups are recorded", ("tests/ddp/test_marked_groups.py",)),
    Case(
        "DDP",
        "`ddp.DistributedDataParallel` over Gloo: the same bits as torch's class",
        tuple(
            f"{_LIKE_TORCH}[{case}-2]"
            for case in (
                *(
                    "options-plain",
                    "options-find_unused_as_view",
                    "options-static_tiny_buckets",
                    "autocast-bf16",
                ),
                *("accumulation_under_no_sync-every", "sparse_embeddings-plain", "checkpoints-reentrant"),
                *("optimizer_in_backward-sgd", "sent_before_each_forward-synced", "written_and_read-save"),
                *("without_init_sync", "logging_data", "compiled_without_breaks_inside"),
            )
        ),
    ),
    Case(
        "shm",
        "the backends `shm` and `hier`: training, gather, scatter, groups side by side",
        (f"{_OVER_BACKENDS}::test_torchs_ddp", f"{_OVER_BACKENDS}::test_past_the_core"),
    ),
    Case(
        "hooks",
        "communication hooks",
        (
            *(
                f"{_LIKE_TORCH}[{case}-2]"
                for case in ("torchs_own-power", "torchs_own-fp16", "built_in-allreduce")
            ),
            "tests/ddp/test_transport.py::test_a_hook_sees_every_bucket_in_order",
        ),
    ),
    Case(
        "join",
        "`join()` with uneven inputs",
        tuple(f"{_LIKE_TORCH}[{case}-2]" for case in ("uneven-first_ends_initial", "with_buffers-active")),
    ),
    Case(
        "elastic",
        "commits of all kinds of values; a job continues after a kill",
        (
            "tests/elastic/test_state.py::test_what_is_kept_comes_back_as_it_was",
            "tests/elastic/test_going_on.py::test_ranks_die_and_the_loss_curve_is_that_of_an_undisturbed_run[ours]",
        ),
    ),
    Case(
        "FSDP2",
        "`fully_shard` over our backends, and with `ddp.elastic`",
        (
            f"{_OVER_BACKENDS}::test_fsdp2",
            "tests/elastic/test_going_on.py::test_ranks_die_and_the_loss_curve_is_that_of_an_undisturbed_run[fsdp2]",
        ),
    ),
    Case(
        "plug-in",
        "stock torchrun trains with `--rdzv-backend ddp`",
        ("tests/wings/torchrun/test_torchrun_handler.py",),
    ),
    Case(
        "two nodes",
        "two agents form one world",
        ("tests/shell/test_two_nodes_join.py::test_two_agents_form_one_world",),
    ),
    Case(
        "wire",
        "two nodes with this release, and a service with the Python and the packages of the checkout",
        ("tests/matrix/test_wire.py",),
    ),
    Case(
        "NUMA",
        "`--numa-binding` selects the CPUs that torch selects",
        ("tests/contract/test_numa_like_torch.py::test_same_cpus_as_torch",),
    ),
)
