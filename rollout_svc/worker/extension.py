"""Runs inside every vLLM worker: what `VllmEngine` asks of each by `collective_rpc`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed import get_pp_group, get_world_group
from vllm.lora.request import LoRARequest

from rollout_svc.engine import Mismatch, MismatchReason
from rollout_svc.worker import binding as worker_binding
from rollout_svc.worker import cpu_lora, orphans
from rollout_svc.worker import weights as worker_weights
from rollout_svc.worker.merge import Bound, Merger, merge_targets

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager


class Found(NamedTuple):
    """What a method answers: modules that took tensors, and tensors that none took."""

    modules: Collection[str] = ()
    mismatches: Iterable[Mismatch] = ()
    digest: str = ""


class RefitWorkerExtension:
    """Mixed into vLLM's worker. Methods that load or check answer a `BoundReport` as a dict."""

    model_runner: Any
    _merger: Merger | None = None

    def refit_prepare(self, replica_pid: int) -> list[str]:
        """Mend LoRA on a CPU, then name the projections that take an adapter, as PEFT does."""
        orphans.end_with(replica_pid)
        manager = self._refit_manager()
        if manager is None:
            return []
        cpu_lora.install(manager)
        return worker_binding.adapted_projections(manager)

    def refit_load(self, adapter_id: int, name: str, path: str, in_place: bool) -> dict[str, Any]:
        """Load where every tensor has a place here or may have one in another pipeline stage."""

        def load() -> Found:
            manager = self._refit_manager()
            if manager is None:
                raise ValueError("the engine has no LoRA slots")
            bound = worker_binding.bind(manager, Path(path))
            if not all(map(_may_be_elsewhere, bound.mismatches)):
                return Found(bound.modules, bound.mismatches)
            # Not kept: vLLM reads the directory of such a request again at each step (vllm#33791).
            request = LoRARequest(name, adapter_id, path, load_inplace=in_place)
            self.model_runner.add_lora(request)
            missing = worker_binding.left_out(bound, manager.get_adapter(adapter_id))
            # Decoding waits for this, and a single rank has nobody to disagree with.
            alone = get_world_group().world_size == 1
            digest = "" if alone else worker_binding.digest_of(Path(path))
            return Found(bound.modules, [*bound.mismatches, *missing], digest)

        return _reported(load)

    def refit_check_weights(self, path: str) -> dict[str, Any]:
        """Whether every tensor of a staged model has a parameter here, and the reverse."""

        def check() -> Found:
            filled, unbound, empty = worker_weights.find_places(
                self.model_runner.get_model(), Path(path)
            )
            if empty:
                raise ValueError(f"no tensor fills {len(empty)} parameters, as {empty[0]}")
            return Found(filled, [Mismatch(name, MismatchReason.NO_MODULE) for name in unbound])

        return _reported(check)

    def refit_load_weights(self, path: str) -> dict[str, Any]:
        """Load a staged model in the place of the engine's own weights."""

        def load() -> Found:
            worker_weights.load(self.model_runner, Path(path))
            self._refit_merger().forget()
            return Found()

        return _reported(load)

    def refit_merge_targets(self) -> list[str]:
        """The projections that an adapter can be summed into, as PEFT names them."""
        return merge_targets(self.model_runner.get_model())

    def refit_check_merge(self, path: str, base: str) -> dict[str, Any]:
        """Whether every factor of a staged adapter has a weight here."""
        merger = self._refit_merger()
        return _reported(lambda: _found(merger.check(Path(path), base=Path(base))))

    def refit_merge(self, path: str, base: str) -> dict[str, Any]:
        """Sum a staged adapter into the weights, or with an empty path none."""
        merger, adapter = self._refit_merger(), Path(path) if path else None
        return _reported(lambda: _found(merger.merge(adapter, base=Path(base))))

    def _refit_merger(self) -> Merger:
        if self._merger is None:
            self._merger = Merger(self.model_runner)
        return self._merger

    def _refit_manager(self) -> LoRAModelManager | None:
        """None in an engine without LoRA slots."""
        workers = getattr(self.model_runner, "lora_manager", None)
        return workers._adapter_manager if workers is not None else None


def _found(bound: Bound) -> Found:
    return Found(bound.modules, bound.mismatches, bound.digest)


def _may_be_elsewhere(mismatch: Mismatch) -> bool:
    return mismatch.reason is MismatchReason.NO_MODULE and get_pp_group().world_size > 1


def _reported(work: Callable[[], Found]) -> dict[str, Any]:
    """What `work` found.

    A rank that raises leaves the other ranks' answers in the executor's queues, and every later
    call would read the answer to an earlier one; so an error is an answer too.
    """
    found, error_line = Found(), ""
    try:
        found = work()
    except Exception as error:  # noqa: BLE001
        error_line = f"{type(error).__name__}: {error}"
    return {
        "stage": get_pp_group().rank_in_group,
        "bound_modules": len(found.modules),
        "mismatches": [(m.tensor, m.reason.name, m.detail) for m in found.mismatches],
        "error": error_line,
        "digest": found.digest,
    }
