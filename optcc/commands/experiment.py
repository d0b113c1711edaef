"""`optcc experiment`: every question that is answered by a record, a command each."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import click

from optcc.cli import echo_card, echo_json, json_option
from optcc.errors import did_you_mean
from optcc.experiments.made import made_at, said_code, said_date
from optcc.experiments.record import RECORDS
from optcc.experiments.recorder import exit_on_sigterm
from optcc.show import Card

LIST = "list"
OTHERWISE = {"fabric-4x2-half.json": "optcc demo --full"}
"""Records that come along and are those of another command."""
NOT_MADE = "not made yet"
_HERE = "optcc.experiments."
_HOSTS = "root, for emulated hosts"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, and where its command is: `command` of `module`, unless `attribute` says another name.

    `needs` is what it cannot do without beyond this package; `record` the file of `experiments/records/` that it makes.
    `peers` are the libraries that it measures in the same session, in jobs of their own; of an experiment on emulated
    hosts without any, why.
    """

    question: str
    module: str
    record: str
    needs: str = ""
    attribute: str = "command"
    peers: str = ""

    def load(self) -> click.Command:
        """The command; imports its module."""
        command = getattr(import_module(self.module), self.attribute)
        assert isinstance(command, click.Command)
        return command


def _on_fabric(question: str, module: str, record: str, *, peers: str) -> Experiment:
    return Experiment(question, f"{_HERE}{module}", record, _HOSTS, peers=peers)


def _of_training(question: str, record: str, attribute: str = "command") -> Experiment:
    module, needs = f"{_HERE}training_failures", f"{_HOSTS}; torch (make test-torch)"
    return Experiment(question, module, record, needs, attribute, "Gloo")


EXPERIMENTS = {
    "authentication-cost": Experiment(
        "what an authentication tag on every frame costs", f"{_HERE}authentication_cost", "authentication-cost.json"
    ),
    "auto-measured": _on_fabric(
        "how near auto comes to the best schedule on loopback, MPI and TCP",
        "auto_measured",
        "auto-measured.json",
        peers="none: the library's schedules are compared with each other",
    ),
    "auto-ratios": Experiment(
        "how near auto comes to the bound, by ranks and rates", f"{_HERE}auto_ratios", "auto-ratios.json"
    ),
    "bound-curves": Experiment(
        "the bound and the ring against lost bandwidth and ranks", f"{_HERE}bound_record", "bound-curves.json"
    ),
    "chunk-counts": Experiment(
        "AllReduce by the number of chunks on three hosts, one of which lost a NIC of three",
        f"{_HERE}chunk_counts",
        "chunk-counts.json",
    ),
    "collectives-on-fabric": _on_fabric(
        "six collectives beside Open MPI's best, by state of the hosts",
        "collectives_on_fabric",
        "collectives-on-fabric.json",
        peers="Open MPI",
    ),
    "executor-speed": Experiment(
        "what a step of the executor costs, and where", f"{_HERE}executor_speed", "executor-speed.json"
    ),
    "failover-speed": _on_fabric(
        "how long a collective stands still when a NIC fails",
        "failover_speed",
        "failover-speed.json",
        peers="none: failure-trace has them",
    ),
    "failure-study": Experiment(
        "AllReduce with failed NICs, by cluster size and failures: Monte Carlo",
        "optcc.commands.study",
        "failure-study.json",
        attribute="failures",
    ),
    "failure-trace": _on_fabric(
        "AllReduces in a row before, while and after a NIC fails, beside Open MPI",
        "failure_trace",
        "failure-trace.json",
        peers="Open MPI",
    ),
    "first-use": Experiment(
        "how long commands take on a fresh installation, and after", f"{_HERE}first_use", "first-use.json"
    ),
    "forestcoll-rows": Experiment(
        "AllGather and ReduceScatter beside ForestColl's throughput and the bound",
        f"{_HERE}forestcoll_rows",
        "forestcoll-rows.json",
    ),
    "gpu-battery": Experiment(
        "whether the device path is right and fast on a GPU", f"{_HERE}gpu_battery", "gpu-battery.json", "a GPU"
    ),
    "gpu-files": Experiment(
        "what public MSCCL and MSCCL++ files are, judged",
        f"{_HERE}gpu_files",
        "gpu-files.json",
        "checkouts of public repositories",
    ),
    "kernels": Experiment(
        "what reductions and copies reach of the memory's bandwidth", f"{_HERE}kernel_bench", "kernels-cpu.json"
    ),
    "late-rank": Experiment(
        "AllReduce with a rank that is late, slow, or both: StragglAR, a ring and ours",
        f"{_HERE}late_rank",
        "late-rank.json",
    ),
    "loss-patterns": Experiment(
        "how near schedules come to the bound when any NICs of any servers are lost",
        f"{_HERE}loss_patterns",
        "loss-patterns.json",
    ),
    "lost-nics": Experiment(
        "the field's schedules and ours on servers of eight GPUs that lost NICs", f"{_HERE}lost_nics", "lost-nics.json"
    ),
    "mid-collective": _on_fabric(
        "what a NIC costs that is lost or slow in mid-collective",
        "mid_collective",
        "mid-collective.json",
        peers="none: failure-trace has them",
    ),
    "observation-cost": _on_fabric(
        "what status, recorder and taps cost",
        "observation_cost",
        "observation-cost.json",
        peers="none: a job that is observed is compared with one that is not",
    ),
    "passing-congestion": _on_fabric(
        "AllReduce while congestion comes and goes at a NIC, beside Open MPI",
        "passing_congestion",
        "passing-congestion.json",
        peers="Open MPI",
    ),
    "peers-on-fabric": _on_fabric(
        "AllReduce beside Open MPI, MPICH and Gloo, by state of the hosts",
        "peers_on_fabric",
        "peers-on-fabric.json",
        peers="Open MPI, MPICH, Gloo",
    ),
    "planning-speed": Experiment(
        "how long planning and proofs take, by ranks", f"{_HERE}planning_speed", "planning-speed.json"
    ),
    "recovery-models": Experiment(
        "what failing NICs cost a job that recovers as AdapCC, DejaVu, R2CCL or by a restart: a model",
        f"{_HERE}recovery_models",
        "recovery-models.json",
    ),
    "reranking": Experiment(
        "what R2CCL's re-ranking gains where servers lost different rails", f"{_HERE}reranking", "reranking.json"
    ),
    "schedule-ratios": Experiment(
        "schedules in simulation against the bound: stragglers and random rates",
        f"{_HERE}schedule_record",
        "schedule-ratios.json",
    ),
    "seen-failure": _on_fabric(
        "how the loss of a NIC in training shows in status, traces and taps",
        "seen_failure",
        "seen-failure.json",
        peers="none: it is what optcc shows of its own job",
    ),
    "servers-on-fabric": _on_fabric(
        "AllReduce on hosts of several ranks, beside Open MPI",
        "servers_on_fabric",
        "servers-on-fabric.json",
        peers="Open MPI",
    ),
    "simulator-exports": Experiment(
        "whether LogGOPSim and ASTRA-sim say of our exports what simulate says",
        f"{_HERE}simulator_exports",
        "simulator-exports.json",
        "LogGOPSim and ASTRA-sim",
    ),
    "soak": _on_fabric(
        "whether ten minutes of random faults on emulated hosts cost a bit",
        "soak",
        "soak.json",
        peers="none: sums are checked, and no time is compared",
    ),
    "swarm": Experiment(
        "whether random faults break a promise of the protocol, in simulated time", f"{_HERE}swarm", "swarm.json"
    ),
    "tool-speed": Experiment("how fast verification and simulation are", f"{_HERE}tool_speed", "tool-speed.json"),
    "torch-suite": Experiment(
        "which of torch's own tests of distributed backends pass, beside Gloo",
        f"{_HERE}torch_suite",
        "torch-suite.json",
        "torch (make test-torch)",
    ),
    "training": Experiment(
        "training steps and inference of named models with failed NICs: Monte Carlo",
        "optcc.commands.study",
        "training.json",
        attribute="train",
    ),
    "training-failures": _of_training(
        "training a GPT while a NIC is lost, slow and back, beside Gloo", "training-failures.json"
    ),
    "training-long": _of_training(
        "200 steps of training, a NIC down from step 50 to 100, beside Gloo", "training-long.json", "long_command"
    ),
    "transport-speed": Experiment(
        "what a message costs over each transport, beside plain sockets and Open MPI",
        f"{_HERE}transport_speed",
        "transport-speed.json",
    ),
    "untold": _on_fabric(
        "how near to the bound hosts come of which nobody declares anything",
        "untold",
        "untold.json",
        peers="Open MPI, MPICH, Gloo",
    ),
    "versions": _on_fabric(
        "what two checkouts of this project take, in turns",
        "compare_versions",
        "versions.json",
        peers="none: two checkouts of this project are compared",
    ),
}
"""By name. An experiment that measures ranks starts them itself."""


