"""Methods that vLLM's workers get from us (`worker_extension_cls`), callable by name through `collective_rpc`."""

from typing import TYPE_CHECKING

from titan_adapters.vllm.recorder import RoutingRecorder
from titan_adapters.vllm.stage_recorder import StageRecorder, Steps

if TYPE_CHECKING:
    from titan_adapters.vllm.readings import RankReport

EXTENSION = "titan_adapters.vllm.worker.TitanWorker"


class TitanWorker:
    """Mixed into vLLM's worker class in every worker process."""

    titan_recorder: RoutingRecorder
    titan_stage_recorder: StageRecorder

    def titan_warm_up(self) -> None:
        """Run once on a dummy token, if vLLM has not.

        Eager on the CPU with a KV cache of a given size, vLLM skips its own such run, in which a later pipeline stage
        allocates what it receives.
        """
        from vllm.distributed import get_pp_group
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        runner = self.model_runner  # type: ignore[attr-defined]
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner._dummy_run(1)  # allocates for as many as a step may have

    def titan_look(self, folder: str) -> dict[str, str]:
        """What this process sees, for `titan-adapters doctor`; and what was chosen for the model that runs here."""
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        from titan_adapters.doctor.view import look

        config = self.vllm_config  # type: ignore[attr-defined]
        layers = config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers if isinstance(layer, AttentionLayerBase)}
        served = {
            "served dtype": str(config.model_config.dtype),
            "served max_model_len": str(config.model_config.max_model_len),
            "attention backend": ", ".join(sorted(backends)),
        }
        return look(folder) | served

    def titan_start_recording(self) -> list[str]:
        """Record routings from the next step on. Returns what keeps it from doing so, instead of raising far away."""
        self.titan_recorder = RoutingRecorder(self.model_runner)  # type: ignore[attr-defined]
        return self.titan_recorder.start()

    def titan_stop_recording(self) -> dict[str, dict[int, dict[int, list[int]]]]:
        """Stop, and return request id -> layer -> position -> experts."""
        return self.titan_recorder.stop()

    def titan_read_weights(self) -> "list[RankReport]":
        """What this rank says about its weights; under torchrun, where a rank has its own front end, what all say."""
        import torch.distributed as dist
        from vllm.distributed import get_world_group

        from titan_adapters.vllm.readings import read_weights

        group = get_world_group()
        writer = self.model_runner.get_model().writer  # type: ignore[attr-defined]
        report = read_weights(writer, group.rank_in_group)
        if self.parallel_config.distributed_executor_backend != "external_launcher":  # type: ignore[attr-defined]
            return [report]
        reports: list[RankReport] = [report] * group.world_size
        dist.all_gather_object(reports, report, group=group.cpu_group)
        return reports

    def titan_start_stages(self, layers: list[int] | None) -> list[str]:
        """Record what the stages of these layers, or of all, get and give from the next step on. Returns as above."""
        self.titan_stage_recorder = StageRecorder(self.model_runner, layers)  # type: ignore[attr-defined]
        return self.titan_stage_recorder.start()

    def titan_stop_stages(self, folder: str) -> tuple[str, Steps]:
        """Stop, and return the file in `folder` with this worker's tensors, and whose they are."""
        return self.titan_stage_recorder.stop(folder)
