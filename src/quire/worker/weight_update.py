"""Weight updates of a worker: begun, staged by any number of transfers, then applied at once or dropped."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from quire.config.extensions import TRANSFER_BACKENDS
from quire.config.load import FIXED_WEIGHTS
from quire.errors import RequestError
from quire.loader.update import LayerTwins, StagedUpdate, TensorInfo, fixed_reason
from quire.logs import get_logger
from quire.worker.weight_transfer import WeightTransport

log = get_logger(__name__)


class WeightUpdater:
    """The weight updates of one worker. Steps use the old weights until `commit`."""

    def __init__(self, model: nn.Module, twins: LayerTwins | None, transport: WeightTransport | None) -> None:
        """Build the updater of a worker. `twins` are copies of the layers before loading; None if weights
        cannot be updated. `transport` is None if no trainer is configured."""
        self._model, self._twins, self._transport = model, twins, transport
        self._staged: StagedUpdate | None = None

    def connect(self, info: Mapping[str, Any]) -> None:
        """Set up the transport by the `init_info` of the trainer."""
        self._find_transport().connect(info)

    def _find_transport(self) -> WeightTransport:
        if self._transport is None:
            raise RequestError(
                'Weight transfer not configured: set --weight-transfer-config to {"backend": ...}; known:'
                f" {', '.join(TRANSFER_BACKENDS)}"
            )
        return self._transport

    def start(self) -> None:
        transport = self._find_transport()
        if self._staged is not None:
            raise RequestError("a weight update has been started already: finish it first")
        self._staged = self._new_update()
        transport.start()

    def _new_update(self) -> StagedUpdate:
        if self._twins is None:
            raise RequestError(FIXED_WEIGHTS)
        if reason := fixed_reason(self._model):
            raise RequestError(reason)
        return StagedUpdate(self._twins)

    def receive(self, info: Mapping[str, Any]) -> int:
        """Receive and stage the tensors of an `update_info`; return their number. Tensors of an update that
        is refused are received, too, if the trainer waits for that."""
        transport, staged = self._find_transport(), self._staged
        tensors = transport.describe(info)
        arriving = transport.receive(info, tensors)
        try:
            if staged is None:
                raise RequestError("no weight update has been started: call start_weight_update")
            staged.check(tensors)
            for tensor_info, tensor in zip(tensors, arriving, strict=True):
                _stage(staged, tensor_info, tensor)
        except RequestError:
            transport.drain(arriving)
            raise
        return len(tensors)

    def prepare(self) -> None:
        """Complete the staged layers; after that `commit` cannot fail."""
        if self._staged is None:
            raise RequestError("no weight update has been started: call start_weight_update")
        self._find_transport().finish()
        self._staged.close()

    def commit(self) -> int:
        """Apply the staged weights; return the number of changed layers."""
        assert self._staged is not None, "prepare() comes first"
        staged, self._staged = self._staged, None
        return staged.commit()

    def abort(self) -> None:
        self._staged = None

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Change weights at once, for functions and extensions of workers; return their names. If a
        tensor does not fit, no weight is changed."""
        staged, names = self._new_update(), set[str]()
        for name, tensor in weights:
            info = TensorInfo(name, tensor.dtype, tuple(tensor.shape))
            staged.check([info])
            _stage(staged, info, tensor)
            names.add(name)
        staged.close()
        staged.commit()
        return names


def _stage(staged: StagedUpdate, info: TensorInfo, tensor: Tensor) -> None:
    if tensor.dtype != info.dtype or tuple(tensor.shape) != info.shape:
        raise RequestError(
            f"{info.name} was announced as {info.dtype} {info.shape}, and came as {tensor.dtype}"
            f" {tuple(tensor.shape)}"
        )
    staged.put(info.name, tensor)
