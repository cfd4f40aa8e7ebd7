"""Checks of `kv_transfer_params`: the role of the server, and the engines that it may connect to."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.kv_transfer import TransferSettings
from quire.data.kv_transfer import FIELD, RemotePrefix, missing_fields, remote_prefix, transfer_params
from quire.data.params import SamplingParams
from quire.errors import RequestError
from quire.frontend.checked_params import (
    Validator,
    check_maskable,
    check_no_routed_experts,
    processor_validators,
)
from quire.logs import get_logger, warn_once
from quire.system.kv_channel import is_peer

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TransferCheck:
    """Check of `kv_transfer_params` on a server that exchanges cached prefixes with other engines."""

    settings: TransferSettings
    root: Path
    """Folder in which the engines of this user on this machine are found."""

    def __call__(self, params: SamplingParams) -> None:
        """Raise a RequestError if this server lacks the requested role, or if the prefix is at an address
        that is not a peer: clients must not choose the addresses that this server connects to."""
        transfer = transfer_params(params.extra_args)
        if transfer is None:
            return
        settings = self.settings
        for name, is_set, has_role in (
            ("do_remote_decode", transfer.do_remote_decode, settings.produces),
            ("do_remote_prefill", transfer.do_remote_prefill, settings.consumes),
        ):
            if is_set and not has_role:
                raise RequestError(
                    f"{FIELD}: {name} is for another server: the kv_role of this one is {settings.role}",
                    param=FIELD,
                )
        if not transfer.do_remote_prefill:
            return
        prefix = remote_prefix(transfer)
        if prefix is None:
            missing = ", ".join(missing_fields(transfer))
            warn_once(log, f"{FIELD} with do_remote_prefill lacks {missing}: such prompts are computed here")
        elif not is_peer(settings, self.root, transfer.remote_engine_id or "", prefix):
            raise RequestError(
                f"{FIELD}: remote_host={prefix.host!r:.200} with remote_port={prefix.port} is not a peer of"
                " this server; its operator names them in peers of kv_connector_extra_config",
                param=FIELD,
            )

    def readable_prefix(self, value: Any) -> RemotePrefix | None:
        """Return the prefix that `kv_transfer_params` name, if this server may read it."""
        try:
            transfer = transfer_params({FIELD: value})
        except RequestError:
            return None
        prefix = None if transfer is None else remote_prefix(transfer)
        if transfer is None or prefix is None or not self.settings.consumes:
            return None
        is_known = is_peer(self.settings, self.root, transfer.remote_engine_id or "", prefix)
        return prefix if is_known else None


def readable_prefix(validators: Sequence[Validator], value: Any) -> RemotePrefix | None:
    """Return the prefix that the `kv_transfer_params` of a request name, if the server with these checks may
    read it."""
    checks = (check for check in validators if isinstance(check, TransferCheck))
    return next((check.readable_prefix(value) for check in checks), None)


def validators_of(config: EngineConfig) -> Sequence[Validator]:
    """Return the checks of sampling parameters: by custom logits processors, and for engine options."""
    validators = processor_validators(config.extensions.logits_processors)
    if not config.extensions.enable_return_routed_experts:
        validators.append(check_no_routed_experts)
    if config.extensions.return_sampling_mask:
        validators.append(check_maskable)
    settings = TransferSettings.of(config.cache.kv_transfer_config)
    if settings is not None:
        validators.append(TransferCheck(settings, Env.read(os.environ).cache_root))
    return validators
