"""What decides whether a template of the warm pool fits a command."""

from __future__ import annotations

from launcher.template import pool_folder

HERE = {
    **pool_folder.of_variables({"HOME": "/home/a", "SECRET": "xyz"}),
    "limit NOFILE": "1024:4096",
    "process Umask": "0022",
}


def test_equal_surroundings_have_one_name() -> None:
    assert pool_folder.name_of(HERE) == pool_folder.name_of(dict(reversed(HERE.items())))
    for changed in (HERE | {"process Umask": "0027"}, HERE | pool_folder.of_variables({"NEW": ""})):
        assert pool_folder.name_of(changed) != pool_folder.name_of(HERE)
    assert pool_folder.differences(HERE, dict(HERE)) == []


def test_only_variables_that_the_imports_have_read_matter() -> None:
    template = pool_folder.of_template(
        pool_folder.of_variables({"READ": "1", "RUN_ID": "7", "SHLVL": "3"}), ["READ", "UNSET"]
    )
    for more in ({}, {"RUN_ID": "8"}, {"OUTPUT": "/there", "DDP_LAUNCH_LOG_DIR": "/l"}):
        assert pool_folder.differences(pool_folder.of_variables({"READ": "1", **more}), template) == []
    after = pool_folder.of_variables({"READ": "2", "UNSET": "", "OMP_NUM_THREADS": "4", "PYTHONPATH": "/p"})
    assert pool_folder.differences(after, template) == [
        "variable OMP_NUM_THREADS is set",
        "variable PYTHONPATH is set",
        "variable READ has another value",
        "variable UNSET is set",
    ]
    assert pool_folder.differences({}, template) == ["variable READ is not set"]


def test_no_value_of_a_variable_can_be_read_in_a_key() -> None:
    assert "xyz" not in repr(HERE)
    assert len({*pool_folder.of_variables({"A": "x", "B": "x"}).values()}) == 2  # equal values do not show


def test_the_closest_template_says_what_differs() -> None:
    far = {name: "other" for name in HERE}
    near = HERE | {"limit NOFILE": "64:64"}
    assert pool_folder.why_missed(HERE, []) == ""
    assert pool_folder.why_missed(HERE, [far, near]) == "limit NOFILE is 1024:4096, not 64:64"
    assert pool_folder.why_missed(HERE, [{}]).count(";") == 2
    many = HERE | pool_folder.of_variables({f"OMP_{number}": "" for number in range(9)})
    assert pool_folder.why_missed(many, [HERE]).endswith("variable OMP_3 is set; and 5 more")
