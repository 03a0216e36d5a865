"""Quantised cache rows, byte by byte, written to be read: torch's own FP8 type, no engine import.

A page of a quantised cache is bytes; `unpack` gives the values of its rows as float64, `pack` the
bytes that appending float32 rows must write.
"""

import math

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
FORMATS = ("fp8", "fp8_ds_mla", "nvfp4")


def row_bytes(name: str, rank: int, rope_dim: int) -> int:
    sizes = {
        "fp8": rank + rope_dim,
        "fp8_ds_mla": rank + rank // 128 * 4 + rope_dim * 2,
        "nvfp4": rank // 2 + rank // 16 + rope_dim * 2,
    }
    return sizes[name]


def _e4m3(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).double()


def _to_e4m3(x: Tensor) -> Tensor:
    x = torch.nan_to_num(x.float(), nan=0.0, posinf=448.0, neginf=-448.0).clamp(-448.0, 448.0)
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.contiguous().view(dtype).double()


def unpack(pages: Tensor, name: str, rank: int, rope_dim: int, scale: float = 1.0) -> Tensor:
    """uint8 [num_pages, page_size, row_bytes] -> float64 [num_pages, page_size, R + dr]."""
    num_pages, page_size, width = pages.shape
    assert width == row_bytes(name, rank, rope_dim)
    if name == "fp8":
        return _e4m3(pages) * torch.tensor(scale).double()
    if name == "fp8_ds_mla":
        scales = _typed(pages[..., rank : rank + rank // 32], torch.float32)
        latents = _e4m3(pages[..., :rank]) * scales.repeat_interleave(128, -1)
        return torch.cat([latents, _typed(pages[..., rank + rank // 32 :], torch.bfloat16)], -1)
    flat = pages.reshape(num_pages, -1)
    codes, scales, rope = flat.split(
        [page_size * rank // 2, page_size * rank // 16, page_size * rope_dim * 2], dim=1
    )
    nibbles = torch.stack([codes & 15, codes >> 4], -1).reshape(num_pages, page_size, rank).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    factors = _e4m3(scales).view(num_pages, page_size, rank // 16) * scale
    latents = values * factors.repeat_interleave(16, -1)
    return torch.cat([latents, _typed(rope, torch.bfloat16).view(num_pages, page_size, -1)], -1)


def pack(rows: Tensor, name: str, rank: int, scale: float = 1.0) -> Tensor:
    """float32 [num_pages, page_size, R + dr] -> uint8 pages."""
    num_pages, page_size, width = rows.shape
    rows = rows.float()
    if name == "fp8":
        return _to_e4m3(rows * (torch.tensor(1.0) / torch.tensor(scale)))
    latents = rows[..., :rank]
    rope = rows[..., rank:].bfloat16().contiguous().view(torch.uint8)
    if name == "fp8_ds_mla":
        groups = latents.unflatten(-1, (-1, 128))
        scales = _least_power(_largest(groups).clamp(min=1e-4) / 448.0)
        codes = _to_e4m3(groups / scales[..., None]).flatten(-2)
        return torch.cat([codes, scales.view(torch.uint8), rope], -1)
    groups = latents.unflatten(-1, (-1, 16))
    scales = _to_e4m3(_largest(groups) / 6.0 / scale)
    factors = scales.view(torch.float8_e4m3fn).float() * scale
    inverse = torch.where(scales == 0, 0.0, 1.0 / factors)
    codes = _to_e2m1(groups * inverse[..., None]).flatten(-2)
    planes = [codes[..., 0::2] | codes[..., 1::2] << 4, scales, rope]
    flat = torch.cat([plane.reshape(num_pages, -1) for plane in planes], 1)
    return flat.view(num_pages, page_size, row_bytes(name, rank, width - rank))


def round_trip(rows: Tensor, name: str, rank: int, scale: float = 1.0) -> Tensor:
    """What rows [..., R + dr] are once they have been cached, as float32."""
    flat = rows.reshape(-1, 1, rows.shape[-1])
    back = unpack(pack(flat, name, rank, scale), name, rank, rows.shape[-1] - rank, scale)
    return back.float().view(rows.shape)


def _largest(groups: Tensor) -> Tensor:
    return torch.nan_to_num(groups.abs(), nan=0.0).clamp(max=2.0**127).amax(-1)


def _least_power(x: Tensor) -> Tensor:
    return torch.tensor(
        [2.0 ** math.ceil(math.log2(v)) for v in x.double().flatten().tolist()]
    ).view(x.shape)


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest code, of two equally near ones the even one; NaN gives 0."""
    distance = (x.double().abs().clamp(max=6.0)[..., None] - E2M1).abs()
    odd = torch.arange(8) % 2 * 1e-9  # codes are at least 1/2 apart
    code = (distance + odd).argmin(-1)
    code = torch.where(x.isnan(), 0, code + 8 * torch.signbit(x).long())
    return code.to(torch.uint8)
