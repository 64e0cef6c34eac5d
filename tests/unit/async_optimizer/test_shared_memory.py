"""Which tensors have memory in common."""

from __future__ import annotations

import torch

from accel_scaler.async_optimizer.shared_memory import are_tied, overlapping


def test_groups_by_memory() -> None:
    flat, other = torch.zeros(100), torch.zeros(10)
    tensors = [
        flat[:10],
        other,
        flat[50:60],
        flat[:10],
        flat[5:15].view(2, 5).t(),
        other.view(torch.int32),
        torch.zeros(0),
        flat[:0],
        flat[60:],
    ]
    assert overlapping(tensors) == [[0, 3, 4], [1, 5]]
    assert are_tied(tensors[:3], tensors[3:])
    assert not are_tied(tensors[:2], [tensors[2], tensors[8]])


def test_interleaved_views_count_as_shared() -> None:
    matrix = torch.zeros(4, 6)
    assert overlapping([matrix[:, :3], matrix[:, 3:]]) == [[0, 1]]
    assert overlapping([matrix[:2], matrix[2:]]) == []


def test_what_has_no_memory_of_its_own_is_left_out() -> None:
    index, values = torch.tensor([[0, 1]]), torch.ones(2)
    sparse = torch.sparse_coo_tensor(index, values, (3,))
    assert overlapping([sparse, sparse, torch.empty(3, device="meta")]) == []
