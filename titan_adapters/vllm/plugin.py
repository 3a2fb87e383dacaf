"""vLLM's entry point into this library, called in every process that vLLM starts (front end, engine, workers)."""

# Import from the modules that define these names: in vLLM's model-inspection subprocess `vllm` itself is only half
# initialised while plugins are loaded.
from titan_adapters.hf_config import ARCHITECTURE

CONFIG_FORMAT = "titan"
SKIP_FORMAT = "titan_skip"
DCP_FORMAT = "titan_dcp"
POISON = "titan_poison"
"""Key of vLLM's `additional_config`: True fills parameters with NaN before the first load, and refuses what is left."""


def register() -> None:
    """Tell vLLM about the wrapper, the config format and the load formats. Safe to call repeatedly."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER, register_config_parser

    from titan_adapters.vllm.config_parser import TitanConfigParser
    from titan_adapters.vllm.loader import DcpLoader, SkipLoader

    ModelRegistry.register_model(ARCHITECTURE, "titan_adapters.vllm.wrapper:TitanForCausalLM")
    if CONFIG_FORMAT not in _CONFIG_FORMAT_TO_CONFIG_PARSER:
        register_config_parser(CONFIG_FORMAT)(TitanConfigParser)
    for name, loader in ((SKIP_FORMAT, SkipLoader), (DCP_FORMAT, DcpLoader)):
        if name not in _LOAD_FORMAT_TO_MODEL_LOADER:
            register_model_loader(name)(loader)
