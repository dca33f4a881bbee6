"""Who is a member of an attempt whose survivors go on: what ranks report, and what follows."""

from __future__ import annotations

from distributor.control.membership import Membership
from distributor.rank.membership import Members
from distributor.rank.messages import MemberState
from distributor.serialization.outcome import Failure, Origin


def able(ranks: int = 3) -> Membership:
    """Return members that have all completed a step."""
    members = Membership(ranks)
    for rank in range(ranks):
        assert members.note(rank, MemberState("able")) is None
    return members


def plain(members: Members | None) -> Members | None:
    """Return members without the generations in which they have joined."""
    return members and members._replace(since=())


def failure(rank: int, step: int | None = None, collateral: bool = False) -> Failure:
    return Failure(
        origin=Origin(rank=rank, local_rank=rank, host="host"),
        summary="ValueError: no",
        text="",
        pickled=None,
        collateral=collateral,
        step=step,
    )


def without(lost: int, ranks: int = 3) -> Membership:
    """Return members that have formed a group without one of them."""
    members = able(ranks)
    members.lose([failure(lost)])
    for rank in {*range(ranks)} - {lost}:
        members.note(rank, MemberState("formed", generation=1))
    return members


def test_only_the_loss_of_a_rank_that_all_are_prepared_for_is_survived() -> None:
    members = Membership(2)
    members.note(0, MemberState("able"))
    assert members.reason_to_restart([failure(1)]) == "rank 1 has not completed a step yet"
    members.note(1, MemberState("able"))
    assert members.reason_to_restart([failure(1)]) is None
    assert "collective" in str(members.reason_to_restart([failure(1, collateral=True)]))
    assert members.reason_to_restart([failure(1, step=3)]) is None
    assert members.reason_to_restart([failure(1, step=4)]) is None
    assert "same step" in str(members.reason_to_restart([failure(0, step=3)]))
    members.note(0, MemberState("unable", "there are two optimizers"))
    members.note(1, MemberState("unable", "another"))
    assert members.reason_to_restart([failure(1)]) == "there are two optimizers"
    assert able(1).reason_to_restart([failure(0)]) == "no other rank is left"


def test_a_lost_rank_leaves_and_another_joins_with_its_number() -> None:
    members, lost = able(), failure(1)
    assert plain(members.lose([lost])) == Members(1, (0, 2))
    assert members.pending == [lost]
    assert plain(members.lose([failure(1)])) == Members(1, (0, 2)), "the replacement had not joined"
    for rank in (0, 2):
        assert members.pending == [lost], "until all have formed the group"
        members.note(rank, MemberState("formed", generation=1))
    assert members.pending == []
    assert members.numbers == [0, 2]
    assert plain(members.note(1, MemberState("ready"))) == Members(2, (0, 1, 2), "growth")
    assert members.reason_to_restart([failure(0)]) is None, "a new one is able when it joins"


def test_a_group_that_does_not_form_has_a_successor() -> None:
    members = able()
    members.lose([failure(2)])
    assert plain(members.note(0, MemberState("unformed", generation=1))) == Members(2, (0, 1))
    assert members.note(1, MemberState("unformed", generation=1)) is None, "an old one"
    assert members.note(0, MemberState("formed", generation=1)) is None
    members.note(1, MemberState("formed", generation=2))
    assert members.pending, "rank 0 has formed the old one only"


def test_a_rank_that_joins_has_nothing_to_go_on_with() -> None:
    members = without(0, 2)
    members.note(0, MemberState("ready"))
    assert members.reason_to_restart([failure(1)]) == "no other rank is left"
    for rank in (0, 1):
        members.note(rank, MemberState("formed", generation=2))
    assert members.reason_to_restart([failure(1)]) is None


def test_a_process_that_has_not_joined_decides_nothing() -> None:
    members = able()
    members.note(3, MemberState("finished", rank=0))
    assert members.numbers == [0, 1, 2], "it has returned without a step"
    members.note(0, MemberState("unable", "there are two optimizers"))
    members.note(3, MemberState("ready"))
    assert members.note(3, MemberState("unformed")) is None, "it has waited in vain"


