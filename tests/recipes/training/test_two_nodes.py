"""Two nodes as two network namespaces of this machine, joined by a virtual cable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.recipes import PAIR, command, environment, newest, run, weight_differences

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """The names of two namespaces with an interface each; both are removed at the end."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (Debian: apt install iproute2)")
    made = (f"capszoo-{os.getpid()}-a", f"capszoo-{os.getpid()}-b")
    try:
        try:
            for name in made:
                _ip("netns", "add", name)
            cable = "link add veth0 netns {} type veth peer name veth0 netns {}".format(*made)
            _ip(*cable.split())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system allows no network namespaces: {error.stderr.strip()}")
        for name, address in zip(made, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "veth0", "up")
        yield made
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
def test_two_nodes_train_as_one_process(
    root: Path, tmp_path: Path, data: Path, nodes: tuple[str, str]
) -> None:
    alone, out = tmp_path / "alone", tmp_path / "nodes"
    done = run(root, command(alone, data, PAIR, "double"))
    assert done.returncode == 0, done.stderr
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launcher += ["--master_addr", ADDRESSES[0], "--master_port", "29511"]
    module = ["-m", "tests.support.run_tiny", str(out), str(data), json.dumps(PAIR), "double"]
    env = {**environment(), "GLOO_SOCKET_IFNAME": "veth0"}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *launcher, "--node_rank", str(rank), *module],
            cwd=root,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, name in enumerate(nodes)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert newest(out).name == newest(alone).name == "step-00000020"
    differences = weight_differences(alone, out)
    print(f"20 updates, two nodes: largest difference of a weight {max(differences.values()):.1e}")
    assert max(differences.values()) <= 1e-9
    assert any(differences.values()), "two processes do sum in another order"
