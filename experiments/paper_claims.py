"""What the papers state, in numbers, and how each is judged: OptCC, R2CCL, DMI-Lib, and StragglAR's beside them.

The papers' numbers are cited facts. Most of their text was not available: a source is the abstract, or one of those of
`SECONDARY`, `PAGE`, `REPOSITORY` and `ARTIFACT`. Ours are functions of records (`optcc.experiments.claim_values`).
"""

from __future__ import annotations

from typing import Final

from optcc.experiments import claim_values as values
from optcc.experiments import claim_values_failures as failures
from optcc.experiments.bound_record import BoundCurves
from optcc.experiments.chunk_counts import ChunkCounts
from optcc.experiments.claims import ByNumber, ByReason, ClaimOutcome, FromRecord, Paper, PaperClaim, Stated
from optcc.experiments.failover_speed import FailoverSpeed
from optcc.experiments.failure_study import FailureStudy
from optcc.experiments.late_rank import LateRank
from optcc.experiments.lost_nics import LostNicsRecord
from optcc.experiments.mid_collective import MidCollective
from optcc.experiments.observation_cost import ObservationCost
from optcc.experiments.peers_record import PeerComparison
from optcc.experiments.recovery_models import DEJAVU, RecoveryModels
from optcc.experiments.reranking import Reranking
from optcc.experiments.schedule_record import ScheduleRatios
from optcc.experiments.swarm import SwarmRuns
from optcc.experiments.training import TrainingStudy
from optcc.experiments.training_failures import TrainingFailures

OPTCC: Final = Paper("OptCC", "arXiv 2606.01680")
R2CCL: Final = Paper("R2CCL", "arXiv 2512.25059")
DMI_LIB: Final = Paper("DMI-Lib", "arXiv 2605.11093")
STRAGGLAR: Final = Paper("StragglAR", "arXiv 2505.23523")

ABSTRACT: Final = "abstract"
SECONDARY: Final = "summaries of the paper"
PAGE: Final = "pages about the paper"
NUMBER_ONLY: Final = "pages about the paper; known to us by the number only"
NSDI: Final = "later text of the paper, marked NSDI '27"
REPOSITORY: Final = "an implementer's notes (1WesleyYou/nccl)"
ARTIFACT: Final = "the authors' artifact: 3 hosts of 3 NICs of 10 Gbit/s"

UNTESTED: Final = ClaimOutcome.UNTESTED

_NO_GPU = "it is a measurement on GPUs, and the emulated hosts have none"
_NO_FLEET = "it is a statistic of the operation of GPU clusters"
_OVERLAP = (
    "in the model gradients overlap the backward pass, so that almost nothing of an AllReduce is exposed: what was "
    "measured there is for the most part not its bandwidth"
)
_NO_BASELINES = "AdapCC and DejaVu need GPUs; in our models of them it is a parameter"
_BY_RATIO = "the recovery time that the model takes was itself read as DejaVu's by this ratio"

