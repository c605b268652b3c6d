"""Who may join."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from refit.v1 import adapter_pb2

from common.errors import Incompatible, InvalidField, RefitError
from common.model_dir import BaseModel
from tests.adapters import make_adapter
from tests.subscriptions import subscription_request
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
