"""Whether the stock architecture of a published config has a place for exactly the tensors that our rows write."""

import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer, meta_model
from titan_adapters.state_dict import native_tensors

logger = logging.getLogger(__name__)


def stock_problems(model: type[BaseTransformer], config: TransformerConfig, hf_config: dict[str, Any]) -> list[str]:
    """Names, shapes and ties in which the two differ. Both are built on the meta device, so no weight is read.

    If transformers or its copy of the architecture is not there, that is logged, and nothing is compared.
    """
    unchecked = "The exported tensors were not compared with the stock architecture: %s."
    if importlib.util.find_spec("transformers") is None:
        logger.warning(unchecked, "transformers is not installed")
        return []
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if hf_config["model_type"] not in CONFIG_MAPPING:
        logger.warning(unchecked, f"the installed transformers has no {hf_config['model_type']}")
        return []
    try:
        architecture, theirs = _stock_tensors(hf_config)
    except Exception as error:  # its constructors raise whatever they like, and all of it means the same
        return [f"transformers can't build it: {' '.join(str(error).split())}"]
    ours = model.state_dict_adapter(config).to_hf(native_tensors(meta_model(model, config)))
    problems = []
    if architecture not in hf_config["architectures"]:
        problems.append(f"architectures is {hf_config['architectures']}, transformers builds {architecture}")
    written: dict[int, str] = {}
    for name, tensor in ours.items():
        shape = tuple(tensor.shape)
        if name not in theirs:
            problems.append(f"it has no {name} {shape}")
        elif theirs[name].shape != tensor.shape:
            problems.append(f"its {name} has shape {tuple(theirs[name].shape)}, ours {shape}")
        elif written.setdefault(id(theirs[name]), name) != name:
            problems.append(f"it ties {name} to {written[id(theirs[name])]}, which are two tensors here")
    return problems + [
        f"it needs {name} {tuple(tensor.shape)}, which this model does not have"
        for name, tensor in theirs.items()
        if name not in ours and id(tensor) not in written
    ]


def _stock_tensors(hf_config: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Name of the class that transformers builds, and its tensors by their names in files; tied ones are one object."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config))
    tensors = stock.state_dict(keep_vars=True)
    try:
        # v5 renames and stacks tensors as it loads them (experts, for example); this is how it saves them.
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # v4 does nothing of the kind
        return type(stock).__name__, tensors
    return type(stock).__name__, revert_weight_conversion(stock, tensors)