OPTCC_CLAIMS: Final = (
    PaperClaim(
        "O1",
        OPTCC,
        "AllReduce over the fault-free ring with at most half of one endpoint's bandwidth lost",
        Stated("2 to 6 %", ABSTRACT, 2.0, 6.0),
        ByNumber("simulated", "less", 0.05, "our plans of it are ordered by a list schedule, which is not theirs"),
        FromRecord(ScheduleRatios, values.optcc_up_to_half),
        FromRecord(PeerComparison, values.optcc_on_fabric),
        FromRecord(FailureStudy, values.bound_one_server),
    ),
    PaperClaim(
        "O2",
        OPTCC,
        "what prior work (R2CCL) takes there",
        Stated("up to 57 %", ABSTRACT, 57.0, 57.0),
        ByNumber("simulated", "same", 0.05, "the number of endpoints of the paper is not known to us"),
        FromRecord(ScheduleRatios, values.prior_at_half),
        FromRecord(PeerComparison, values.prior_on_fabric),
        FromRecord(BoundCurves, values.bound_at_half),
    ),
    PaperClaim(
        "O3",
        OPTCC,
        "overhead that no schedule avoids while a straggler keeps half of its bandwidth",
        Stated("O(1/p): exponent -1", ABSTRACT, -1.0, -1.0),
        ByNumber("bound", "same", 0.02, "our certified bound falls otherwise"),
        FromRecord(ScheduleRatios, values.optimal_at_half),
        FromRecord(PeerComparison, values.optimal_on_fabric),
        FromRecord(BoundCurves, values.bound_exponent),
    ),
    PaperClaim(
        "O4",
        OPTCC,
        "the pipeline has a closed form and no bubbles: time over the closed form",
        Stated("1", ABSTRACT, 1.0, 1.0),
        ByNumber("simulated", "less", 0.02, "messages take 5 us here and plans are ordered by a list schedule"),
        FromRecord(ScheduleRatios, values.optcc_over_formula),
    ),
    PaperClaim(
        "O5",
        OPTCC,
        "cost with k segments over (k + 1)/k of the bound",
        Stated("about 1", REPOSITORY, 1.0, 1.0),
        ByNumber("simulated", "less", 0.02, "messages take 5 us here and plans are ordered by a list schedule"),
        FromRecord(ScheduleRatios, values.optcc_over_bound),
    ),
    PaperClaim(
        "O6",
        OPTCC,
        "measured over the bound on 5 ranks, one at half: 1.255 to 1.468 of the fault-free time, bound 1.25",
        Stated("1.004 to 1.174", REPOSITORY, 1.255 / 1.25, 1.468 / 1.25),
        ByNumber("measured", "less", 0.0, "our run-time is further from the bound"),
        measured=FromRecord(PeerComparison, values.optcc_of_bound_on_fabric),
    ),
    PaperClaim(
        "O7",
        OPTCC,
        "the same as O1 with several GPUs a server, the hop to another GPU's NIC (PXN) charged",
        Stated("2 to 6 %", ABSTRACT, 2.0, 6.0),
        ByNumber(
            "simulated",
            "less",
            0.05,
            "with one GPU a server the bound itself is above it, and with eight our plan of it has too few segments; "
            "our own schedules stay near the bound",
        ),
        FromRecord(LostNicsRecord, values.optcc_on_servers),
        bound=FromRecord(LostNicsRecord, values.ours_on_servers),
    ),
    PaperClaim(
        "O8",
        OPTCC,
        "lower bound for one straggler, max(2l(p - 1)/(l(p - 2) + 2), l): what schedules take over it",
        Stated("at least 1", "Theorem 13 as another repository has it", 1.0, None),
        ByNumber(
            "simulated",
            "more",
            0.001,
            "proved schedules are faster than it: it is another model's, or was copied wrongly, and is not used here",
        ),
        FromRecord(ScheduleRatios, values.optimal_over_theorem),
        bound=FromRecord(BoundCurves, values.bound_over_theorem),
    ),
)

_TRAINING = "2.7B on 2 servers"
_TRAINING_4 = "2.7B on 4 servers"
_SIMAI = "6.7B as in SimAI"

