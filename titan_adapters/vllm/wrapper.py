"""The one wrapper that serves every compliant model. It calls the model's own methods and knows no model family."""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from titan_adapters.checkpoint import Identity, adapter_for
from titan_adapters.checkpoint.api import open_checked
from titan_adapters.config import TransformerConfig
from titan_adapters.contract import meta_model
from titan_adapters.errors import EngineError
from titan_adapters.fingerprints import dtype_name
from titan_adapters.nn import SequenceInfo
from titan_adapters.registry import find_model, import_path
from titan_adapters.state_dict import StateDictAdapter, native_tensors
from titan_adapters.vllm.honours import unpageable
from titan_adapters.vllm.loader import WeightWriter, poison
from titan_adapters.vllm.parallel import Parallel, check_parallel
from titan_adapters.vllm.passes import add_passes
from titan_adapters.vllm.plugin import DCP_FORMAT, POISON
from titan_adapters.vllm.stage import this_stage
from titan_adapters.vllm.swap import swap_modules

logger = init_logger("vllm.titan_adapters")

HIDDEN_STATES = "hidden_states"
"""Name of what passes between pipeline stages."""


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "intermediate_tensors": 0, "inputs_embeds": 0})
class TitanBackbone(nn.Module):
    """Everything up to the final norm: the part that vLLM compiles and captures."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        identity = identity_of(vllm_config)
        refuse_unsupported(vllm_config, identity.config)
        add_passes(vllm_config)
        check_parallel(identity.model, identity.config, Parallel.from_vllm(vllm_config))
        if problems := unpageable(identity.config, vllm_config.cache_config.block_size):
            fix = "pass a block_size that divides every chunk; on the CPU it must be a multiple of 32."
            raise EngineError(f"vLLM's KV cache does not suit {identity.model.model_type}.", problems, fix=fix)
        self.model = meta_model(identity.model, identity.config)
        expected = native_tensors(self.model)
        adapter = adapter_for(self.model, identity.names)
        check_folder(vllm_config, identity.config, adapter, expected)
        device = torch.get_default_device()
        self.stage = this_stage(identity.config.num_layers)
        swap = swap_modules(self.model, self.stage, vllm_config, f"{prefix}." if prefix else "", device)
        options = vllm_config.additional_config
        poisoned = isinstance(options, dict) and bool(options.get(POISON, False))
        if poisoned:
            poison(self.model)
        self.writer = WeightWriter(adapter, expected, swap, device, poisoned=poisoned)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        if not self.stage.is_first:
            assert intermediate_tensors is not None, "vLLM passes them to all stages but the first"
            x = intermediate_tensors[HIDDEN_STATES]
        elif inputs_embeds is None:
            assert input_ids is not None, "vLLM passes one of the two"
            x = self.model.embed(input_ids)
        else:
            x = inputs_embeds
        x = self.model.run_layers(x, SequenceInfo(positions, None), self.stage.start, self.stage.stop)
        if not self.stage.is_last:
            return IntermediateTensors({HIDDEN_STATES: x})
        return self.model.norm(x)


class TitanForCausalLM(nn.Module):
    """vLLM's model interface over a `BaseTransformer` named by the emitted config."""

    supports_pp: ClassVar[Literal[True]] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.backbone = TitanBackbone(vllm_config=vllm_config, prefix=prefix)

    @property
    def writer(self) -> WeightWriter:
        return self.backbone.writer

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """What a stage receives from the one before: the residual stream."""
        x = torch.zeros((batch_size, self.backbone.model.config.dim), dtype=dtype, device=device)
        return IntermediateTensors({HIDDEN_STATES: x})

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.backbone.model.embed(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        return self.backbone(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.backbone.model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Write checkpoint tensors; returns the names of the parameters that were written."""
        return {f"backbone.model.{name}" for name in self.writer.write(weights)}


def identity_of(vllm_config: VllmConfig) -> Identity:
    """Rebuild the model's identity from the emitted config, in whatever process this is.

    The name is looked up in this process's registry. The import path in the config is only compared with the result:
    a config that came from a downloaded folder must not choose code.
    """
    hf_config = vllm_config.model_config.hf_config
    titan = getattr(hf_config, "titan", None)
    if titan is None:
        raise EngineError(
            "The config does not say which model to build.", fix="start the engine with config_format='titan'."
        )
    cls = find_model(titan["model"])
    if import_path(cls) != titan["class"]:
        raise EngineError(
            f"The front end resolved {titan['model']!r} to {titan['class']}, this process to {import_path(cls)}.",
            fix="let all processes see the same registrations: an entry point, or TITAN_ADAPTERS_MODELS.",
        )
    config = cls.Config.from_json(titan["config"])
    if config.fingerprint() != titan["fingerprint"]:
        raise EngineError(
            f"{import_path(cls)} computes other specs in this process than in the front end.",
            fix="install the same version of the model's package everywhere.",
        )
    served = dtype_name(vllm_config.model_config.dtype)
    if served != config.dtype:
        logger.warning("The checkpoint's dtype is %s; serving in %s, as resolved by vLLM.", config.dtype, served)
    return Identity(cls, config, titan["names"])


def refuse_unsupported(vllm_config: VllmConfig, config: TransformerConfig) -> None:
    """What vLLM would accept, but nobody has tested here, or was seen to be wrong."""
    if vllm_config.quant_config is not None:
        raise EngineError("The engine was asked for what is not supported yet.", ["quantization"], fix="leave it out.")
    backend = vllm_config.attention_config.backend
    if (
        current_platform.is_cuda()
        and vllm_config.parallel_config.pipeline_parallel_size > 1
        and vllm_config.model_config.dtype in (torch.bfloat16, torch.float16)
        and any(spec.sinks for spec in config.attention_specs())
        and (backend is None or backend.name != "TRITON_ATTN")
    ):
        # vLLM 0.26 on H200, gpt_oss with a layer per stage: 0.17 off in bf16, right in fp32, which Triton computes.
        raise EngineError(
            "Attention sinks over pipeline stages, in 16 bits, gave wrong results on a GPU.",
            fix='use tensor_parallel_size instead, or attention_backend="TRITON_ATTN".',
        )


def check_folder(
    vllm_config: VllmConfig, config: TransformerConfig, adapter: StateDictAdapter, expected: dict[str, Tensor]
) -> None:
    """Compare a weights folder with the model from headers, before any memory is taken for either."""
    if vllm_config.load_config.load_format in ("auto", "hf", "safetensors", DCP_FORMAT):
        open_checked(vllm_config.model_config.model, config, adapter, expected)
