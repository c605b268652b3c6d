"""Who may join."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from refit.v1 import adapter_pb2, tensor_pb2

from common.adapter import Kind, Layout
from common.errors import Incompatible, InvalidField, RefitError
from common.model_dir import BaseModel
from common.rules import Merge, Rules, Swap
from common.wire import layout_to_proto
from tests.adapters import make_adapter
from tests.subscriptions import subscription_request
from tests.whole_weights import make_weights
from trainer_svc.fleet.admission import Needed, check_request

Request = adapter_pb2.AdapterUpdateRequest
MANIFEST, _ = make_adapter()
BASE_MODEL = BaseModel("m", "base")

UNFIT: dict[str, tuple[Callable[[Request], object], type[RefitError], str]] = {
    "no id": (lambda r: r.ClearField("replica_id"), InvalidField, "replica_id"),
    "no port": (lambda r: setattr(r, "advertised_address", "h"), InvalidField, "host:port"),
    "no host": (lambda r: setattr(r, "advertised_address", ":1"), InvalidField, "host:port"),
    "less than nothing": (
        lambda r: setattr(r.partial, "received_bytes", -1),
        InvalidField,
        "received_bytes: -1",
    ),
    "base": (
        lambda r: setattr(r.base_model, "fingerprint", "g"),
        Incompatible,
        r"\(fingerprint 'g'\).*\(fingerprint 'base'\)",
    ),
    "rank": (lambda r: setattr(r.capabilities, "max_rank", 1), Incompatible, "max_rank: 1"),
    "modules": (
        lambda r: r.capabilities.target_modules.remove("k_proj"),
        Incompatible,
        "cannot adapt k_proj",
    ),
    "dtype": (lambda r: r.capabilities.ClearField("dtypes"), Incompatible, "not take F32"),
}


def _check(request: Request) -> None:
    check_request(request, base=BASE_MODEL, needed=Needed(MANIFEST))


@pytest.mark.parametrize("name", UNFIT)
def test_a_replica_that_cannot_serve_the_run_is_refused(name: str) -> None:
    """faults.md 8, vllm#55193: what no module can take is refused before it is sent."""
    change, error, expected = UNFIT[name]
    request = subscription_request()
    _check(request)
    change(request)

    with pytest.raises(error, match=expected):
        _check(request)


def test_a_refusal_gives_every_reason() -> None:
    request = subscription_request()
    request.base_model.fingerprint = "g"
    request.capabilities.Clear()
    request.capabilities.max_loras = 2
    request.capabilities.layouts.append(layout_to_proto(Layout.MAGNITUDE))

    with pytest.raises(Incompatible) as caught:
        _check(request)
    for field in ("base_model", "max_rank", "target_modules", "layouts", "dtypes"):
        assert field in str(caught.value)


KINDS = [adapter_pb2.ADAPTER_KIND_MERGED, adapter_pb2.ADAPTER_KIND_BASE]
MERGED = make_weights(kind=Kind.MERGED).manifest


def test_a_merged_run_needs_neither_rank_nor_modules() -> None:
    request = subscription_request()
    request.capabilities.max_rank = 0
    request.capabilities.ClearField("target_modules")
    request.capabilities.dtypes.append(tensor_pb2.DTYPE_BFLOAT16)
    request.capabilities.kinds.extend(KINDS)
    check_request(request, base=BASE_MODEL, needed=Needed(MERGED))


def test_a_kind_that_a_replica_cannot_take_is_refused_before_step_0() -> None:
    """Without kinds a replica takes adapters alone."""
    with pytest.raises(Incompatible, match="kinds: the replica takes LORA, the run publishes MERG"):
        check_request(subscription_request(), base=BASE_MODEL, needed=Needed(MERGED))
    request = subscription_request()
    request.capabilities.kinds.extend(KINDS)
    with pytest.raises(Incompatible, match="kinds: the replica takes MERGED, BASE, the run"):
        _check(request)
    request.capabilities.kinds.append(99)  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=r"capabilities\.kinds: 99"):
        _check(request)


def test_a_replica_without_weights_needs_a_trainer_that_has_them() -> None:
    request = subscription_request()
    request.capabilities.needs_base = True
    request.capabilities.kinds.extend([adapter_pb2.ADAPTER_KIND_LORA, *KINDS])
    request.base_model.fingerprint = ""
    with pytest.raises(Incompatible, match=r"^capabilities\.needs_base: the replica started with"):
        _check(request)
    check_request(request, base=BASE_MODEL, needed=Needed(MANIFEST), sends_base=True)
    request.base_model.fingerprint = "g"
    with pytest.raises(Incompatible, match="load the same model on both"):
        check_request(request, base=BASE_MODEL, needed=Needed(MANIFEST), sends_base=True)


def _with_layout(layout: Layout) -> Needed:
    first = replace(MANIFEST.tensors[0], layout=layout)
    return Needed(replace(MANIFEST, tensors=(first, *MANIFEST.tensors[1:])))


def test_dora_is_refused_where_the_engine_has_none() -> None:
    """Before step 0: with the run's first version, which every subscription is checked against."""
    needed = _with_layout(Layout.MAGNITUDE)
    request = subscription_request()
    message = r"layouts: the replica cannot serve DoRA .*; set the trainer.s merge to rollout or"
    with pytest.raises(Incompatible, match=message):
        check_request(request, base=BASE_MODEL, needed=needed)
    request.capabilities.layouts.extend(map(layout_to_proto, Layout))
    check_request(request, base=BASE_MODEL, needed=needed)


