"""`Fabric`: makes, changes, shows, uses and removes the hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from optcc.errors import EnvironmentMissing, InputError, RuntimeFault
from optcc.experiments.fabric.mpi import (
    SET_HOST_NAME,
    exported_variables,
    find_mpirun,
    launch_agent,
    launch_environment,
    mpirun_arguments,
)
from optcc.experiments.fabric.processes import (
    RUN_VARIABLE,
    RunResult,
    end_processes,
    inside,
    launch,
    started_by,
    termination_raises,
    undisturbed,
)
from optcc.experiments.fabric.programs import (
    allow_cubic,
    call,
    can_make_namespaces,
    check_private,
    program_path,
    read_state_file,
    remove,
    require_right,
    which,
    write_file,
)
from optcc.experiments.fabric.scripts import (
    blackhole_rules,
    core_batch,
    core_port,
    core_shapers,
    host_batch,
    host_shapers,
    inside_settings,
    namespace_settings,
    namespaces_of,
    no_blackhole_rules,
    settings_script,
    shaper_line,
)
from optcc.experiments.fabric.spec import (
    NAME,
    FabricSpec,
    NicRates,
    NicTarget,
    check_name,
    control_address,
    core_namespace,
    host_namespace,
    namespace_owner,
    nic_address,
)
from optcc.experiments.fabric.state import FAILURES, FabricState, NicState, hint
from optcc.experiments.fabric.status import (
    FabricStatus,
    HostStatus,
    LinkStatus,
    NicStatus,
    all_namespaces,
    blackholes,
    condition,
    differences_of,
    observe,
)

RUN_ROOT: Final = Path("/run/optcc")
RUN_TIMEOUT_S: Final = 600.0
_LOCK_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class Fabric:
    """A handle on the fabric called `name`; it keeps no state but the name.

    `action` says what `up` did ("made", "kept", "rebuilt", "replaced"; "attached" for a handle made otherwise) and
    `notes` what the user should know of it. As a context manager it takes the fabric down at the end, unless `up` found
    it standing.
    """

    name: str = "default"
    run_root: Path = RUN_ROOT
    action: str = "attached"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.action != "kept":
            with undisturbed():
                self.down()

    # ---- life

    @classmethod
    def up(cls, spec: FabricSpec, *, replace: bool = False, run_root: Path = RUN_ROOT) -> Fabric:
        """Builds the fabric of `spec`.

        A fabric of the same spec that is as declared is kept, its failures too; one that is not as declared is rebuilt,
        and the handle's `notes` give the reason. With `replace` an existing one is removed first. If building fails,
        everything is undone.

        Raises InputError if a fabric of another spec is up, or namespaces of this name exist without a state file;
        EnvironmentMissing without the privileges; RuntimeFault if the kernel refuses.
        """
        reason = can_make_namespaces()
        if reason is not None:
            raise EnvironmentMissing(f"fabric: {reason}")
        handle = cls(spec.name, run_root)
        with handle._locked(), termination_raises():
            action, notes = ("replaced", []) if replace and handle._traces() else handle._judge(spec)
            if action == "kept":
                return dataclasses.replace(handle, action=action, notes=tuple(notes))
            try:
                if action != "made":
                    handle._tear_down()
                notes += handle._build(spec)
            except BaseException:
                with undisturbed():
                    handle._tear_down()
                raise
        return dataclasses.replace(handle, action=action, notes=(*notes, *spec.warnings()))

    def down(self) -> tuple[str, ...]:
        """Removes the fabric, complete or partial, with the processes inside it; returns the names of what was removed.

        Raises RuntimeFault if a process inside does not end.
        """
        require_right()
        with self._locked(), undisturbed():
            return self._tear_down()

    # ---- change

    def set_rate(self, target: str | NicTarget, rates: NicRates) -> FabricState:
        """New rates for one NIC, or for each NIC of a host, while it runs. A failure stays a failure."""
        with self._changing(target) as (state, chosen):
            self._shape(dict.fromkeys(chosen, rates))
            return self._save(state.with_nics({p: NicState(rates, state.nics[p[0]][p[1]].failure) for p in chosen}))

    def fail(self, target: str | NicTarget, how: str = "down") -> FabricState:
        """Fails one NIC, or each NIC of a host.

        `how`: "down" the host's interface; "carrier" the cable, pulled at the far end (only the host sees it);
        "blackhole" all packets vanish silently, "blackhole-out" what the host sends, "blackhole-in" what it receives.
        """
        if how not in FAILURES:
            raise InputError(f"failure {how!r}: one of {', '.join(FAILURES)}")
        if how.startswith("blackhole"):
            program_path("nft", "nftables")
        with self._changing(target) as (state, chosen):
            rules = "".join(blackhole_rules(*pair, how) for pair in chosen) if how.startswith("blackhole") else ""
            self._link(chosen, host_up=how != "down", core_up=how != "carrier", rules=rules)
            return self._save(state.with_nics({p: NicState(state.nics[p[0]][p[1]].rates, how) for p in chosen}))

    def heal(self, target: str | NicTarget) -> FabricState:
        """One NIC, or each NIC of a host, as first declared: links up, no packet dropped, the declared rates."""
        with self._changing(target) as (state, chosen):
            declared = {(host, nic): state.spec.rates[host][nic] for host, nic in chosen}
            self._shape(declared)
            self._link(chosen, host_up=True, core_up=True, rules="")
            return self._save(state.with_nics({pair: NicState(rates) for pair, rates in declared.items()}))

    # ---- look

    def state(self) -> FabricState:
        """What is declared.

        Raises InputError if there is no such fabric, its maker was killed before it stood, or its file is not ours.
        """
        state = self._load()
        if state is None:
            raise InputError(f"fabric {self.name}: not up; make it with `{hint('up', self.name)} 4x2@200Mbit/s`")
        if state.phase != "up":
            raise InputError(
                f"fabric {self.name}: left over from process {state.pid}, killed while it built: "
                f"run `{hint('down', self.name)}`"
            )
        return state

    def status(self) -> FabricStatus:
        """What is declared and what the kernel says, host by host."""
        require_right()
        state, leftovers = self._load(), self._leftovers()
        if state is None:
            return FabricStatus(self.name, "absent", None, None, None, (), (), leftovers, ())
        seen = {namespace: observe(namespace) for namespace in namespaces_of(state.spec)}
        holes = blackholes(self.name)
        hosts = tuple(self._host_status(state, host, seen, holes) for host in range(state.spec.hosts))
        try:
            topology = state.topology_text()
        except InputError:
            topology = None
        differences = differences_of(state, seen, holes)
        common = (self.name, state.phase, state.pid, state.spec.text, topology)
        return FabricStatus(*common, hosts, differences, leftovers, state.spec.warnings())

    def control_bytes(self) -> int:
        """Bytes that the hosts have sent over the control network so far; a check that data goes over the NICs."""
        return sum(host.control_tx_bytes for host in self.status().hosts)

    def topology_text(self) -> str:
        """The hosts as a topology in one argument, the surviving NICs of each pooled."""
        return self.state().topology_text()

    # ---- use

    def host_command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside a host, under its host name; `down` ends what it leaves there."""
        enter = [
            program_path("ip"),
            "netns",
            "exec",
            host_namespace(self.name, host),
            program_path("unshare", "util-linux"),
        ]
        return [*enter, "--uts", "/bin/sh", "-c", SET_HOST_NAME, f"h{host}", *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        n_ranks: int | None = None,
        timeout_s: float = RUN_TIMEOUT_S,
        mpi_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        mpirun: str | None = None,
        arguments: Callable[..., list[str]] | None = None,
    ) -> RunResult:
        """`mpirun` of `argv`, launched from h0: the hosts' ranks in their order, for the first `n_ranks` (all).

        The ranks get PATH, PYTHONPATH, VIRTUAL_ENV, LD_LIBRARY_PATH, OMPI_* and OPTCC_* of the caller, then `env`, and
        OPTCC_TOPOLOGY: these hosts as they are now; OPTCC_SOCKET_IFNAME leaves out the control network, and
        OPTCC_INSIDE_IFNAME names what is shaped inside, with which ranks share no memory, unless the caller has said
        otherwise. Unless captured, stdout and stderr pass through live. However it ends, no process of the run and no
        file of it is left. `mpirun` may be another launcher; `arguments` then makes its arguments, of what
        `mpirun_arguments` is given.

        Raises DeadlineExceeded after `timeout_s`; InputError for a bad count or a host without a NIC;
        EnvironmentMissing without Open MPI 5.
        """
        require_right()
        state = self.state()
        spec = state.spec
        ranks = spec.hosts * spec.ranks if n_ranks is None else n_ranks
        if not 1 <= ranks <= spec.hosts * spec.ranks or ranks % spec.ranks:
            a_host = "one a host" if spec.ranks == 1 else f"{spec.ranks} a host"
            raise InputError(f"{ranks} ranks: {a_host}, and fabric {self.name} has {spec.hosts} hosts")
        hosts = ranks // spec.ranks
        if not argv:
            raise InputError("no command: write it after --, for example `-- python train.py`")
        if timeout_s <= 0:
            raise InputError(f"timeout {timeout_s} s: must be above zero")
        program = find_mpirun() if mpirun is None else mpirun
        self._sweep_runs()
        given = {"OPTCC_FABRIC": self.name, **(env or {})}
        if "OPTCC_SOCKET_IFNAME" not in os.environ:
            given.setdefault("OPTCC_SOCKET_IFNAME", "eth")
        if spec.inside is not None and "OPTCC_INSIDE_IFNAME" not in os.environ:
            given.setdefault("OPTCC_INSIDE_IFNAME", "in")
        state.topology_text(hosts)  # raises if a host has no NIC left
        with termination_raises(), self._run_folder() as folder:
            if "OPTCC_TOPOLOGY" not in given:
                given["OPTCC_TOPOLOGY"] = self._topology_for(state, hosts, folder)
            environment = launch_environment(os.environ, given)
            environment |= {RUN_VARIABLE: f"{self.name}/{folder.name}", "TMPDIR": str(folder / "tmp")}
            (folder / "tmp").mkdir(mode=0o700)
            write_file(folder / "agent", launch_agent(self.name), 0o700)
            hostfile = "".join(f"{control_address(host)} slots={spec.ranks}\n" for host in range(hosts))
            write_file(folder / "hosts", hostfile)
            words = (arguments or mpirun_arguments)(
                agent=str(folder / "agent"),
                hostfile=str(folder / "hosts"),
                nics=state.spec.nics,
                ranks=ranks,
                exported=sorted({*exported_variables(environment), *given}),
                extra=mpi_args,
            )
            if spec.ranks > 1 and "self,tcp" in words:  # ranks of a host over shared memory
                words[words.index("self,tcp")] = "self,sm,tcp"
            # If this process is killed, the kernel sends SIGTERM to mpirun, which ends its ranks.
            tied = [program_path("setpriv", "util-linux"), "--pdeathsig", "TERM", "--"]
            command = self.host_command(0, [program, *words, *argv])
            return launch([*tied, *command], environment, timeout_s, capture)

    @staticmethod
    def _topology_for(state: FabricState, hosts: int, folder: Path) -> str:
        """What OPTCC_TOPOLOGY says of the first `hosts` hosts: a text, or a file for hosts of several ranks."""
        if state.spec.ranks == 1:
            return state.topology_text(hosts)
        path = folder / "topology.toml"
        write_file(path, state.topology(hosts).to_toml())
        return str(path)

    # ---- inside: files

    @property
    def directory(self) -> Path:
        """Where the state and the runs of this fabric are."""
        return self.run_root / self.name

    @property
    def _state_path(self) -> Path:
        return self.directory / "state.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time on this machine; raises RuntimeFault if another one does not finish."""
        require_right()
        self.run_root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(self.run_root)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.run_root / "lock", flags, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RuntimeFault(
                            f"fabric {self.name}: another fabric command is still at work after {_LOCK_TIMEOUT_S:.0f} s"
                        ) from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    def _load(self) -> FabricState | None:
        """What is declared, None if nothing is; raises InputError if the file is not ours."""
        require_right()
        try:
            check_private(self.directory)
            text = read_state_file(self._state_path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(
                f"state of fabric {self.name}: cannot be read ({error}): run `{hint('down', self.name)}`"
            ) from None
        return FabricState.from_json(text, self.name)

    def _save(self, state: FabricState) -> FabricState:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        check_private(self.directory)
        write_file(self._state_path, state.to_json())
        return state

    # ---- inside: life

    def _own_namespaces(self) -> tuple[str, ...]:
        return tuple(namespace for namespace in all_namespaces() if namespace_owner(namespace) == self.name)

    def _leftovers(self) -> tuple[str, ...]:
        """Namespaces in our style, of any name, that no state file declares."""
        kept = {}
        for namespace in all_namespaces():
            owner = namespace_owner(namespace)
            if owner is not None:
                kept[namespace] = owner
        declared = set()
        for owner in set(kept.values()):
            with contextlib.suppress(InputError):
                state = Fabric(owner, self.run_root)._load()
                declared |= set(namespaces_of(state.spec)) if state else set()
        return tuple(sorted(set(kept) - declared))

    def _traces(self) -> bool:
        """True if anything of this fabric is there."""
        return self.directory.is_symlink() or self.directory.exists() or bool(self._own_namespaces())

    def _judge(self, spec: FabricSpec) -> tuple[str, list[str]]:
        """The action of `up` for `spec`, and the notes on it; raises InputError if another fabric is in the way."""
        state = self._load()
        if state is None:
            left = self._own_namespaces()
            if left:
                raise InputError(
                    f"fabric {self.name}: namespace {left[0]} is left over from a killed run: "
                    f"run `{hint('down', self.name)}`, or up with --replace"
                )
            return ("rebuilt", [f"{self.directory} held no state: removed"]) if self._traces() else ("made", [])
        if state.phase != "up":
            return "rebuilt", [f"process {state.pid} was killed while it built fabric {self.name}: built anew"]
        if state.spec != spec:
            raise InputError(
                f"fabric {self.name}: {state.spec.text} stands, not {spec.text}: "
                f"run `{hint('down', self.name)}` first, or up with --replace"
            )
        seen = {namespace: observe(namespace) for namespace in namespaces_of(spec)}
        differences = differences_of(state, seen, blackholes(self.name))
        if differences:
            return "rebuilt", [f"fabric {self.name} was not as declared ({differences[0]}): built anew"]
        changed = [
            f"{NicTarget(host, nic).text} {now.failure or now.rates.text}"
            for host, row in enumerate(state.nics)
            for nic, now in enumerate(row)
            if now != NicState(spec.rates[host][nic])
        ]
        return "kept", [f"kept as it is: {', '.join(changed)}"] if changed else []

    def _build(self, spec: FabricSpec) -> list[str]:
        """Makes everything of `spec`; notes on what was changed outside the namespaces."""
        self._save(FabricState.fresh(spec, "building", os.getpid()))
        notes = allow_cubic()
        names = namespaces_of(spec)
        core, hosts = names[0], names[1:]
        call(["ip", "-batch", "-"], "".join(f"netns add {namespace}\n" for namespace in names))
        script = settings_script(namespace_settings())
        for namespace in names:
            call(["ip", "netns", "exec", namespace, "/bin/sh", "-c", script], label=f"settings of {namespace}")
        call(["ip", "-n", core, "-batch", "-"], core_batch(spec))
        call(["tc", "-n", core, "-batch", "-"], core_shapers(spec))
        more = settings_script(inside_settings(spec))
        for host, namespace in enumerate(hosts):
            call(["ip", "netns", "exec", namespace, "/bin/sh", "-c", more], label=f"settings of {namespace}")
            call(["tc", "-n", namespace, "-batch", "-"], host_shapers(spec, host))
            call(["ip", "-n", namespace, "-batch", "-"], host_batch(spec, host))
        self._save(FabricState.fresh(spec, "up", os.getpid()))
        return notes

    def _tear_down(self) -> tuple[str, ...]:
        """Removes processes, namespaces and files, whatever there is of them; their names."""
        namespaces = self._own_namespaces()
        end_processes(lambda: inside(namespaces))
        if namespaces:
            call(["ip", "-force", "-batch", "-"], "".join(f"netns delete {namespace}\n" for namespace in namespaces))
        removed = list(namespaces)
        if self.directory.is_symlink() or self.directory.exists():
            remove(self.directory)
            removed.append(str(self.directory))
        return tuple(removed)

    # ---- inside: change

    @contextlib.contextmanager
    def _changing(self, target: str | NicTarget) -> Iterator[tuple[FabricState, tuple[tuple[int, int], ...]]]:
        """The state, under the lock, and the (host, NIC) pairs of `target`."""
        aim = NicTarget.parse(target) if isinstance(target, str) else target
        with self._locked():
            state = self.state()
            yield state, aim.nics_of(state.spec)

    def _shape(self, rates: Mapping[tuple[int, int], NicRates]) -> None:
        """Sets the shapers of some NICs, both directions."""
        for host in {host for host, _ in rates}:
            lines = [shaper_line(f"eth{nic}", new.bits_out) for (at, nic), new in rates.items() if at == host]
            call(["tc", "-n", host_namespace(self.name, host), "-batch", "-"], "\n".join(lines) + "\n")
        lines = [shaper_line(core_port(host, nic), new.bits_in) for (host, nic), new in rates.items()]
        call(["tc", "-n", core_namespace(self.name), "-batch", "-"], "\n".join(lines) + "\n")

    def _link(self, pairs: Sequence[tuple[int, int]], *, host_up: bool, core_up: bool, rules: str) -> None:
        """Puts both ends of some cables up or down, and their nft rules to `rules`."""
        if which("nft") is not None:
            text = rules or "".join(no_blackhole_rules(*pair) for pair in pairs)
            nft = [program_path("nft", "nftables"), "-f", "-"]
            call(["ip", "netns", "exec", core_namespace(self.name), *nft], text)
        word = {True: "up", False: "down"}
        lines = [f"link set {core_port(host, nic)} {word[core_up]}" for host, nic in pairs]
        call(["ip", "-n", core_namespace(self.name), "-batch", "-"], "\n".join(lines) + "\n")
        for host in {host for host, _ in pairs}:
            lines = [f"link set eth{nic} {word[host_up]}" for at, nic in pairs if at == host]
            call(["ip", "-n", host_namespace(self.name, host), "-batch", "-"], "\n".join(lines) + "\n")

    # ---- inside: look

    def _host_status(
        self, state: FabricState, host: int, seen: Mapping[str, Mapping[str, LinkStatus]], holes: frozenset[str]
    ) -> HostStatus:
        links = seen[host_namespace(self.name, host)]
        control = links.get("ctl")
        nics = []
        for nic, now in enumerate(state.nics[host]):
            link = links.get(f"eth{nic}")
            nics.append(
                NicStatus(
                    name=f"eth{nic}",
                    address=nic_address(host, nic),
                    declared=state.spec.rates[host][nic],
                    rates=now.rates,
                    failure=now.failure,
                    state=condition(link, core_port(host, nic) in holes),
                    tx_bytes=link.tx_bytes if link else 0,
                    rx_bytes=link.rx_bytes if link else 0,
                )
            )
        return HostStatus(
            name=f"h{host}",
            namespace=host_namespace(self.name, host),
            control_address=control_address(host),
            control_tx_bytes=control.tx_bytes if control else 0,
            control_rx_bytes=control.rx_bytes if control else 0,
            nics=tuple(nics),
        )

    # ---- inside: runs

    @contextlib.contextmanager
    def _run_folder(self) -> Iterator[Path]:
        """A folder for one run; at the end the processes that carry its mark are ended and the folder is removed."""
        number = 0
        while True:
            folder = self.directory / f"run-{os.getpid()}-{number}"
            try:
                folder.mkdir(mode=0o700)
                break
            except FileExistsError:
                number += 1
        try:
            yield folder
        finally:
            with undisturbed():
                self._end_run(folder)

    def _end_run(self, folder: Path) -> None:
        try:
            end_processes(lambda: started_by(f"{self.name}/{folder.name}"))
        finally:
            remove(folder)

    def _sweep_runs(self) -> None:
        """Removes what runs left behind whose process was killed."""
        for folder in self.directory.glob("run-*-*"):
            pid = folder.name.split("-")[1]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                self._end_run(folder)


def fabrics(run_root: Path = RUN_ROOT) -> tuple[str, ...]:
    """The names of all fabrics with a state file or a namespace."""
    require_right()
    names = {owner for namespace in all_namespaces() if (owner := namespace_owner(namespace)) is not None}
    with contextlib.suppress(FileNotFoundError):
        names |= {entry.name for entry in run_root.iterdir() if entry.is_dir() and NAME.fullmatch(entry.name)}
    return tuple(sorted(names))
