"""What decides whether a template of the warm pool fits a command."""

from __future__ import annotations

from launcher.template import pool_key

HERE = {
    **pool_key.of_variables({"HOME": "/home/a", "SECRET": "xyz"}),
    "limit NOFILE": "1024:4096",
    "process Umask": "0022",
}


def test_equal_surroundings_have_one_name() -> None:
    assert pool_key.name_of(HERE) == pool_key.name_of(dict(reversed(HERE.items())))
    for changed in (HERE | {"process Umask": "0027"}, HERE | pool_key.of_variables({"NEW": ""})):
        assert pool_key.name_of(changed) != pool_key.name_of(HERE)
    assert pool_key.differences(HERE, dict(HERE)) == []


def test_variables_of_the_terminal_and_of_the_launcher_do_not_matter() -> None:
    shell = {
        "HOME": "/home/a",
        "SECRET": "xyz",
        "SHLVL": "3",
        "TMUX": "x",
        "DDP_LAUNCH_LOG_DIR": "/l",
        "PET_NNODES": "1",
    }
    assert pool_key.of_variables(shell) == pool_key.of_variables({"HOME": "/home/a", "SECRET": "xyz"})


def test_every_other_variable_matters_by_name_and_value() -> None:
    before = pool_key.of_variables({"A": "1", "B": "2", "OMP_NUM_THREADS": "1"})
    after = pool_key.of_variables({"A": "1", "B": "3", "C": ""})
    assert pool_key.differences(after, before) == [
        "variable B has another value",
        "variable C is set",
        "variable OMP_NUM_THREADS is not set",
    ]


def test_no_value_of_a_variable_can_be_read_in_a_key() -> None:
    assert "xyz" not in repr(HERE)
    assert len({*pool_key.of_variables({"A": "x", "B": "x"}).values()}) == 2  # equal values do not show


def test_the_closest_template_says_what_differs() -> None:
    far = {name: "other" for name in HERE}
    near = HERE | {"limit NOFILE": "64:64"}
    assert pool_key.why_missed(HERE, []) == ""
    assert pool_key.why_missed(HERE, [far, near]) == "limit NOFILE is 1024:4096, not 64:64"
    assert pool_key.why_missed(HERE, [{}]).count(";") == 3
    many = HERE | pool_key.of_variables({f"V{number}": "" for number in range(9)})
    assert pool_key.why_missed(many, [HERE]).endswith("variable V3 is set; and 5 more")