def test_an_expert_layout_that_the_engine_has_not_is_refused() -> None:
    request = subscription_request()
    request.capabilities.layouts.append(layout_to_proto(Layout.LORA_A))
    with pytest.raises(Incompatible, match=r"not take flat_A, lora_B; set lora\.expert_layout"):
        check_request(request, base=BASE_MODEL, needed=_with_layout(Layout.FLAT_A))
    request.capabilities.layouts.append(99)  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=r"capabilities\.layouts: 99 is no known layout"):
        _check(request)


def _merging(**merging: object) -> Request:
    """Of a replica without slots, whose every adapter is merged."""
    request = subscription_request()
    can = request.capabilities
    can.max_loras = can.max_rank = 0
    can.ClearField("target_modules")
    can.merge = adapter_pb2.MERGE_RULE_ROLLOUT
    given = {"target_modules": ["q_proj", "k_proj"], "layouts": map(layout_to_proto, Layout)}
    can.merging.CopyFrom(adapter_pb2.MergeCapabilities(**(given | merging)))  # type: ignore[arg-type]
    return request


ROLLOUT, NEVER = Rules(merge=Merge.ROLLOUT), Rules(merge=Merge.NEVER)


@pytest.mark.parametrize("rules", [Rules(), ROLLOUT])
def test_a_replica_that_merges_has_no_limit_of_rank_and_takes_dora(rules: Rules) -> None:
    """The rule that will apply is judged: the run's, or else the replica's own."""
    needed = replace(_with_layout(Layout.MAGNITUDE), rules=rules)
    check_request(_merging(), base=BASE_MODEL, needed=needed)
    can_both = subscription_request()
    can_both.capabilities.merging.CopyFrom(_merging().capabilities.merging)
    if rules.merge:
        check_request(can_both, base=BASE_MODEL, needed=needed)
    else:
        with pytest.raises(Incompatible, match=r"^capabilities.layouts: .* cannot serve DoRA"):
            check_request(can_both, base=BASE_MODEL, needed=needed)


UNFIT_RULES: dict[str, tuple[Request, Needed, str]] = {
    "cannot merge": (
        subscription_request(),
        Needed(MANIFEST, ROLLOUT),
        r"capabilities\.merging: the replica cannot sum .*; set the trainer's merge to never",
    ),
    "no slots": (
        _merging(),
        Needed(MANIFEST, NEVER),
        r"capabilities\.max_loras: 0, .* LoRA slots; set max_loras on the replica, or the trainer",
    ),
    "modules": (
        _merging(target_modules=["q_proj"]),
        Needed(MANIFEST),
        r"capabilities\.merging\.target_modules: the replica cannot adapt k_proj",
    ),
    "layouts": (
        _merging(layouts=[]),
        _with_layout(Layout.FLAT_A),
        r"capabilities\.merging\.layouts: the replica does not take flat_A; set lora",
    ),
    "dora": (
        _merging(layouts=[layout_to_proto(Layout.LORA_A), layout_to_proto(Layout.LORA_B)]),
        _with_layout(Layout.MAGNITUDE),
        r"capabilities\.merging\.layouts: the replica cannot serve DoRA",
    ),
    "several adapters": (
        _merging(),
        Needed(MANIFEST, adapters=frozenset({"default", "old"})),
        r"capabilities\.merge: .* serves one, the run publishes default, old; set the trainer's",
    ),
    "swap": (
        subscription_request(),
        Needed(MANIFEST, Rules(Swap.ABORT)),
        r'capabilities\.swap_rules: the run asks for swap = "abort", the replica knows finish; set',
    ),
    "swap of whole weights": (
        subscription_request(),
        Needed(MERGED, Rules(Swap.CONTINUE)),
        r'capabilities\.kinds.*; capabilities\.swap_rules: .* swap = "continue".*; .*dtypes',
    ),
}


@pytest.mark.parametrize("name", UNFIT_RULES)
def test_a_replica_that_cannot_follow_the_rules_is_refused(name: str) -> None:
    request, needed, expected = UNFIT_RULES[name]
    with pytest.raises(Incompatible, match=f"^{expected}"):
        check_request(request, base=BASE_MODEL, needed=needed)


def test_a_replica_that_wants_one_of_several_adapters_may_merge_it() -> None:
    request = _merging()
    request.adapters.append("old")
    needed = Needed(MANIFEST, adapters=frozenset({"default", "old"}))
    check_request(request, base=BASE_MODEL, needed=needed)


def test_a_replica_follows_the_rules_that_it_names() -> None:
    request = subscription_request()
    request.capabilities.swap_rules.extend(
        [adapter_pb2.SWAP_RULE_ABORT, adapter_pb2.SWAP_RULE_CONTINUE]
    )
    for swap in (None, Swap.ABORT, Swap.CONTINUE):
        check_request(request, base=BASE_MODEL, needed=Needed(MANIFEST, Rules(swap)))
    with pytest.raises(Incompatible, match='swap = "finish", the replica knows abort, continue;'):
        check_request(request, base=BASE_MODEL, needed=Needed(MANIFEST, Rules(Swap.FINISH)))
    request.capabilities.swap_rules.append(9)  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=r"capabilities\.swap_rules: 9; use finish, abort or"):
        _check(request)
    request = subscription_request()
    request.capabilities.merge = 9  # type: ignore[assignment]
    with pytest.raises(InvalidField, match=r"capabilities\.merge: 9; use never or rollout"):
        _check(request)
