"""The cluster token: the secret that the processes of a deployment share, and where it is kept."""

import hmac
import ipaddress
import os
import secrets
import stat
from pathlib import Path

from quire.config.env import Env
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

log = get_logger(__name__)

VARIABLE = "QUIRE_CLUSTER_TOKEN"
FILE_NAME = "cluster_token"


def new_token() -> str:
    """Return a random token, for processes that this process starts itself."""
    return secrets.token_hex()


def cluster_token(env: Env, host: str) -> str:
    """Return the token of a deployment; its processes are started by separate commands and connect to `host`.

    The token comes from the environment. Without one, commands of one user on one machine share a file that
    only this user can read. Machines without a token accept every peer, which is logged as a warning.
    """
    if env.cluster_token:
        return env.cluster_token
    if _is_loopback(host):
        return _token_of_user(env.cache_root / FILE_NAME)
    warn_once(
        log,
        f"{VARIABLE} is not set: any host that reaches the ports of this deployment at {host} can join it and"
        " read prompts; set it to the same secret on every machine, or keep these ports private",
    )
    return ""


def is_same(token: str, other: str) -> bool:
    """Compare two tokens in a time that does not depend on where they differ."""
    return hmac.compare_digest(token.encode(), other.encode())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _token_of_user(file: Path) -> str:
    """Return the token in this user's file, creating the file if needed; of several processes that create
    it, the first wins."""
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_name(f"{FILE_NAME}.{os.getpid()}.{secrets.token_hex(4)}")
            try:
                with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as made:
                    made.write(new_token())
                os.link(unfinished, file)
            except FileExistsError:
                log.debug("Another process has created the cluster token file %s", file)
            finally:
                unfinished.unlink(missing_ok=True)
        return _read_private(file)
    except OSError as error:
        raise ConfigError(
            f"the token that this user's processes share cannot be kept in {file} ({error.strerror}): set"
            f" {VARIABLE} to the same secret for all of them, or QUIRE_CACHE_ROOT to a folder of yours"
        ) from None


def _read_private(file: Path) -> str:
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW)) as kept:
        status = os.fstat(kept.fileno())
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"{file} can be read by other users: run `chmod 600` on it, or remove it")
        token = kept.read().strip()
    if not token:
        raise ConfigError(f"{file} is empty: remove it, and a new token is created")
    return token