R2CCL_TRAINING: Final = (
    PaperClaim(
        "R1",
        R2CCL,
        "training with one NIC of eight lost, 2 servers of 8 H100",
        Stated("less than 1 %", ABSTRACT, None, 1.0),
        ByNumber("simulated", "less", 0.0, "more of the AllReduce is exposed in the model"),
        FromRecord(TrainingStudy, failures.training(_TRAINING, 1)),
        FromRecord(TrainingFailures, failures.step_with_nic_down),
        FromRecord(TrainingStudy, failures.training(_TRAINING, 1, failures.OPTIMUM)),
    ),
    PaperClaim(
        "R2",
        R2CCL,
        "the same, as a value",
        Stated("0.8 %", PAGE, 0.8, 0.8),
        ByNumber("simulated", "same", 0.1, _OVERLAP),
        FromRecord(TrainingStudy, failures.training(_TRAINING, 1)),
        bound=FromRecord(TrainingStudy, failures.training(_TRAINING, 1, failures.OPTIMUM)),
    ),
    PaperClaim(
        "R3",
        R2CCL,
        "share of the healthy training throughput that is kept",
        Stated("above 99 %", NUMBER_ONLY, 99.0, None),
        ByNumber("simulated", "more", 0.0, "more of the AllReduce is exposed in the model"),
        FromRecord(TrainingStudy, failures.training_kept(_TRAINING)),
    ),
    PaperClaim(
        "R4",
        R2CCL,
        "training with one NIC of eight lost, 4 servers of 8",
        Stated("less than 1.1 %", NSDI, None, 1.1),
        ByNumber("simulated", "less", 0.0, "more of the AllReduce is exposed in the model"),
        FromRecord(TrainingStudy, failures.training(_TRAINING_4, 1)),
        bound=FromRecord(TrainingStudy, failures.training(_TRAINING_4, 1, failures.OPTIMUM)),
    ),
    PaperClaim(
        "R5",
        R2CCL,
        "Megatron, data parallel on 32 GPUs: 752,405 tokens a second, 750,627 with a NIC lost",
        Stated("0.24 %", SECONDARY, *(100 * (752_405 / 750_627 - 1),) * 2),
        ByNumber("simulated", "same", 0.1, _OVERLAP),
        FromRecord(TrainingStudy, failures.training(_TRAINING_4, 1)),
        bound=FromRecord(TrainingStudy, failures.training(_TRAINING_4, 1, failures.OPTIMUM)),
    ),
    PaperClaim(
        "R6",
        R2CCL,
        "2.7B parameters, data parallel over 16, R2CCL-AllReduce",
        Stated("0.71 %", SECONDARY, 0.71, 0.71),
        ByNumber("simulated", "same", 0.1, _OVERLAP),
        FromRecord(TrainingStudy, failures.training(_TRAINING, 1, failures.ALLREDUCE)),
        bound=FromRecord(TrainingStudy, failures.training(_TRAINING, 1, failures.OPTIMUM)),
    ),
    PaperClaim(
        "R7",
        R2CCL,
        "the same with two failures at once",
        Stated("1.24 %", SECONDARY, 1.24, 1.24),
        ByNumber("simulated", "same", 0.1, _OVERLAP),
        FromRecord(TrainingStudy, failures.training(_TRAINING, 2, failures.ALLREDUCE)),
        bound=FromRecord(TrainingStudy, failures.training(_TRAINING, 2, failures.OPTIMUM)),
    ),
    PaperClaim(
        "R8",
        R2CCL,
        "512 GPUs simulated, one failure",
        Stated("1.5 %", SECONDARY, 1.5, 1.5),
        ByNumber("simulated", "same", 0.05, "model, rate of the NICs and overlap are not known to us"),
        FromRecord(TrainingStudy, failures.training(_SIMAI, 1, failures.ALLREDUCE)),
        bound=FromRecord(TrainingStudy, failures.training(_SIMAI, 1, failures.OPTIMUM)),
    ),
    PaperClaim(
        "R9",
        R2CCL,
        "the same, ten failures",
        Stated("4.3 %", SECONDARY, 4.3, 4.3),
        ByNumber(
            "simulated",
            "same",
            0.05,
            "no share of exposed AllReduce gives both R8 and this as means of uniform failures: the paper's ten are a "
            "bad draw, or crowd on servers more than ours",
        ),
        FromRecord(TrainingStudy, failures.training_at_95(_SIMAI, 10)),
        bound=FromRecord(TrainingStudy, failures.training(_SIMAI, 10, failures.OPTIMUM)),
    ),
    PaperClaim(
        "R10",
        R2CCL,
        "inference with one NIC lost",
        Stated("less than 3 %", ABSTRACT, None, 3.0),
        ByNumber("simulated", "less", 0.0, "the AllReduces of a prompt are a larger share in the model"),
        FromRecord(TrainingStudy, failures.first_token("r2ccl-allreduce")),
        bound=FromRecord(TrainingStudy, failures.first_token("optimal")),
    ),
    PaperClaim(
        "R11",
        R2CCL,
        "the same, as a value",
        Stated("2.4 %", PAGE, 2.4, 2.4),
        ByNumber("simulated", "same", 0.05, "batch, prompt and processor shares are assumed"),
        FromRecord(TrainingStudy, failures.first_token("r2ccl-allreduce")),
        bound=FromRecord(TrainingStudy, failures.first_token("optimal")),
    ),
    PaperClaim(
        "R12",
        R2CCL,
        "GPT-2, 1,000 updates: change of the perplexity when a NIC is lost",
        Stated("0.006 to 0.023 %", ARTIFACT, 0.006, 0.023),
        ByNumber("measured", "less", 0.0, "sums were made in another order after the loss"),
        measured=FromRecord(TrainingFailures, failures.perplexity),
    ),
)

