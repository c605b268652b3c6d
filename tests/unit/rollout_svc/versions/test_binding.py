"""What ranks say of a load, and what that comes to."""

from __future__ import annotations

import pytest

from common.adapter import AdapterRef
from common.errors import Incompatible
from rollout_svc.engine import BoundReport, Mismatch, MismatchReason
from rollout_svc.versions.binding import Unbound, refuse_unbound

REF = AdapterRef("run", "default", 1, bytes(32))
NO_MODULE, SHAPE = MismatchReason.NO_MODULE, MismatchReason.SHAPE


def report(*mismatches: Mismatch, stage: int = 0, error: str = "", digest: str = "") -> BoundReport:
    return BoundReport(stage, 2, mismatches, error, digest)


def refusal(*reports: BoundReport) -> Incompatible:
    with pytest.raises(Incompatible) as caught:
        refuse_unbound(REF, reports)
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_all_ranks_took_is_let_in() -> None:
    refuse_unbound(REF, [report(digest="ab"), report(digest="ab")])


def test_the_first_three_are_named_and_all_are_carried() -> None:
    missing = [Mismatch(name, NO_MODULE) for name in "dbca"]
    error = refusal(report(*missing))
    assert isinstance(error, Unbound)
    assert [mismatch.tensor for mismatch in error.mismatches] == list("abcd")
    assert str(error).endswith(
        ": 4 tensors found no module: a (the model has no such module), b (the model has no such "
        "module), c (the model has no such module) and 1 more; train it on this replica's base "
        "model"
    )


def test_a_tensor_that_one_stage_took_is_bound() -> None:
    """Each pipeline stage has modules of its own."""
    refuse_unbound(
        REF, [report(Mismatch("a", NO_MODULE)), report(Mismatch("b", NO_MODULE), stage=1)]
    )


def test_a_tensor_that_one_rank_of_its_stage_did_not_take_is_unbound() -> None:
    error = refusal(report(), report(Mismatch("a", NO_MODULE)))
    assert isinstance(error, Unbound)


def test_the_stage_that_has_the_module_says_what_is_wrong() -> None:
    wide = Mismatch("a", SHAPE, "64 in_features, the module has 128")
    for reports in (
        (report(Mismatch("a", NO_MODULE)), report(wide, stage=1)),
        (report(wide), report(Mismatch("a", NO_MODULE), stage=1)),
    ):
        error = refusal(*reports)
        assert isinstance(error, Unbound)
        [found] = error.mismatches
        assert (found.reason, found.detail) == (SHAPE, wide.detail)


def test_the_engines_own_refusal_is_passed_on() -> None:
    assert "the engine refused it: OSError: damaged" in str(
        refusal(report(error="OSError: damaged"))
    )


@pytest.mark.parametrize("other", ["cd", ""])
def test_ranks_that_read_other_bytes_are_refused(other: str) -> None:
    """faults.md 7, TRL#7017: a version is live when all ranks confirm its digest."""
    error = refusal(report(digest="ab"), report(digest=other))
    assert "its ranks read different bytes" in str(error)