def test_members_that_have_finished_are_not_waited_for() -> None:
    members = able()
    members.note(0, MemberState("finished"))
    assert plain(members.lose([failure(1)])) == Members(1, (2,))
    assert members.numbers == [0, 2], "rank 0 returns the value"
    assert plain(members.note(2, MemberState("finished"))) == Members(2, (0, 2), "end")
    assert members.note(1, MemberState("ready")) is None, "it comes too late"

    members = able()
    members.note(0, MemberState("finished"))
    assert plain(members.note(1, MemberState("waiting"))) == Members(1, (1, 2))
    for rank in (1, 2):
        members.note(rank, MemberState("formed", generation=1))
    assert plain(members.note(3, MemberState("ready"))) == Members(2, (1, 2, 3), "growth")

    members = able()
    assert plain(members.lose([failure(2)])) == Members(1, (0, 1))
    assert plain(members.note(0, MemberState("finished"))) == Members(2, (1,)), "they form no group"

    members = able(2)
    members.note(0, MemberState("finished"))
    assert members.reason_to_restart([failure(1)]) is None
    assert plain(members.lose([failure(1)])) == Members(1, (0,), "end")


def test_a_run_ends_although_a_rank_is_about_to_join() -> None:
    members = without(2)
    assert plain(members.note(2, MemberState("ready"))) == Members(2, (0, 1, 2), "growth")
    assert plain(members.note(0, MemberState("finished"))) == Members(3, (1, 2), "growth")
    assert plain(members.note(1, MemberState("finished"))) == Members(4, (0, 1), "end")


def test_reports_of_a_group_that_has_formed_may_be_late() -> None:
    """Each rank's reports are in their order, but not those of several ranks."""
    members = without(2)
    members.note(2, MemberState("ready"))
    for rank in (0, 1):
        members.note(rank, MemberState("formed", generation=2))
        assert members.note(rank, MemberState("finished")) is None, "rank 2 has formed it, too"
    members.note(2, MemberState("formed", generation=2))
    assert plain(members.note(2, MemberState("finished"))) == Members(3, (0, 1, 2), "end")
    assert members.has_formed, "no group is waited for"


def test_a_rank_that_has_joined_has_the_state_although_others_have_been_lost_since() -> None:
    members = without(0)
    members.note(0, MemberState("ready"))
    members.note(2, MemberState("formed", generation=2))
    assert plain(members.lose([failure(1)])) == Members(3, (0, 2))
    assert members.current.since == ((0, 2), (2, 0))
    assert members.reason_to_restart([failure(2)]) == "no other rank is left"
    members.note(0, MemberState("formed", generation=2))
    assert members.reason_to_restart([failure(2)]) is None


def test_ranks_join_in_a_step_and_not_when_others_are_lost() -> None:
    """Those form their group between two steps if they wait for a report."""
    members = able(4)
    members.lose([failure(0)])
    members.note(0, MemberState("ready"))
    for rank in (1, 2, 3):
        members.note(rank, MemberState("formed", generation=1))
    assert plain(members.current) == Members(2, (0, 1, 2, 3), "growth")
    assert plain(members.lose([failure(1)])) == Members(3, (2, 3)), "nobody has formed it"
    members.note(2, MemberState("formed", generation=3))
    members.note(3, MemberState("formed", generation=3))
    assert plain(members.current) == Members(4, (0, 2, 3), "growth")
    assert members.current.since == ((0, 4), (2, 0), (3, 0))


def test_a_rank_that_is_lost_after_it_has_finished_is_not_waited_for() -> None:
    """The others may wait for it in a report that they make in the background."""
    members = Membership(3, keeps_all=False)
    for rank in range(3):
        members.note(rank, MemberState("able"))
    for rank in (0, 2):
        members.note(rank, MemberState("finished"))
    assert members.reason_to_restart([failure(2)]) is None
    assert members.lose([failure(2)]).since == ((0, 0), (1, 0))


def test_ranks_that_are_lost_together_leave_together() -> None:
    members = Membership(4, least=2)
    for rank in range(4):
        members.note(rank, MemberState("able"))
    assert "at least 2 ranks" in str(members.reason_to_restart([*map(failure, range(3))]))
    lost = [failure(0), failure(1)]
    assert members.reason_to_restart(lost) is None
    members.store = "host", 1
    assert plain(members.lose(lost)) == Members(1, (2, 3), store=("host", 1))
    assert members.note(4, MemberState("ready")) is None, "until the others have formed a group"
    members.note(2, MemberState("formed", generation=1))
    grown = members.note(3, MemberState("formed", generation=1))
    expected = Members(2, (2, 3, 4), "growth", ("host", 1))
    assert plain(grown) == expected, "a rank that is new has joined"
    members.note(2, MemberState("finished"))
    assert members.reason_to_restart([failure(3)]) is None, "it counts that one has finished"
    assert "a value" in str(members.reason_to_restart([failure(2), failure(3)]))