R2CCL_SCHEDULES: Final = (
    PaperClaim(
        "R13",
        R2CCL,
        "share of the healthy bandwidth that Balance keeps for AllGather, ReduceScatter and SendRecv, large messages",
        Stated("85 to 89 %", f"{PAGE}; others say 83 to 90 %", 85.0, 89.0),
        ByNumber("simulated", "same", 0.0, "another share of the bandwidth was lost"),
        FromRecord(ScheduleRatios, failures.balance_kept),
        FromRecord(PeerComparison, values.balance_kept_on_fabric),
        FromRecord(FailureStudy, failures.optimal_kept),
    ),
    PaperClaim(
        "R14",
        R2CCL,
        "rise of the utilisation by logical re-ranking where servers lost different rails",
        Stated("22 %", PAGE, 22.0, 22.0),
        ByNumber(
            "simulated",
            "same",
            0.1,
            "the paper's servers, rails and losses are not known to us, and the gain depends on them",
        ),
        FromRecord(Reranking, failures.reranking_gain),
        bound=FromRecord(Reranking, failures.reranking_bound),
    ),
    PaperClaim(
        "R15",
        R2CCL,
        "share of a server's bandwidth lost from which R2CCL-AllReduce is chosen over Balance",
        Stated("1/3", SECONDARY, 1 / 3, 1 / 3),
        ByNumber(
            "simulated",
            "same",
            0.05,
            "by its own formula it is faster for any loss; the terms behind 1/3 are not known to us",
        ),
        FromRecord(ScheduleRatios, failures.allreduce_begins),
    ),
    PaperClaim(
        "R16",
        R2CCL,
        "growth of the overhead with the number of GPUs, up to 256",
        Stated("sub-linear", NUMBER_ONLY, None, 1.0),
        ByNumber("simulated", "less", 0.0, "the overhead grows faster than the cluster"),
        FromRecord(FailureStudy, failures.overhead_exponent("r2ccl-allreduce")),
        bound=FromRecord(FailureStudy, failures.overhead_exponent("optimal")),
    ),
    PaperClaim(
        "R17",
        R2CCL,
        "Balance, measured over its formula, a third of a host lost (1.49 for 1.50)",
        Stated("0.993", ARTIFACT, 1.49 / 1.5, 1.49 / 1.5),
        ByNumber("measured", "less", 0.02, "our ring loses more than the rates say"),
        measured=FromRecord(PeerComparison, values.balance_over_formula),
    ),
    PaperClaim(
        "R18",
        R2CCL,
        "R2CCL-AllReduce, measured over its formula, 4 chunks (1.38 for 1.375)",
        Stated("1.004", ARTIFACT, 1.38 / 1.375, 1.38 / 1.375),
        ByNumber(
            "measured",
            "less",
            0.02,
            "the run takes longer than is predicted for the same plan, and why has not been found",
        ),
        measured=FromRecord(PeerComparison, values.r2ccl_over_formula),
    ),
    PaperClaim(
        "R19",
        R2CCL,
        "R2CCL-AllReduce by 1 to 16 chunks of its second phase, over healthy; one chunk loses to Balance",
        Stated("1.60 to 1.329", ARTIFACT, 1.329, 1.329),
        ByNumber("simulated", "same", 0.1, "ours is pipelined as a whole, and the artifact's only in its second phase"),
        FromRecord(ChunkCounts, failures.most_chunks),
        bound=FromRecord(ChunkCounts, failures.bound_of_chunks),
    ),
)

