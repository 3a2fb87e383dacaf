"""`config_format="titan"`: vLLM's config from a checkpoint folder that has no HF `config.json`."""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from titan_adapters.checkpoint import Identity, read_identity
from titan_adapters.errors import EngineError
from titan_adapters.hf_config import emit_hf_config
from titan_adapters.registry import import_path, unimportable_reason
from titan_adapters.vllm.compat import multiprocess_engine, platform_problems
from titan_adapters.vllm.honours import unhonoured
from titan_adapters.vllm.source import source_digest


class TitanConfigParser(ConfigParserBase):
    """Reads `titan.json` (or a published `config.json` of a registered family) and emits what vLLM needs.

    vLLM calls it in the front-end process only, twice; the result is pickled to the other processes.
    """

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PretrainedConfig]:
        """Emit the config of checkpoint folder `model`.

        Raises:
            EngineError: this platform can't run the model, or other processes could not import its class.
        """
        identity = read_identity(model)
        check_servable(identity)
        emitted = emit_hf_config(identity.model, identity.config, identity.names)
        # With the rest of the config, it keys vLLM's compile cache.
        emitted["titan"]["source"] = source_digest(identity.model)
        return emitted, as_hf_object(emitted)


def as_hf_object(emitted: dict[str, Any]) -> PretrainedConfig:
    """A plain PretrainedConfig: every process can unpickle it without our help."""
    config = PretrainedConfig(**emitted)
    object.__setattr__(config, "model_type", emitted["model_type"])  # a class attribute in transformers
    return config


def check_servable(identity: Identity) -> None:
    """Refuse what would fail later, with every reason at once."""
    problems = platform_problems(identity.config) + unhonoured(identity.config)
    fix = "use a platform or an attention backend that supports it."
    reason = unimportable_reason(identity.model)
    if reason and multiprocess_engine():
        problems.append(f"{import_path(identity.model)} can't be imported by vLLM's engine process: {reason}")
        fix = (
            "move the class to a module on PYTHONPATH and register it as 'pkg.module:Class', or set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 to run the engine in this process."
        )
    if problems:
        raise EngineError(f"vLLM can't serve {identity.model.model_type} here.", problems, fix=fix)
