"""The secret that the nodes of an elastic run share, and values of their store that it signs.

Note [Strangers]
Whoever reaches the port of a TCPStore can read, list, write and delete its keys: torch has no password, and a secret
name of a key is none. So the agents' values carry a MAC, which is checked before a value is unpickled or believed. One
without it counts as missing. A stranger can still disturb a run, as by replaying an older value.
"""

import base64
import hashlib
import hmac
import os
import secrets
import stat
import time
from pathlib import Path

import torch.distributed as dist

VARIABLE = "ELASTIC_SECRET"
FILE = "elastic.key"  # in the --save folder
LENGTH = 32  # bytes of a drawn secret
READ_SECONDS = 20.0  # in which another node writes the file that it has made


class Seal:
    """Signs the values of one store."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def close(self, key: str, value: bytes) -> str:
        """Return the value as text, with its MAC."""
        return f"{self._mac(key, value)} {base64.b64encode(value).decode()}"

    def open(self, key: str, text: bytes) -> bytes | None:
        """Return the value of a text; None if no node of this run has written it under this key."""
        mac, _, value = text.partition(b" ")
        try:
            found = base64.b64decode(value, validate=True)
        except ValueError:
            return None
        return found if hmac.compare_digest(mac, self._mac(key, found).encode()) else None

    def read(self, store: dist.Store, key: str) -> bytes | None:
        """Return the value of a key of the store; None if no node of this run has set it."""
        return self.open(key, store.get(key)) if store.check([key]) else None

    def _mac(self, key: str, value: bytes) -> str:
        return hmac.new(self.secret.encode(), key.encode() + b"\0" + value, hashlib.sha256).hexdigest()


def draw_secret() -> str:
    return secrets.token_hex(LENGTH)


def shared_secret(save: str) -> str:
    """Return the secret of a run: ELASTIC_SECRET, or the content of a file in --save, which the first node makes.

    Raises:
        ValueError: there is no --save folder, or the file is not for this user alone.
        OSError: the file cannot be made or read.
    """
    if given := os.environ.get(VARIABLE):
        return given
    if not save:
        raise ValueError(f"--elastic needs --save DIR, a folder that all nodes share, or {VARIABLE} in the environment")
    path = Path(save) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(handle, "w") as file:
            file.write(draw_secret())
    except FileExistsError:
        pass
    until = time.monotonic() + READ_SECONDS
    while len(found := _read(path)) < 2 * LENGTH:
        if time.monotonic() > until:
            raise ValueError(
                f"{path} has {len(found)} of {2 * LENGTH} characters; delete it, and start all nodes again"
            )
        time.sleep(0.1)
    return found


def _read(path: Path) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, encoding="ascii", errors="replace") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ValueError(
                f"{path} is not a file that its owner alone can read, and you own: delete it, or give all nodes the "
                f"same {VARIABLE} in the environment"
            )
        return file.read(2 * LENGTH)