def commands_of_records() -> dict[str, str]:
    """By which command each record is made, by the name of its file."""
    return OTHERWISE | {each.record: f"optcc experiment {name}" for name, each in EXPERIMENTS.items()}


class Experiments(click.Group):
    """Commands that are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return [LIST, *sorted(EXPERIMENTS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name == LIST:
            return show
        return EXPERIMENTS[cmd_name].load() if cmd_name in EXPERIMENTS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuses an experiment that there is not with the one that it resembles."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            ctx.fail(f"No such experiment {args[0]!r}{did_you_mean(args[0], names)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        rows = [(LIST, "list the experiments"), *((name, each.question) for name, each in sorted(EXPERIMENTS.items()))]
        with formatter.section("Experiments"):
            formatter.write_dl(rows)


@click.group("experiment", cls=Experiments, no_args_is_help=False)
def command() -> None:
    """Answer a question by a measurement or a study, and keep the record that figures and docs are made of.

    \b
    Example:
      optcc experiment list
      optcc experiment bound-curves -o bound-curves.json
    """
    exit_on_sigterm()


@click.command(LIST, epilog="Example: optcc experiment list --json")
@json_option
def show(as_json: bool) -> None:
    """The experiments: the question of each, its record, what it needs, when the record was made, and how old it is.

    A record is older than what it measures if the source of a package that it names is another now. Peers are libraries
    that are measured in the same session, in jobs of their own.
    """
    if as_json:
        echo_json(
            [
                {"name": name, "question": each.question, "record": each.record}
                | {"needs": each.needs, "peers": each.peers}
                | dict(zip(("made", "code"), _age(each), strict=True))
                for name, each in sorted(EXPERIMENTS.items())
            ]
        )
        return
    rows = tuple(
        (name, each.question, each.record, each.needs, each.peers, *_age(each))
        for name, each in sorted(EXPERIMENTS.items())
    )
    echo_card(Card("experiments", ("name", "question", "record", "needs", "peers", "made", "code"), rows))


def _age(experiment: Experiment) -> tuple[str, str]:
    """When the record that comes along was made, and whether what it measures has changed since."""
    path = RECORDS / experiment.record
    if not path.is_file():
        return NOT_MADE, NOT_MADE
    made = made_at(path)
    return said_date(made), said_code(made)