R2CCL_FAILURES: Final = (
    PaperClaim(
        "R20",
        R2CCL,
        "recovery from a failed NIC",
        Stated("12 ms", PAGE, 12.0, 12.0),
        ByNumber("measured", "less", 0.1, "our transport takes longer to notice the failure"),
        measured=FromRecord(FailoverSpeed, failures.stalls),
    ),
    PaperClaim(
        "R21",
        R2CCL,
        "the same of AdapCC (read so: its ratio to 12 ms is about that of R23)",
        Stated("145 ms", PAGE, 145.0, 145.0),
        ByReason(UNTESTED, _NO_BASELINES),
        measured=FromRecord(FailoverSpeed, failures.stalls),
    ),
    PaperClaim(
        "R22",
        R2CCL,
        "the same of DejaVu (read so: its ratio to 12 ms is about that of R24)",
        Stated("560 ms", PAGE, 560.0, 560.0),
        ByReason(UNTESTED, _NO_BASELINES),
        measured=FromRecord(FailoverSpeed, failures.stalls),
    ),
    PaperClaim(
        "R23",
        R2CCL,
        "AdapCC's extra overhead over R2CCL's",
        Stated("12.18x", ABSTRACT, 12.18, 12.18),
        ByNumber("simulated", "same", 0.0, "the jobs behind the number are not known to us"),
        FromRecord(RecoveryModels, failures.gpus_gone),
        measured=FromRecord(PeerComparison, values.peer_over_ours),
    ),
    PaperClaim(
        "R24",
        R2CCL,
        "DejaVu's extra overhead over R2CCL's",
        Stated("47x", ABSTRACT, 47.0, 47.0),
        ByReason(UNTESTED, _BY_RATIO),
        FromRecord(RecoveryModels, failures.recovery_over_r2ccl(DEJAVU)),
        measured=FromRecord(PeerComparison, values.peer_over_ours),
    ),
    PaperClaim(
        "R25",
        R2CCL,
        "AdapCC's extra overhead over R2CCL's, 175B on 1,024 GPUs",
        Stated("about 54x", SECONDARY, 54.0, 54.0),
        ByReason(UNTESTED, "how many GPUs leave with one, and R2CCL's own overhead there, are not known to us"),
    ),
    PaperClaim(
        "R26",
        R2CCL,
        "extra overhead that is saved in training and in inference",
        Stated("up to 92 % and 98 %", NSDI, 92.0, 98.0),
        ByReason(UNTESTED, "we have no model of DejaVu's inference; that of training is in the column"),
        FromRecord(RecoveryModels, failures.gpus_gone_saved),
    ),
    PaperClaim(
        "R27",
        R2CCL,
        "share of common network failures that a job survives without a restart",
        Stated("95 %", PAGE, 95.0, 95.0),
        ByReason(
            UNTESTED, "how often each kind of failure comes in a fleet is not known; ours are those injected here"
        ),
        FromRecord(SwarmRuns, failures.seeds),
        FromRecord(FailoverSpeed, failures.survived),
    ),
    PaperClaim(
        "R28",
        R2CCL,
        "stock NCCL when a NIC is lost in mid-run",
        Stated("crashes", SECONDARY),
        ByReason(UNTESTED, "NCCL needs a GPU on every host; measured are other libraries without GPUs"),
        measured=FromRecord(PeerComparison, values.peers_that_ended),
    ),
    PaperClaim(
        "R29",
        R2CCL,
        "an iteration in which a NIC is cut over a healthy one (3.54 s for 2.03 s, a third of a host lost)",
        Stated("1.74x", ARTIFACT, 3.54 / 2.03, 3.54 / 2.03),
        ByNumber("measured", "less", 0.05, "the remainder of our run takes longer"),
        measured=FromRecord(MidCollective, failures.cut_iteration),
        bound=FromRecord(MidCollective, failures.cut_bound),
    ),
    PaperClaim(
        "R30",
        R2CCL,
        "capture of CUDA graphs again after a failure: Balance and AllReduce",
        Stated("1.7 and 0.33 ms", ARTIFACT),
        ByReason(UNTESTED, _NO_GPU),
    ),
    PaperClaim(
        "R31",
        R2CCL,
        "median recovery of a training job from a checkpoint",
        Stated("68 min", SECONDARY),
        ByReason(UNTESTED, _NO_FLEET),
    ),
    PaperClaim(
        "R32",
        R2CCL,
        "GPU hours that network faults waste",
        Stated("10 to 15 %", ABSTRACT),
        ByReason(UNTESTED, _NO_FLEET),
    ),
)

