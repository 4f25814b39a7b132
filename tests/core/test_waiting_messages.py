"""When an agent mentions again what its job waits for, and when it announces a restart."""

from dataclasses import replace
from itertools import pairwise

from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from launcher.status import next_message_s
from launcher.supervised import Phase, Supervision
from launcher.user_messages import UserMessages
from rendezvous.values.events import Stop, Waiting
from rendezvous.values.types import (
    AgentId,
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    PolicyAction,
    PolicyRule,
)

SPEC = LaunchSpec(EntryPoint(EntryKind.SCRIPT, "train.py"), "run-1")
RULES = (PolicyRule(FailureClass.USER_EXCEPTION, PolicyAction.FAIL),)


def test_the_first_message_comes_soon_and_the_others_are_ever_rarer() -> None:
    moments = [0.0]
    while len(moments) < 12:
        moments.append(next_message_s(moments[-1]))
    assert moments[1:] == [2.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1240.0, 1840.0, 2440.0]
    assert all(after - before <= 600.0 for before, after in pairwise(moments))


def test_a_restart_is_not_announced_while_a_later_report_can_end_the_job() -> None:
    """With a rule of --failure-policy that depends on the class of the cause: of a consequence it is not known yet."""
    lost = Cause("a", 0, 0, FailureClass.CONSEQUENCE, "Connection closed by peer", 1)
    order = Stop(1, Decision(DecisionKind.RESTART, "restarting (restart 1 of 3)", 1, lost))
    plain, lines = list[str](), list[str]()
    state = Supervision(AgentId("a", "1"))
    UserMessages(SPEC, plain.append).report(order, state, Phase.RUNNING)
    assert plain == ["ddp-launch: restarting (restart 1 of 3)"]
    messages = UserMessages(replace(SPEC, rules=RULES), lines.append)
    messages.report(order, state, Phase.RUNNING)
    assert not lines
    messages.report(Waiting("waiting for 1 more node", 1, 2), state, Phase.JOINING)
    assert lines == plain
