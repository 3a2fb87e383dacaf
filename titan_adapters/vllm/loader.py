"""Writing weights into a swapped model, with exact accounting, and the `titan_skip` load format."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from titan_adapters.errors import StateDictError
from titan_adapters.state_dict import Session, StateDictAdapter
from titan_adapters.vllm.layers import Swap


class WeightWriter:
    """Converts incoming tensors to native ones and writes each through its parameter's own loader.

    Args:
        adapter: Table between incoming and native names.
        expected: Native names and tensors (meta), aliases left out.
        swap: Where native parameters went.
    """

    def __init__(self, adapter: StateDictAdapter, expected: dict[str, Tensor], swap: Swap):
        self._adapter = adapter
        self._expected = expected
        self._swap = swap
        self._session: Session | None = None
        self.unwritten = set(expected)
        """Native names that no load has written yet."""
        self.updates_only = False
        """True once an initial load is over or was skipped: calls may then bring any subset, in any chunks."""

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Write `weights`; returns the engine's names, relative to the model, of what was written.

        The first call must be complete. Later ones may be partial; halves of a packed row may arrive in different
        calls.

        Raises:
            StateDictError: lists unexpected, repeated, misshapen and (at first) missing tensors.
        """
        # Looked up anew each time: a reload swaps parameters for meta ones and back.
        state = dict(self._swap.model.state_dict(keep_vars=True))
        session = self._session or self._adapter.session("to_native")
        written: set[str] = set()
        for incoming, tensor in weights:
            for native, converted in session.feed(incoming, tensor):
                wanted = self._expected[native].shape
                if converted.shape != wanted:
                    problem = f"{native} has shape {tuple(converted.shape)}, the model needs {tuple(wanted)}"
                    session.problems.append(problem)
                    continue
                name, shard = self._swap.target(native)
                _write_one(state[name], converted, shard)
                self.unwritten.discard(native)
                written.add(name)
        partial = self.updates_only
        self._session = session if partial and session.pending else None
        if self._session is None or session.problems:
            self._session = None
            session.finish(partial=partial)
        if not partial and self.unwritten:
            raise StateDictError(
                "The load left weights unwritten.", sorted(self.unwritten), fix="report this: the row table has a gap."
            )
        self.updates_only = True
        return written


def _write_one(parameter: Tensor, tensor: Tensor, shard: str | int | None) -> None:
    loader: Callable[..., None] = getattr(parameter, "weight_loader", default_weight_loader)
    if shard is None:
        loader(parameter, tensor)
    else:
        loader(parameter, tensor, shard)


class SkipLoader(BaseModelLoader):
    """`load_format="titan_skip"`: start without weights, for a live update to bring them.

    Parameters are NaN until then, so that serving too early can't be mistaken for an answer.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.fill_(float("nan"))
        writer = model.writer
        assert isinstance(writer, WeightWriter), f"{type(model).__name__} is not served by this library"
        writer.updates_only = True
