"""Starting weights of a parallel model."""

import torch

from titan_adapters.checkpoint.sharded import materialised, own_class, write_part
from titan_adapters.contract import BaseTransformer
from titan_adapters.state_dict import native_tensors


def init_weights(model: BaseTransformer, seed: int) -> None:
    """Give a parallel model the weights with which its class starts in one process after `torch.manual_seed(seed)`.

    A model on the meta device is materialised. Every rank builds the whole model once in host memory and takes its
    part, so that the start does not depend on how the model is split. The random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        whole = native_tensors(own_class(model)(model.config))
    targets = materialised(model)
    for name, tensor in whole.items():
        write_part(targets[name], tensor.to(targets[name].device))
