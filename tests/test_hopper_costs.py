"""The cost model of the Hopper kernels: its table, and the fit that `bench launches` makes of measured launches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.launches import (
    PART_SIZES,
    SIZES,
    Sample,
    candidates,
    fit,
    from_vector,
    label,
    main,
    read_samples,
    to_vector,
    write,
    write_samples,
)
from mla_ops.kernels.hopper.costs import TABLE, Costs, read_costs
from mla_ops.kernels.hopper.launch import KERNELS, Clusters, Group
from mla_ops.kernels.hopper.waves import Wave

H200 = read_costs(TABLE.read_text(), "NVIDIA H200")
AT_ONCE = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7)


def timed(costs: Costs, noise: float) -> list[Sample]:
    """Launches that the benchmark measures, with the times that `costs` predict, times 1 to 1 + noise."""
    generator = torch.Generator().manual_seed(3)
    calls = [
        (keys, num_heads, topk // 64, waves)
        for keys in KERNELS.values()
        for num_tokens, num_heads, topk in SIZES
        for waves in candidates(keys, num_tokens, num_heads, topk // 64, AT_ONCE, H200)
    ]
    for num_tokens, num_heads, topk in PART_SIZES:
        shapes = [Clusters(64 if num_heads > 16 else 16, splits, parts) for splits in (2, 8) for parts in (1, 2, 6)]
        calls += [(KERNELS["fp8_ds_mla", 576], num_heads, topk // 64, (Wave(num_tokens, shape),)) for shape in shapes]
    factors = (1 + noise * torch.rand(len(calls), generator=generator)).tolist()
    return [
        Sample(*call, AT_ONCE, Sample(*call, AT_ONCE, 0.0).predicted_us(costs) * by)
        for call, by in zip(calls, factors, strict=True)
    ]


def other_costs() -> Costs:
    """A GPU unlike the H200: every constant is another one."""
    generator = torch.Generator().manual_seed(5)
    factors = (0.7 + torch.rand(len(to_vector(H200)), generator=generator)).tolist()
    return from_vector([us * by + 0.05 for us, by in zip(to_vector(H200), factors, strict=True)], H200)


def test_a_fit_predicts_every_launch_of_another_gpu() -> None:
    """Exact times are met to the rounding of the table; some constants occur only in sums and are not unique."""
    samples = timed(other_costs(), 0.0)
    fitted = fit(samples, H200, hold=0.0)
    for sample in samples:
        assert sample.predicted_us(fitted) == pytest.approx(sample.us, rel=2e-3)
    assert fitted.tiles["FP8_DS_MLA"][64].turn_us == pytest.approx(other_costs().tiles["FP8_DS_MLA"][64].turn_us, 1e-2)
    assert fitted.tiles["FP8_DS_MLA"][64] != H200.tiles["FP8_DS_MLA"][64]


def test_noise_of_two_percent_moves_predictions_by_no_more() -> None:
    samples = timed(other_costs(), 0.02)
    fitted = fit(samples, H200, hold=0.0)
    for sample in samples:
        assert sample.predicted_us(fitted) == pytest.approx(sample.us, rel=0.02)


def test_no_constant_is_negative() -> None:
    """Times that fall with more members would be fitted by a negative time of a member."""
    keys = KERNELS["fp8_ds_mla", 576]
    samples = [Sample(keys, 128, 33, (Wave(4, Group(members)),), AT_ONCE, 40 - members) for members in (2, 3, 4, 6, 8)]
    fitted = fit(samples, H200, hold=0.0)
    assert min(to_vector(fitted)) == 0.0
    assert fitted.tiles["BF16_576"] == H200.tiles["BF16_576"]  # no sample says anything of it


def test_constants_that_samples_do_not_tell_apart_stay_in_proportion() -> None:
    """Rows of one CTA each, in one round: a turn's time and a row's own only as a sum."""
    keys = KERNELS["fp8_ds_mla", 576]
    before = H200.tiles[keys.name][64]
    us = 1.1 * (32 * before.turn_us + before.row_us)
    fitted = fit([Sample(keys, 64, 32, (Wave(1, Clusters(64, 1)),), AT_ONCE, us)] * 1000, H200)
    after = fitted.tiles[keys.name][64]
    assert 32 * after.turn_us + after.row_us == pytest.approx(us, rel=5e-3)
    assert before.turn_us < after.turn_us
    assert before.row_us < after.row_us < 1.1 * before.row_us
    assert fitted._replace(tiles=H200.tiles) == H200


def test_measured_launches_are_read_as_they_were_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, sizes, path = KERNELS["fp8_ds_mla", 576], ((40, 128, 2048), (16, 128, 2048)), tmp_path / "samples.json"
    shapes = []
    for num_tokens, num_heads, topk in sizes:
        calls = candidates(keys, num_tokens, num_heads, 32, AT_ONCE, H200)
        samples = [Sample(keys, num_heads, 32, waves, AT_ONCE, 50.0 + number) for number, waves in enumerate(calls)]
        shapes.append((keys, (num_tokens, num_heads, topk), samples))
    write_samples(path, "NVIDIA H200", shapes)
    assert read_samples(path) == ("NVIDIA H200", shapes)
    assert main(["--read", str(path)]) == 0
    assert capsys.readouterr().out.count("FP8_DS_MLA  ") == len(sizes)


def test_the_table_is_read_by_the_name_of_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write(path, "H100", other_costs())
    assert read_costs(path.read_text(), "NVIDIA H100 80GB HBM3") == other_costs()
    assert read_costs(path.read_text(), "NVIDIA H200") == read_costs(path.read_text(), "NVIDIA GH200 480GB") == H200
    assert set(json.loads(path.read_text())) == {*json.loads(TABLE.read_text()), "H100"}


@pytest.mark.parametrize("gpu", sorted(json.loads(TABLE.read_text())))
def test_the_table_has_every_kernel(gpu: str) -> None:
    costs = read_costs(TABLE.read_text(), gpu)
    assert {name: tuple(tiles) for name, tiles in costs.tiles.items()} == {
        keys.name: keys.tiles for keys in KERNELS.values()
    }
    assert min(to_vector(costs)) >= 0


def test_candidates_have_every_token_and_two_waves_where_one_fills_the_device() -> None:
    calls = candidates(KERNELS["fp8_ds_mla", 576], 40, 128, 32, AT_ONCE, H200)
    assert all(sum(wave.num_tokens for wave in waves) == 40 for waves in calls)
    assert (Wave(33, Clusters(64, 2)), Wave(7, Clusters(64, 8))) in calls
    assert "33x64,2+7x64,8" in map(label, calls)
    assert not any(isinstance(wave.shape, Group) for waves in calls for wave in waves[:-1])
