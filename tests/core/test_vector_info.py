"""Infos of many environments as one: as Gymnasium has them, and whatever they hold."""

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv

from gymllm.vector_info import add_info


def batched(*infos: dict[str, Any]) -> dict[str, Any]:
    together: dict[str, Any] = {}
    for index, info in enumerate(infos):
        add_info(together, info, index, len(infos))
    return together


class Gymnasiums(VectorEnv[Any, Any, Any]):
    num_envs = 2

    def batched(self, *infos: dict[str, Any]) -> dict[str, Any]:
        together: dict[str, Any] = {}
        for index, info in enumerate(infos):
            together = self._add_info(together, info, index)
        return together


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        if isinstance(value, dict):
            assert_same(ours[key], value)
        else:
            assert ours[key].dtype == value.dtype
            np.testing.assert_array_equal(ours[key], value)


@pytest.mark.parametrize(
    "infos",
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1.5, "b": "x"}, {}),
        ({}, {"a": True}),
        ({"a": np.int8(1)}, {"a": np.int8(2)}),
        ({"a": [1]}, {"a": [2, 3]}),
        ({"a": None}, {"a": "x"}),
        ({"a": {"x": 1, "y": {"z": "text"}}}, {"a": {"x": 2}}),
        ({"a": np.zeros((2, 3))}, {"a": np.ones((2, 3))}),
        ({"a": np.array("xy")}, {"a": np.array("yx")}),
        ({"a": np.True_}, {"a": np.False_}),
        ({"final_obs": "text", "final_info": {"a": 1}}, {}),
        ({}, {"final_obs": {"a": 1}}),
        ({1: 2}, {1: 3}),
    ],
)
def test_infos_of_like_types_are_gymnasiums(infos: tuple[dict[str, Any], ...]) -> None:
    assert_same(batched(*infos), Gymnasiums().batched(*infos))


@pytest.mark.parametrize(
    "values",
    [
        (1, None),
        (1, "x"),
        (True, 2),
        (1, 10**30),
        (10**30, 1),
        (2, {"b": 1}),
        ({"b": {"c": 1}}, 2),
        (0.5, [1, 2]),
        ({"b": 1}, None),
    ],
)
def test_values_of_unlike_types_are_kept_as_they_are(values: tuple[object, ...]) -> None:
    together = batched({"a": values[0]}, {}, {"a": values[1]})
    assert together["a"].tolist() == [values[0], None, values[1]]
    assert together["_a"].tolist() == [True, False, True]


def test_arrays_of_unlike_shapes_are_kept_as_they_are() -> None:
    together = batched({"a": np.zeros(2)}, {"a": np.ones(3)}, {"a": 4})
    assert [np.asarray(part).tolist() for part in together["a"]] == [[0, 0], [1, 1, 1], 4]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((1, 0.5), np.float64),
        ((np.float32(1), 0.1), np.float64),
        ((np.zeros(2, np.int8), np.full(2, 0.5)), np.float64),
        ((np.array("x"), np.array("longer")), np.dtype("<U6")),
    ],
)
def test_nothing_is_cut_off(values: tuple[Any, ...], dtype: Any) -> None:
    together = batched(*({"a": value} for value in values))
    assert together["a"].dtype == dtype
    np.testing.assert_array_equal(together["a"], np.stack([np.asarray(v) for v in values]))
