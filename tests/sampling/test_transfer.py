"""Tests of copies of host arrays to the device."""

import numpy as np
import torch

from quire.sampling.transfer import take_rows, to_device


def test_strided_arrays_are_copied_completely() -> None:
    """Check views with strides that torch does not support, such as reversed ones."""
    array = np.arange(10, dtype=np.int32)[::-2]
    assert to_device(array, torch.device("cpu")).tolist() == [9, 7, 5, 3, 1]


def test_all_rows_are_the_tensor_itself_and_some_are_a_copy() -> None:
    tensor = torch.arange(6).reshape(3, 2)
    assert take_rows(tensor, np.arange(3)) is tensor
    some = take_rows(tensor, np.array([0, 2]))
    some += 1
    assert some.tolist() == [[1, 2], [5, 6]]
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]
