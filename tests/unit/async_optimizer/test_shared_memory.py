"""Which tensors have memory in common."""

from __future__ import annotations

import random

import torch

from accel_scaler.async_optimizer.shared_memory import overlapping


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


def test_interleaved_views_count_as_shared() -> None:
    matrix = torch.zeros(4, 6)
    assert overlapping([matrix[:, :3], matrix[:, 3:]]) == [[0, 1]]
    assert overlapping([matrix[:2], matrix[2:]]) == []


def test_what_has_no_memory_of_its_own_is_left_out() -> None:
    index, values = torch.tensor([[0, 1]]), torch.ones(2)
    sparse = torch.sparse_coo_tensor(index, values, (3,))
    assert overlapping([sparse, sparse, torch.empty(3, device="meta")]) == []


def test_as_a_plain_search_over_all_pairs() -> None:
    rng = random.Random(0)
    for _ in range(200):
        flat = torch.zeros(64)
        views = []
        for _ in range(rng.randint(2, 7)):
            start, size = rng.randrange(60), rng.randint(1, 4)
            views.append(flat[start : start + size])
        together = {i: {i} for i in range(len(views))}
        for i, one in enumerate(views):
            for j, two in enumerate(views):
                flat.zero_()
                one.add_(1)
                if bool(two.any()):
                    merged = together[i] | together[j]
                    for k in merged:
                        together[k] = merged
        expected = sorted({tuple(sorted(g)) for g in together.values() if len(g) > 1})
        assert overlapping(views) == list(map(list, expected))
