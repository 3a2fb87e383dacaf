"""Writing weights into a swapped model, with exact accounting, and the `titan_skip` and `titan_dcp` load formats."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from titan_adapters.checkpoint import open_weights
from titan_adapters.errors import EngineError, StateDictError
from titan_adapters.state_dict import Session, StateDictAdapter, part_name
from titan_adapters.vllm.compat import forget_repacking, keeps_packed_copy
from titan_adapters.vllm.moe import ExpertShard
from titan_adapters.vllm.moves import Swap, write_one
from titan_adapters.vllm.plugin import POISON
from titan_adapters.vllm.readings import unwritten
from titan_adapters.vllm.weight_map import WeightMap

logger = init_logger("vllm.titan_adapters")


def poison(model: nn.Module) -> None:
    """Fill every parameter with NaN, so that an element that no load writes can't be mistaken for a weight."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))


class WeightWriter:
    """Converts incoming tensors to native ones and writes each through its parameter's own loader.

    Tensors stay views of what came in, of which a parameter's loader copies its rank's part, so that of a mapped file
    no more is read. What a row rearranges is moved to the device whole, and rearranged there. Experts are written one
    by one as they come. So one incoming tensor is held besides the model, or the parts of one joined row.

    During vLLM's reload (parameters are on meta then), an engine layer is written when all of its tensors are there:
    vLLM fills what a reload leaves out of a packed layer with whatever is in memory.

    Args:
        adapter: Table between incoming and native names.
        expected: Native names and tensors (meta) of the whole model, aliases left out.
        swap: Where the native parameters of this pipeline stage went. Gains what becomes of single experts.
        device: Where the model is.
        poisoned: The model is filled with NaN. The first load is refused if it leaves any.
    """

    def __init__(
        self,
        adapter: StateDictAdapter,
        expected: dict[str, Tensor],
        swap: Swap,
        device: torch.device,
        *,
        poisoned: bool = False,
    ):
        self._adapter = adapter
        self.required = adapter.required()
        """Names of the incoming tensors that a load needs."""
        self._device = device
        self.natives = expected
        """Those of all pipeline stages."""
        self._elsewhere = {name for name in expected if swap.is_elsewhere(name)}
        expected = {name: tensor for name, tensor in expected.items() if name not in self._elsewhere}
        self.weight_map = WeightMap(swap, dict(expected))
        self._in_parts: set[str] = set()
        for native, count in adapter.stacked().items():
            path, shard = swap.target(native)
            if native not in expected or not isinstance(shard, ExpertShard):
                continue
            self._in_parts.add(native)
            for index, part in zip(range(count), expected.pop(native), strict=True):
                swap.moved_parameters[part_name(native, index)] = path, replace(shard, expert=index)
                expected[part_name(native, index)] = part
        self._expected = expected
        self._swap = swap
        self._poisoned = poisoned
        self._session: Session | None = None
        self._layers = swap.by_module(expected)
        self._held: dict[str, dict[str, Tensor]] = {}
        self.unwritten = set(expected)
        """Native names that no load has written yet."""
        self.updates_only = False
        """True once an initial load is over or was skipped: calls may then bring any subset, in any chunks."""

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Write `weights`; returns the engine's names, relative to the model, of what was written.

        The first call must be complete. Later ones may be partial; halves of a packed row or layer may arrive in
        different calls.

        Raises:
            StateDictError: lists unexpected, repeated, misshapen and (at first) missing tensors.
            EngineError: outside a reload, where this platform can't change a loaded layer.
        """
        try:
            return self._write(weights)
        except BaseException:  # what a refused call left behind must not be mixed with the next call's weights
            self._session = None
            self._held.clear()
            raise

    def _write(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # Looked up anew each time: a reload swaps parameters for meta ones and back.
        state = dict(self._swap.model.state_dict(keep_vars=True))
        reloading = {  # biases never are on meta
            path: any(state[name].is_meta for name in {self._swap.target(native)[0] for native in layer})
            for path, layer in self._layers.items()
        }
        session = self._session or self._adapter.session("to_native", in_parts=self._in_parts)
        written: set[str] = set()
        for incoming, tensor in weights:
            if self._elsewhere.issuperset(session.contributes_to(incoming)):
                tensor = tensor.to("meta")  # accounted for like all others, but its data is never read
            elif session.rearranges(incoming):
                tensor = tensor.to(self._device)
            for native, converted in session.feed(incoming, tensor):
                if native in self._elsewhere:
                    continue
                wanted = self._expected[native].shape
                if converted.shape != wanted:
                    problem = f"{native} has shape {tuple(converted.shape)}, the model needs {tuple(wanted)}"
                    session.problems.append(problem)
                    continue
                path = self._swap.target(native)[0].rpartition(".")[0]
                self._held.setdefault(path, {})[native] = converted
                if not reloading[path] or len(self._held[path]) == len(self._layers[path]):
                    written |= self._write_held(path, state, reloading[path])
        partial = self.updates_only
        self._session = session if partial and session.pending else None
        if self._session is None or session.problems:
            session.finish(partial=partial)
        if not partial and self.unwritten:
            raise StateDictError(
                "The load left weights unwritten.", sorted(self.unwritten), fix="report this: the row table has a gap."
            )
        if self._poisoned and not partial and (left := unwritten(self)):
            raise EngineError(
                f"NaN is left of what additional_config[{POISON!r}] filled the model with.",
                left,
                fix="look for NaN in the checkpoint; if it has none, report this with your vLLM version.",
            )
        if not partial and (untouched := {self._swap.target(native)[0] for native in self._expected} - written):
            raise EngineError(
                "vLLM's loaders wrote nothing to some parameters.",
                sorted(untouched),
                fix="report this with your vLLM version.",
            )
        if self._held:
            waiting = sorted(native for layer in self._held.values() for native in layer)
            logger.warning("Not written until the rest of their layers comes: %s", ", ".join(waiting))
        self.updates_only = True
        return written

    def _write_held(self, path: str, state: dict[str, Tensor], reloading: bool) -> set[str]:
        """Write what is held for the engine's layer `path`, in a reload all of it; returns the engine's names."""
        written = set()
        if reloading:
            forget_repacking(self._swap.model.get_submodule(path))
        for native, tensor in self._held.pop(path).items():
            name, shard = self._swap.target(native)
            # A reload gives a tied head a tensor of its own for the time being, and repacks it only if it is loaded.
            alias = self._swap.aliases.get(name, name)
            for target in {id(state[n]): n for n in (alias, name)}.values():
                if not reloading:
                    self._check_changeable(target.rpartition(".")[0])
                if write_one(state[target], target, tensor, shard):
                    written.add(name)
            self.unwritten.discard(native)
        return written

    def _check_changeable(self, path: str) -> None:
        if keeps_packed_copy(self._swap.model.get_submodule(path)):
            raise EngineError(
                f"{path} holds its weights in another layout by now, which only a reload renews.",
                fix='update through collective_rpc("reload_weights", ...), which restores the layout.',
            )


def _writer_of(model: nn.Module) -> WeightWriter:
    writer = model.writer
    assert isinstance(writer, WeightWriter), f"{type(model).__name__} is not served by this library"
    return writer


class SkipLoader(BaseModelLoader):
    """`load_format="titan_skip"`: start without weights, for a live update to bring them.

    Parameters are NaN until then, so that serving too early can't be mistaken for an answer.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        poison(model)
        _writer_of(model).updates_only = True


class DcpLoader(BaseModelLoader):
    """`load_format="titan_dcp"`: weights from a folder of torch.distributed.checkpoint, one tensor at a time."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        _writer_of(model).write(self.get_all_weights(model_config, model))

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model in the folder; vLLM's `reload_weights` calls this too."""
        return open_weights(model_config.model).model_part(_writer_of(model).required).tensors()