_OTHER_WORK = "it is the observation of whole models on GPUs, and no such model is served here"

OBSERVATION_CLAIMS: Final = (
    PaperClaim(
        "D1",
        DMI_LIB,
        "overhead of observation, offline; ours is that of the chunks of an AllReduce, which is other work",
        Stated("0.4 to 6.8 %", "the paper's figures", 0.4, 6.8),
        ByNumber(
            "measured",
            "less",
            0.0,
            "on one machine the drain takes processors from the job where those, and not the NICs, are its limit",
        ),
        measured=FromRecord(ObservationCost, failures.tap_cost),
    ),
    PaperClaim(
        "D2",
        DMI_LIB,
        "overhead of observation under moderate load of a server",
        Stated("about 6 %", "the paper's figures"),
        ByReason(UNTESTED, _OTHER_WORK),
    ),
    PaperClaim(
        "D3",
        DMI_LIB,
        "overhead of the latency, over that of other ways to observe",
        Stated("2 to 15 times less", "the paper's figures"),
        ByReason(UNTESTED, _OTHER_WORK),
    ),
    PaperClaim(
        "D4",
        DMI_LIB,
        "against vLLM's extraction of hidden states, batches of 16, 32 and 1",
        Stated("-2.4, -2.7, -14 %", "the paper's figures"),
        ByReason(UNTESTED, _OTHER_WORK),
    ),
    PaperClaim(
        "D5",
        DMI_LIB,
        "what such an extraction costs by itself, and with a disk",
        Stated("41 and 76.5 %", "the paper's figures"),
        ByReason(UNTESTED, _OTHER_WORK),
    ),
    PaperClaim(
        "D6",
        DMI_LIB,
        "one read of a counter in managed memory a step; ours is status and recorder, which is other work",
        Stated("about 430 µs", "the project's repository", 430.0, 430.0),
        ByNumber("measured", "less", 0.1, "our page costs more than such a read"),
        measured=FromRecord(ObservationCost, failures.recorder_cost),
    ),
    PaperClaim(
        "S1",
        STRAGGLAR,
        "AllReduce on 8 GPUs of at least 1 GiB where one rank is late, over a ring",
        Stated("22 % faster (25 % in v2)", SECONDARY, 22.0, 25.0),
        ByNumber("simulated", "more", 0.1, "a simulation has no GPUs, and what a copy or a reduction takes there"),
        FromRecord(LateRank, failures.time_saved_if_late),
        FromRecord(PeerComparison, values.time_saved_if_late_on_fabric),
    ),
    PaperClaim(
        "S2",
        STRAGGLAR,
        "the same on 256 GPUs, simulated there",
        Stated("about 2x", SECONDARY, 2.0, 2.0),
        ByNumber("simulated", "same", 0.1, "their latency, message and delay are not known to us"),
        FromRecord(LateRank, failures.speed_up_if_late),
    ),
)

CLAIMS: Final = (*OPTCC_CLAIMS, *R2CCL_TRAINING, *R2CCL_SCHEDULES, *R2CCL_FAILURES, *OBSERVATION_CLAIMS)
"""All, in the order of the table."""
