import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from executor.staging import NUM_SLOTS, Staging
from tests.rig.fake_device import FakeDevice

arrays = st.dictionaries(
    st.text("abc", min_size=1, max_size=4),
    st.sampled_from([np.int32, np.int64, np.float32, np.float64, np.bool_]).flatmap(
        lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=7))
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(arrays, min_size=1, max_size=5))
def test_arrays_arrive_as_they_were_and_stay_so(steps: list[dict[str, np.ndarray]]) -> None:
    staging = Staging(FakeDevice())
    arrived = [(staging.put(step), step) for step in steps]
    for there, here in arrived:
        assert there.keys() == here.keys()
        for name, array in here.items():
            assert there[name].shape == array.shape
            assert there[name].numpy().tobytes() == array.tobytes()
            assert there[name].dtype == torch.from_numpy(array).dtype


def test_a_pinned_buffer_is_filled_again_only_when_its_copy_is_done() -> None:
    device = FakeDevice()
    staging = Staging(device)
    for number in range(NUM_SLOTS + 1):
        staging.put({"token_ids": np.full(4, number)})
    recorded = [f"record event {number + 1}" for number in range(NUM_SLOTS)]
    assert device.log == [*recorded, "wait event 1", "record event 1"]


def test_a_larger_step_gets_a_larger_buffer() -> None:
    staging = Staging(FakeDevice())
    for size in (10, 10**5, 3):
        assert staging.put({"x": np.arange(size)})["x"].sum() == size * (size - 1) // 2
