"""The fabric without a namespace: what people write, what `ip`, `tc` and `nft` are told, what a state file may say."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc.commands.fabric import command
from optcc.errors import EnvironmentMissing, InputError
from optcc.experiments.fabric import (
    Fabric,
    FabricSpec,
    FabricState,
    NicRates,
    NicState,
    NicTarget,
    blackhole_rules,
    check_name,
    core_batch,
    core_shapers,
    exact_rate,
    exported_variables,
    host_batch,
    host_shapers,
    launch_agent,
    lifecycle,
    mpi,
    mpirun_arguments,
    namespaces_of,
    no_blackhole_rules,
    shaper_line,
)
from optcc.units import parse_rate

SPEC = FabricSpec.parse("4x2@200Mbit/s", name="t")


# ---- what people write


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("4x2@200Mbit/s", "4x2@25MB/s"),
        ("4@25MB/s", "4x1@25MB/s"),
        ("1x1@1Gbit/s", "1x1@125MB/s"),
        ("4x2@200Mbit/s,3=100Mbit/s", "4x2@25MB/s,h3=12.5MB/s"),
        ("4x2@200Mbit/s,h3.eth1=100Mbit/s:50Mbit/s", "4x2@25MB/s,h3.eth1=12.5MB/s:6.25MB/s"),
        ("2@200Mbit/s:100Mbit/s", "2x1@25MB/s:12.5MB/s"),
        ("2@200Mbit/s,0=1Mbit/s,0=200Mbit/s", "2x1@25MB/s"),
        ("4x2@200Mbit/s/2ranks", "4x2@25MB/s/2ranks"),
        ("4x2@200Mbit/s/2ranks+1Gbit/s,3=100Mbit/s", "4x2@25MB/s/2ranks+125MB/s,h3=12.5MB/s"),
        ("4x2@200Mbit/s:100Mbit/s/1ranks", "4x2@25MB/s:12.5MB/s"),
    ],
)
def test_spec_is_read_and_shown(text: str, shown: str) -> None:
    spec = FabricSpec.parse(text)
    assert spec.text == shown
    assert FabricSpec.parse(spec.text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write HOSTSxNICS@RATE"),
        ("4x2", "write HOSTSxNICS@RATE"),
        ("4x2@fast", "rate 'fast'"),
        ("4x2@0Mbit/s", "must be above zero"),
        ("0x2@1Gbit/s", "0 hosts: a fabric has 1 to 64"),
        ("65@1Gbit/s", "65 hosts"),
        ("4x17@1Gbit/s", "17 NICs a host"),
        ("4x2@1Gbit/s/0ranks", "0 ranks a host: a fabric has 1 to 16"),
        ("4x2@1Gbit/s/1ranks+1Gbit/s", "+125MB/s: must be one rate, for hosts of several ranks"),
        ("4x2@1Gbit/s/2ranks+1Gbit/s:2Gbit/s", "must be one rate"),
        ("4x2@1Gbit/s+1Gbit/s", "write HOSTSxNICS@RATE"),
        ("4x0@1Gbit/s", "0 NICs a host"),
        ("4@1kbit/s", "an emulated NIC has 100kbit/s to 20Gbit/s"),
        ("4@400Gbit/s", "an emulated NIC has 100kbit/s to 20Gbit/s"),
        ("4@1000000.3bit/s", "whole number of bit/s"),
        ("4@1Gbit/s,4=1Mbit/s", "h4: fabric default has the hosts h0 to h3"),
        ("4@1Gbit/s,3.eth1=1Mbit/s", "h3.eth1: h3 of fabric default has eth0 to eth0"),
        ("4@1Gbit/s,3", "'3': write HOST=RATE"),
        ("4@1Gbit/s,3=3/8", "rate '3/8'"),
        ("4@1Gbit/s,x=1Mbit/s", "'x': write a host"),
    ],
)
def test_bad_spec_names_value_and_rule(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        FabricSpec.parse(text)
    assert says in str(caught.value)


def test_overrides_come_last() -> None:
    spec = FabricSpec.parse("4x2@200Mbit/s,3=100Mbit/s", overrides=["3.eth0=50Mbit/s"])
    assert [rates.bits_out for rates in spec.rates[3]] == [50_000_000, 100_000_000]


def test_rows_must_be_alike() -> None:
    rates = NicRates.parse("1Gbit/s")
    with pytest.raises(InputError, match="h1 has 1 NICs"):
        FabricSpec("t", ((rates, rates), (rates,)))


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a" * 25, "../x", "a b", "a/b", "a\n"])
def test_bad_names(name: str) -> None:
    with pytest.raises(InputError, match="fabric name"):
        check_name(name)
    with pytest.raises(InputError):
        Fabric(name)


@pytest.mark.parametrize("text", ["h", "hx", "h3.eth", "h3.ctl", "3.1", "", "h3.eth1.eth2", "h-1", "h1000"])
def test_bad_targets(text: str) -> None:
    with pytest.raises(InputError, match="write a host"):
        NicTarget.parse(text)


def test_targets_name_nics() -> None:
    assert NicTarget.parse("h3").nics_of(SPEC) == ((3, 0), (3, 1))
    assert NicTarget.parse("3.eth1").nics_of(SPEC) == ((3, 1),)


@pytest.mark.parametrize("text", ["1GiB/s", "1073741833bit/s", "1234567890.125B/s", "1000000000001bit/s", "25MB/s"])
def test_rates_are_shown_exactly(text: str) -> None:
    assert parse_rate(exact_rate(parse_rate(text))) == parse_rate(text)


def test_ceiling_warns_above_8_gbit() -> None:
    assert FabricSpec.parse("8x2@500Mbit/s").warnings() == ()
    assert "8.02 Gbit/s" in FabricSpec.parse("8x2@501Mbit/s").warnings()[0]
    assert FabricSpec.parse("8x2@100Mbit/s:1Gbit/s").warnings()


# ---- what ip, tc and nft are told


def test_namespaces() -> None:
    assert namespaces_of(SPEC) == ("optcc-t-core", "optcc-t-h0", "optcc-t-h1", "optcc-t-h2", "optcc-t-h3")


def test_core_batch_makes_cables_inside_the_namespaces() -> None:
    lines = core_batch(SPEC).splitlines()
    assert "link add name rail1 mtu 9000 type bridge forward_delay 0 stp_state 0 mcast_snooping 0" in lines
    assert "link add name h3e1 mtu 9000 type veth peer name eth1 mtu 9000 netns optcc-t-h3" in lines
    assert "link set h3e1 master rail1 up" in lines
    assert "link set h3c master ctl up" in lines
    assert len([line for line in lines if "type veth" in line]) == 4 * 3


def test_interface_names_fit_the_kernel() -> None:
    words = core_batch(FabricSpec.parse("64x16@1Mbit/s", name="a" * 24)).split()
    names = [after for word, after in itertools.pairwise(words) if word == "name"]
    assert max(map(len, names)) <= 15


def test_host_batch_gives_addresses() -> None:
    lines = host_batch(SPEC, 3).splitlines()
    assert lines[1:3] == ["address add 10.99.0.4/24 dev ctl", "link set ctl up"]
    assert "address add 10.101.0.4/24 dev eth1" in lines


def test_the_inside_of_a_host_leaves_by_one_cable_and_comes_back_by_another() -> None:
    spec = FabricSpec.parse("4x2@200Mbit/s/2ranks+1Gbit/s", name="t")
    core, host = core_batch(spec).splitlines(), host_batch(spec, 3).splitlines()
    assert "link add name h3r1 mtu 9000 type veth peer name in1 mtu 9000 netns optcc-t-h3" in core
    assert core.index("link set h3r1 master h3in up") > core.index(
        "link add name h3in mtu 9000 type bridge forward_delay 0 stp_state 0 mcast_snooping 0"
    )
    assert "rule add from 10.98.3.2 to 10.98.3.0/24 lookup 101 pref 10" in host
    assert host.index("rule add lookup local pref 20") < host.index("rule delete pref 0")
    assert shaper_line("in1", 10**9) in host_shapers(spec, 3).splitlines()
    assert shaper_line("h3r1", 10**9) in core_shapers(spec).splitlines()
    assert "rule" not in host_batch(SPEC, 3)


def test_ranks_of_a_host_have_its_nics_in_equal_parts() -> None:
    topology = FabricState.fresh(FabricSpec.parse("2x4@200Mbit/s/2ranks"), "up", 1).topology()
    assert [nic.gpu for nic in topology.servers[1].nics] == [0, 0, 1, 1]
    assert topology.rail_only and topology.n_ranks == 4


def test_shapers_send_at_the_host_and_receive_at_the_core() -> None:
    spec = SPEC.with_rates(NicTarget(3, 1), NicRates.parse("100Mbit/s:50Mbit/s"))
    assert host_shapers(spec, 3).splitlines()[1] == shaper_line("eth1", 100_000_000)
    assert shaper_line("h3e1", 50_000_000) in core_shapers(spec).splitlines()
    assert len(core_shapers(spec).splitlines()) == 8


@pytest.mark.parametrize(("bits", "burst"), [(10**6, 131072), (2 * 10**8, 200_000), (10**9, 1_000_000)])
def test_burst_is_8_ms_or_128_kib(bits: int, burst: int) -> None:
    assert f" burst {burst} " in shaper_line("eth0", bits)


@pytest.mark.parametrize(
    ("how", "hooks"),
    [("blackhole", ["ingress", "egress"]), ("blackhole-out", ["ingress"]), ("blackhole-in", ["egress"])],
)
def test_blackholes_are_at_the_core(how: str, hooks: list[str]) -> None:
    rules = blackhole_rules(3, 1, how)
    assert [hook for hook in ("ingress", "egress") if f'hook {hook} device "h3e1"' in rules] == hooks
    assert rules.startswith(no_blackhole_rules(3, 1))


def test_mpirun_gets_networks_and_not_interface_names() -> None:
    found = mpirun_arguments(agent="/r/agent", hostfile="/r/hosts", nics=2, ranks=4, exported=["A"], extra=["--x"])
    assert found[found.index("btl_tcp_if_include") + 1] == "10.100.0.0/24,10.101.0.0/24"
    assert found[found.index("plm_ssh_agent") + 1] == "/bin/sh /r/agent"
    assert found[found.index("prte_if_include") + 1] == "ctl"
    assert found[found.index("-x") + 1] == "A"
    assert found[-3:] == ["-n", "4", "--x"]


def test_ranks_get_no_trace_of_an_outer_job() -> None:
    outer = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_btl": "self", "PMIX_RANK": "0", "PYTHONPATH": "x", "SECRET": "y"}
    assert exported_variables(outer) == ["OMPI_MCA_btl", "PYTHONPATH"]


@pytest.mark.parametrize(
    ("arguments", "host", "line"),
    [
        (["10.99.0.4", "echo", "a  b"], "h3", "echo a  b"),
        (["-x", "-o", "Batch=yes", "-p", "22", "10.99.0.1", "true; true"], "h0", "true; true"),
    ],
)
def test_agent_maps_the_control_address_to_a_host(
    arguments: list[str], host: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "program_path", lambda program, _package="": f"{tmp_path}/{program}")
    ip = tmp_path / "ip"
    ip.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    ip.chmod(0o700)
    argv = ["/bin/sh", "-c", launch_agent("t"), "agent", *arguments]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    assert lines[:3] == ["netns", "exec", f"optcc-t-{host}"]
    assert lines[-4:] == [host, "/bin/sh", "-c", line]


@pytest.mark.parametrize("address", ["localhost", "10.99.0.", "10.99.0.x", "10.100.0.1", ""])
def test_agent_refuses_other_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "program_path", lambda program, _package="": f"/nonexistent/{program}")
    argv = ["/bin/sh", "-c", launch_agent("t"), "agent", address, "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10)
    assert done.returncode == 255
    assert "no control address" in done.stderr


# ---- what is declared


def test_state_survives_its_file() -> None:
    state = FabricState.fresh(SPEC.with_rates(NicTarget(1), NicRates.parse("1Mbit/s:2Mbit/s")), "up", 7)
    failed = state.with_nics({(2, 1): NicState(state.nics[2][1].rates, "blackhole-in")})
    assert FabricState.from_json(failed.to_json(), "t") == failed
    several = FabricState.fresh(FabricSpec.parse("4x2@200Mbit/s/2ranks+1Gbit/s", name="t"), "up", 7)
    assert FabricState.from_json(several.to_json(), "t") == several


def _broken(**changes: object) -> str:
    record = json.loads(FabricState.fresh(SPEC, "up", 7).to_json())
    return json.dumps({**record, **changes})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[]", "not an object"),
        ("[" * 100_000, "recursion"),
        (_broken(format="other/1"), "format is not"),
        (_broken(name="u"), "name is 'u'"),
        (_broken(phase="happy"), "phase is"),
        (_broken(ranks=None), "ranks is None"),
        (_broken(ranks=17), "17 ranks a host"),
        (_broken(inside=[10**9]), "inside is [1000000000]"),
        (_broken(ranks=2, inside=[10**9, "1"]), "not a whole number"),
        (_broken(pid="1"), "pid is"),
        (_broken(pid=True), "pid is"),
        (_broken(declared=None), "not a list"),
        (_broken(declared=[]), "differ in shape"),
        (_broken(declared=[], now=[]), "0 hosts"),
        (_broken(declared=[[[1, 1]]] * 4), "an emulated NIC has"),
        (_broken(declared=[[[1e9, 1e9]]] * 4), "not a whole number"),
        (_broken(now=[[[10**9, 10**9, "flood"]]] * 4), "failure is 'flood'"),
        (_broken(now=[[[10**9, 10**9]]] * 4), "a NIC has not 3 values"),
    ],
)
def test_broken_state_is_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        FabricState.from_json(text, "t")
    message = str(caught.value)
    assert says in message
    assert "optcc fabric down --name t" in message
    assert "\n" not in message


def test_topology_pools_what_survives() -> None:
    state = FabricState.fresh(SPEC, "up", 1)
    half = NicRates.parse("100Mbit/s:200Mbit/s")
    assert state.topology_text() == "4@50MB/s"
    assert state.topology_text(2) == "2@50MB/s"
    assert state.with_nics({(3, 1): NicState(half)}).topology_text() == "4@50MB/s,3=37.5MB/s:50MB/s"
    assert state.with_nics({(0, 0): NicState(half, "carrier")}).topology_text() == "4@50MB/s,0=25MB/s"


def test_topology_of_asymmetric_hosts_has_a_symmetric_base() -> None:
    state = FabricState.fresh(FabricSpec.parse("2@10Mbit/s:20Mbit/s"), "up", 1)
    assert state.topology_text() == "2@2.5MB/s,0=1.25MB/s:2.5MB/s,1=1.25MB/s:2.5MB/s"


def test_no_topology_has_a_host_without_a_nic() -> None:
    state = FabricState.fresh(SPEC, "up", 1)
    gone = {(3, nic): NicState(state.nics[3][nic].rates, "down") for nic in (0, 1)}
    with pytest.raises(InputError, match="h3: no NIC is left"):
        state.with_nics(gone).topology_text()
    assert state.with_nics(gone).topology_text(3) == "3@50MB/s"


def test_endpoint_rates_are_exact() -> None:
    state = FabricState.fresh(FabricSpec.parse("1x3@1000001bit/s"), "up", 1)
    assert state.endpoint_rates(0) == (Fraction(3000003, 8), Fraction(3000003, 8))


# ---- files of others


def _as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "require_right", lambda: None)
    monkeypatch.setattr(lifecycle, "all_namespaces", tuple)


def test_state_behind_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_root(monkeypatch)
    (tmp_path / "t").mkdir(mode=0o700)
    (tmp_path / "elsewhere").write_text(FabricState.fresh(SPEC, "up", 1).to_json())
    (tmp_path / "t" / "state.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="optcc fabric down --name t"):
        Fabric("t", tmp_path).state()


def test_folder_that_others_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_root(monkeypatch)
    (tmp_path / "t").mkdir()
    (tmp_path / "t").chmod(0o777)
    with pytest.raises(InputError, match="nobody else can write"):
        Fabric("t", tmp_path).state()


def test_no_state_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_root(monkeypatch)
    with pytest.raises(InputError, match="optcc fabric up --name t"):
        Fabric("t", tmp_path).state()
    assert Fabric("t", tmp_path).status().phase == "absent"


def test_down_of_a_broken_state_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_root(monkeypatch)
    tmp_path.chmod(0o700)
    (tmp_path / "t").mkdir(mode=0o700)
    (tmp_path / "t" / "state.json").write_text("{")
    assert Fabric("t", tmp_path).down() == (str(tmp_path / "t"),)
    assert Fabric("t", tmp_path).down() == ()


# ---- the door


def test_without_root_every_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    lines = ["up 4x2@1Mbit/s", "set h0 1Mbit/s", "fail h0", "heal h0", "run -- true", "status", "down", "down --all"]
    for line in lines:
        with pytest.raises(EnvironmentMissing, match="not root"):
            command.main(line.split(), standalone_mode=False)


def test_every_subcommand_has_an_example_and_json() -> None:
    assert set(command.commands) == {"up", "set", "fail", "heal", "run", "status", "down"}
    for name in command.commands:
        shown = CliRunner().invoke(command, [name, "--help"])
        assert shown.exit_code == 0
        assert f"Example:\n    optcc fabric {name}" in shown.output
        assert "--json" in shown.output
        assert "--name" in shown.output


def test_bad_input_is_found_before_anything_is_done() -> None:
    for line in ["up 4x2", "set h0 fast", "up 4@1Mbit/s --name A"]:
        with pytest.raises(InputError):
            command.main(line.split(), standalone_mode=False)
