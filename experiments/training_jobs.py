"""Which jobs are studied: models, GPUs, clusters and published claims, each number with its source."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from optcc.experiments.failure_model import Pattern, Uniform
from optcc.experiments.training_model import GpuModel, Serving, TrainingJob, TransformerModel

GPT3_TABLE = "GPT-3 (arXiv 2005.14165, Table 2.1)"
GPT3_3B = TransformerModel("GPT-3 2.7B", 2_700_000_000, 32, 2560, GPT3_TABLE)
GPT3_7B = TransformerModel("GPT-3 6.7B", 6_700_000_000, 32, 4096, GPT3_TABLE)
GPT3_175B = TransformerModel("GPT-3 175B", 175_000_000_000, 96, 12_288, GPT3_TABLE)
LLAMA_405B = TransformerModel("Llama 3 405B", 405_000_000_000, 126, 16_384, "Llama 3 (arXiv 2407.21783, Table 3)")
A100 = GpuModel("A100", 312 * 10**12, 2_039 * 10**9, "NVIDIA A100 80 GB SXM data sheet")
H100 = GpuModel("H100", 989_400_000_000_000, 3_350 * 10**9, "NVIDIA H100 SXM data sheet")


@dataclass(frozen=True, slots=True)
class OverheadClaim:
    """A published overhead of a training step, and with which failures it was found."""

    pattern: Pattern
    servers: int
    overhead: Fraction
    source: str


CLAIMS = (
    OverheadClaim(
        Uniform(1), 64, Fraction(15, 1000), "R2CCL's simulation of 512 GPUs, 1 failure: 1.5 % (secondary source)"
    ),
    OverheadClaim(
        Uniform(10), 64, Fraction(43, 1000), "R2CCL's simulation of 512 GPUs, 10 failures: 4.3 % (secondary source)"
    ),
)

_FAST, _HALF_FAST = Fraction(50 * 10**9), Fraction(25 * 10**9)
_MESSAGE_S = Fraction(5, 10**6)
_BUCKET = 40_000_000 * 4
"""Megatron-LM's bucket of a GPU with few replicas: 40 million parameters, of four bytes."""
_ASSUMED_40 = "40 % of the GPU's peak"


def _plain(
    name: str,
    model: TransformerModel,
    gpu: GpuModel,
    servers: int,
    batch: int,
    micro: int,
    source: str,
    overlap: bool,
    nic_rate: Fraction = _FAST,
) -> TrainingJob:
    """Data parallel only."""
    return TrainingJob(
        name=name,
        model=model,
        gpu=gpu,
        servers=servers,
        nic_rate=nic_rate,
        tensor=1,
        pipeline=1,
        sequence_tokens=2048,
        batch_sequences=batch,
        microbatch_sequences=micro,
        achieved_flops_per_s=gpu.flops_per_s * 2 // 5,
        flops_per_parameter_token=6,
        gradient_bytes=4,
        bucket_bytes=_BUCKET,
        message_latency_s=_MESSAGE_S,
        overlap=overlap,
        source=source,
        assumed=f"{_ASSUMED_40}; microbatches of {micro}; 4-byte gradients; buckets of 40 M parameters; 5 us a message",
    )


_R2CCL_TESTBED = (
    "R2CCL (arXiv 2512.25059): {servers} servers of 8 H100 and 8 x 400 Gbit/s; batch of a step from " + GPT3_TABLE
)
_R2CCL_SIMULATED = (
    "R2CCL's simulation of 512 GPUs, 1 to 10 failures; its model, parallelism and network are not known to us. "
    "Batch of a step from " + GPT3_TABLE
)
SIMAI = (
    "R2CCL's simulation: SimAI, A100, Spectrum-X, 512 GPUs, 1 to 10 failures (secondary sources); model and batch are "
    "not known to us. SimAI's tutorial (aliyun/SimAI, docs/Tutorial.md): 400 Gbit/s a NIC is Spectrum-X's default, "
    "200 Gbit/s is in an example with A100, and there is no overlap unless a ratio is given"
)
_ONE_EACH = 512
"""A sequence for each of 512 GPUs, the smallest step that uses all of them."""
JOBS = (
    _plain("2.7B on 2 servers", GPT3_3B, H100, 2, 512, 4, _R2CCL_TESTBED.format(servers=2), True),
    _plain("2.7B on 4 servers", GPT3_3B, H100, 4, 512, 4, _R2CCL_TESTBED.format(servers=4), True),
    _plain("6.7B on 64 servers", GPT3_7B, A100, 64, 1024, 1, _R2CCL_SIMULATED, True),
    _plain("6.7B on 64 servers, no overlap", GPT3_7B, A100, 64, 1024, 1, _R2CCL_SIMULATED, False),
    _plain("6.7B as in SimAI, 400 Gbit/s", GPT3_7B, A100, 64, _ONE_EACH, 1, SIMAI, False),
    _plain("6.7B as in SimAI, 200 Gbit/s", GPT3_7B, A100, 64, _ONE_EACH, 1, SIMAI, False, _HALF_FAST),
    TrainingJob(
        name="175B on 128 servers",
        model=GPT3_175B,
        gpu=A100,
        servers=128,
        nic_rate=_HALF_FAST,
        tensor=8,
        pipeline=8,
        sequence_tokens=2048,
        batch_sequences=1536,
        microbatch_sequences=1,
        achieved_flops_per_s=140 * 10**12,
        flops_per_parameter_token=8,
        gradient_bytes=4,
        bucket_bytes=8 * _BUCKET,
        message_latency_s=_MESSAGE_S,
        overlap=True,
        source="Megatron-LM (arXiv 2104.04473, section 5.1): 1,024 A100, batch 1,536, 140 TFLOP/s a GPU, recomputation",
        assumed="pipeline of 8 without interleaving; microbatches of 1; 8 x 200 Gbit/s a server; 5 us a message",
    ),
    TrainingJob(
        name="405B on 2048 servers",
        model=LLAMA_405B,
        gpu=H100,
        servers=2048,
        nic_rate=_FAST,
        tensor=8,
        pipeline=16,
        sequence_tokens=8192,
        batch_sequences=2048,
        microbatch_sequences=1,
        achieved_flops_per_s=400 * 10**12,
        flops_per_parameter_token=6,
        gradient_bytes=4,
        bucket_bytes=8 * _BUCKET,
        message_latency_s=_MESSAGE_S,
        overlap=True,
        source="Llama 3 (arXiv 2407.21783, Table 4): 16,384 H100, TP 8, PP 16, DP 128, 16 M tokens, 400 TFLOP/s a GPU",
        assumed="1F1B without interleaving; AllReduce in place of FSDP; buckets as Megatron-LM; 5 us a message",
    ),
)
SERVINGS = (
    Serving(
        name="405B on 2 servers",
        model=LLAMA_405B,
        gpu=H100,
        servers=2,
        nic_rate=_FAST,
        batch_sequences=32,
        prompt_tokens=2000,
        prefill_share=Fraction(1, 2),
        memory_share=Fraction(7, 10),
        message_latency_s=_MESSAGE_S,
        source="Model and servers as in R2CCL's inference tests; batch, prompt and shares are assumed",
    ),
)
LOST = (1, 2, 3, 4)
