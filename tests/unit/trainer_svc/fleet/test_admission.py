"""Who may join."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from refit.v1 import adapter_pb2, tensor_pb2

from common.adapter import Kind, Layout, Manifest
from common.errors import Incompatible, InvalidField, RefitError
from common.model_dir import BaseModel
from common.wire import layout_to_proto
from tests.adapters import make_adapter
from tests.subscriptions import subscription_request
from tests.whole_weights import make_weights
from trainer_svc.fleet.admission import check_request

Request = adapter_pb2.AdapterUpdateRequest
MANIFEST, _ = make_adapter()

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
    check_request(request, base=BaseModel("m", "base"), needed=MANIFEST)


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

    with pytest.raises(Incompatible) as caught:
        _check(request)
    for field in ("base_model", "max_rank", "target_modules", "dtypes"):
        assert field in str(caught.value)


KINDS = [adapter_pb2.ADAPTER_KIND_MERGED, adapter_pb2.ADAPTER_KIND_BASE]
MERGED = make_weights(kind=Kind.MERGED).manifest
BASE_MODEL = BaseModel("m", "base")


def test_a_merged_run_needs_neither_rank_nor_modules() -> None:
    request = subscription_request()
    request.capabilities.max_rank = 0
    request.capabilities.ClearField("target_modules")
    request.capabilities.dtypes.append(tensor_pb2.DTYPE_BFLOAT16)
    request.capabilities.kinds.extend(KINDS)
    check_request(request, base=BASE_MODEL, needed=MERGED)


def test_a_kind_that_a_replica_cannot_take_is_refused_before_step_0() -> None:
    """Without kinds a replica takes adapters alone."""
    with pytest.raises(Incompatible, match="kinds: the replica takes LORA, the run publishes MERG"):
        check_request(subscription_request(), base=BASE_MODEL, needed=MERGED)
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
    check_request(request, base=BASE_MODEL, needed=MANIFEST, sends_base=True)
    request.base_model.fingerprint = "g"
    with pytest.raises(Incompatible, match="load the same model on both"):
        check_request(request, base=BASE_MODEL, needed=MANIFEST, sends_base=True)


def _with_layout(layout: Layout) -> Manifest:
    first = replace(MANIFEST.tensors[0], layout=layout)
    return replace(MANIFEST, tensors=(first, *MANIFEST.tensors[1:]))


def test_dora_is_refused_where_the_engine_has_none() -> None:
    """Before step 0: with the run's first version, which every subscription is checked against."""
    needed = _with_layout(Layout.MAGNITUDE)
    request = subscription_request()
    message = r'cannot serve DoRA adapters.*\(lora.type = "dora"\); set merge = "trainer"'
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
