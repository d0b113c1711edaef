"""Models of published recovery: exact where numbers can be counted by hand, each number with its source."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from optcc.errors import CodecError, InputError
from optcc.experiments.failure_model import DAY_S, LLAMA_NETWORK, RATES, REPAIRS_S, down_probability
from optcc.experiments.made import unstamped
from optcc.experiments.recovery_models import (
    ADAPCC,
    DEJAVU,
    JOBS,
    MODELS,
    R2CCL,
    RESTART,
    RecoveryJob,
    RecoveryModels,
    loss_of,
    losses,
)

RECORD = RecoveryModels(MODELS, JOBS, losses())
PAIR = RecoveryJob("two units", 4, 2, 10.0, "a test", "")


def by_states(gpus: int, down: float, lost: list[float]) -> float:
    """The expected loss by going through every set of NICs that are down; `lost` by their number, in order."""
    total = 0.0
    for state in product((0, 1), repeat=gpus):
        count = sum(state)
        total += down**count * (1 - down) ** (gpus - count) * lost[count]
    return total


def test_degraded_loss_is_that_of_every_state_of_the_nics() -> None:
    models = {model.name: model for model in MODELS}
    down = float(down_probability(LLAMA_NETWORK, REPAIRS_S["3d"]))
    slower = [0.0] + [100 * (1 - 1 / 1.1)] * 4
    found = loss_of(models[R2CCL], PAIR, LLAMA_NETWORK, "3d")
    assert found.degraded_percent == pytest.approx(by_states(4, down, slower), rel=1e-12)
    gone = [100 * 2 / 4 * count for count in range(5)]  # failures in different units, as the model has it
    assert loss_of(models[ADAPCC], PAIR, LLAMA_NETWORK, "3d").degraded_percent == pytest.approx(
        by_states(4, down, gone), rel=1e-12
    )
    assert loss_of(models[RESTART], PAIR, LLAMA_NETWORK, "3d").degraded_percent == 0


def test_recovery_counts_every_failure_once() -> None:
    for model in MODELS:
        found = loss_of(model, JOBS[0], LLAMA_NETWORK, "4h")
        failures_a_day = 16 * 42 / 54 / 16_384
        assert found.recovery_percent == pytest.approx(100 * failures_a_day * model.recovery_s / DAY_S)
        assert found.percent == found.recovery_percent + found.degraded_percent + model.standing_percent


def test_a_step_without_the_gpus_of_a_unit() -> None:
    models = {model.name: model for model in MODELS}
    assert loss_of(models[ADAPCC], PAIR, LLAMA_NETWORK, "4h").one_down_percent == 100.0
    assert loss_of(models[R2CCL], PAIR, LLAMA_NETWORK, "4h").one_down_percent == pytest.approx(10.0)
    with pytest.raises(InputError, match="unit_gpus 4"):
        loss_of(models[R2CCL], msgspec.structs.replace(PAIR, unit_gpus=4), LLAMA_NETWORK, "4h")


def test_ratios_are_those_of_the_parameters() -> None:
    slower = tuple(
        msgspec.structs.replace(each, recovery_s=each.recovery_s * (1 + (each.name == R2CCL))) for each in MODELS
    )
    assert RecoveryModels(slower, JOBS, ()).over_r2ccl(DEJAVU) == pytest.approx(RECORD.over_r2ccl(DEJAVU) / 2)
    assert RECORD.one_down_over_r2ccl(ADAPCC) == pytest.approx([100 / 15 / 0.71, 100 / 31 / JOBS[1].r2ccl_percent])


def test_every_case_is_there_and_every_number_has_a_source() -> None:
    assert len(RECORD.losses) == len(JOBS) * len(MODELS) * len(RATES) * len(REPAIRS_S)
    assert all(each.source for each in (*MODELS, *JOBS))
    assert len(RECORD.card().rows) == len(JOBS) * len(MODELS)


def test_the_record_is_what_the_models_say_and_one_without_r2ccl_is_refused() -> None:
    assert unstamped(RecoveryModels.own_path.read_bytes()) == RECORD.to_bytes()
    assert RecoveryModels.from_bytes(RECORD.to_bytes()) == RECORD
    with pytest.raises(CodecError, match=r"models.*must have r2ccl"):
        RecoveryModels.from_bytes(RecoveryModels(MODELS[:-1], JOBS, ()).to_bytes())
