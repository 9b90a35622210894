"""All tuning constants of the kernels: how much each holds at a time, and into how many segments sequences are cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from rebind.ops.inputs import ScanInputs

FEW = 0.3  # programs per multiprocessor below which sequences are cut: a cut sequence is walked along three times
SHORTEST = 16  # least number of chunks in a segment
RUN = 8  # chunks that a program of gradients processes, one after another
WARPS = 4  # of a program that walks along a sequence or computes gradients
INVERT_WARPS = 2  # of a program that inverts the system of a chunk


@dataclass(frozen=True)
class Tiles:
    """How much a program holds at a time. Sizes are powers of two, at least 16, which tensor cores need."""

    chunk: int  # C
    key: int  # all of d_k, in the kernels that walk
    value: int  # columns of a state that a walking program holds
    walk_stages: int
    key_part: int  # in the kernels of gradients
    value_part: int
    gradient_stages: int
    channel_prepare: int  # columns of keys that a program holds that prepares a chunk with a decay per channel
    channel_key: int  # columns of keys and values in the kernels of gradients with such a decay
    channel_value: int
    channel_warps: int  # of these programs
    prepare_run: int
    prepare_stages: int

    @classmethod
    def of(cls, inputs: ScanInputs) -> Tiles:
        """Return the tiles that are fastest for these inputs."""
        key, value = _tile(inputs.d_k), _tile(inputs.d_v)
        narrow = inputs.v.element_size() == 2
        chunk = inputs.mini_batch or (64 if narrow else 32)
        # Wide blocks read keys less often; narrow ones fill a device that few heads would leave idle.
        filled = inputs.sequences * inputs.heads * -(-value // 64) >= 0.9 * multiprocessors(inputs.v.device)
        channels = inputs.by_channel or inputs.probe is not None
        columns = min(value, 64 if filled and key <= 128 and narrow and not channels else 32)
        # A decay per channel has one more tile of rows to load: three stages take 217 KiB of a Hopper GPU's 227.
        fewer = channels and not (key <= 128 and shared_memory(inputs.v.device) >= 217 * 1024)
        return cls(
            chunk=chunk,
            key=key,
            value=columns,
            walk_stages=(3 if key <= 128 else 2) - fewer if narrow else 1,
            key_part=min(key, 128 if narrow else 32),
            value_part=min(value, 128 if narrow else 32),
            gradient_stages=2 if narrow and max(key, value) <= 128 else 1,
            channel_prepare=min(key, 128 if narrow else 64),
            channel_key=min(key, 64),
            channel_value=min(value, 64),
            channel_warps=8 if key >= 64 else 4,
            prepare_run=8 if key > 64 else 4,
            prepare_stages=1 if narrow and key > 64 and inputs.erase is not None else 2,
        )


def segments_of(inputs: ScanInputs, tiles: Tiles) -> int:
    """Return the number of segments of a sequence: one, unless heads are few and sequences long."""
    programs = inputs.sequences * inputs.heads * -(-inputs.d_v // tiles.value)
    processors = multiprocessors(inputs.v.device)
    if inputs.cu_seqlens is not None or not programs or programs > FEW * processors:
        return 1
    return max(1, min(processors // programs, -(-inputs.length // tiles.chunk) // SHORTEST))


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; 0 where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _tile(width: int) -> int:
    return max(16, triton.next_power_of_2(width))
