"""Messages between ranks of a group: a length, which is checked, then the bytes. None is counted as traffic.

A group of None is the default group; without torch.distributed, this process alone.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megazero.engine.mesh.mesh import Mesh

END = -1  # in place of a length: there is no further message
MOST_BYTES = 4 << 30

Group = dist.ProcessGroup | None


def rank_of(group: Group) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(group: Group) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def start_send(message: torch.Tensor | None, to: int, group: Group) -> list[dist.Work]:
    """Start to send a message, uint8 [n], to a rank of the group; None: `receive` returns None there."""
    parts = [torch.tensor([END])] if message is None else [torch.tensor([len(message)]), message]
    works = [dist.isend(part, group_dst=to, group=group) for part in parts if len(part)]
    return [work for work in works if work is not None]  # None: this rank is outside the group


def receive(source: int, group: Group) -> torch.Tensor | None:
    """Return the next message of a rank of the group. RuntimeError if it announces an impossible length."""
    dist.recv(length := torch.tensor([0]), group_src=source, group=group)
    if length == END:
        return None
    if len(message := _buffer(length)):
        dist.recv(message, group_src=source, group=group)
    return message


def _buffer(length: torch.Tensor) -> torch.Tensor:
    if not 0 <= length <= MOST_BYTES:
        raise RuntimeError(f"a rank announces a message of {int(length)} bytes; at most {MOST_BYTES} are allowed")
    return torch.empty(int(length), dtype=torch.uint8)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _send(data: bytes, to: int, group: Group) -> None:
    for work in start_send(tensor_of(data), to, group):
        work.wait()


def _receive_bytes(source: int, group: Group) -> bytes:
    message = receive(source, group)
    assert message is not None, source
    return bytes(message.numpy().tobytes())


def gather_bytes(data: bytes, group: Group) -> Iterator[bytes]:
    """Yield every rank's `data` on rank 0, in order of rank; nothing on the others. Iterate to the end."""
    if rank_of(group) > 0:
        _send(data, 0, group)
        return
    yield data
    for rank in range(1, size_of(group)):
        yield _receive_bytes(rank, group)


def gather_over_mesh(data: bytes, mesh: Mesh) -> Iterator[bytes]:
    """Yield as `gather_bytes`, over all ranks of a mesh. PeerLost if one of them fails."""
    with mesh.world.peer_errors("gathering bytes on rank 0"):
        yield from gather_bytes(data, mesh.host.group)


def wait_for_all(mesh: Mesh) -> None:
    """Wait until every rank of a mesh calls this. PeerLost if one of them fails."""
    if mesh.host.group is not None:
        with mesh.world.peer_errors("barrier over all ranks"):
            dist.barrier(mesh.host.group)


def scatter_bytes(parts: Sequence[bytes], group: Group) -> bytes:
    """Return this rank's item of a list that rank 0 has."""
    if rank_of(group) > 0:
        return _receive_bytes(0, group)
    for rank in range(1, size_of(group)):
        _send(parts[rank], rank, group)
    return parts[0]


def broadcast_bytes(data: bytes, source: int, group: Group) -> bytes:
    """Return the `data` of rank `source`."""
    if not dist.is_initialized():
        return data
    dist.broadcast(length := torch.tensor([len(data)]), group_src=source, group=group)
    message = tensor_of(data) if rank_of(group) == source else _buffer(length)
    dist.broadcast(message, group_src=source, group=group)
    return message.numpy().tobytes()
