"""A wheel built from the tree works in an environment of its own, beside another package."""

import gzip
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamlearn import __version__

ROOT = Path(__file__).parents[2]
OTHERS = ("configs", "docs", "systemd", "tests")
"""Top-level names that another package may own."""
RECORDS = 4


@dataclass(frozen=True)
class Installed:
    """An environment that holds the wheel, another package, and this environment's third-party packages."""

    wheel: Path
    root: Path

    @property
    def packages(self) -> Path:
        """Where the wheel was installed."""
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.root)}))

    def run(self, *command: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment without anything of the checkout on its path."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "STREAMLEARN"))
        }
        program, *arguments = command
        return subprocess.run(
            [str(self.root / "bin" / program), *arguments],
            cwd=cwd,
            env={**inherited, "OMP_NUM_THREADS": "1", **environ},
            capture_output=True,
            text=True,
            check=False,
        )


def build(folder: Path) -> Path:
    """Build a wheel of the checkout, offline."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    told = subprocess.run([*pip, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A wheel in an empty environment. A .pth file lends it the dependencies, but no editable install."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build(folder)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    env = Installed(wheel, folder / "env")
    for name in OTHERS:
        (env.packages / name).mkdir()
        (env.packages / name / "__init__.py").write_text(f'NAME = "another {name}"\n')
    (env.packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(env.root / "bin/python"), "install"]
    told = subprocess.run(
        [*pip, "--no-index", "--no-deps", "--ignore-installed", str(wheel)], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return env


def test_it_holds_the_two_packages_and_nothing_else(installed: Installed) -> None:
    """No tests, documents or configurations at the top level, where another package may have its own."""
    with zipfile.ZipFile(installed.wheel) as archive:
        held = set(archive.namelist())
    metadata = f"streamlearn-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in held} == {"streamlearn", "connectors", metadata}
    assert {f"{metadata}/licenses/LICENSE", f"{metadata}/licenses/NOTICE"} <= held
    assert {"streamlearn/py.typed", "connectors/py.typed", "streamlearn/backbone/nano/model.safetensors"} <= held
    assert "streamlearn/settings/schema.json" in held


def test_every_configuration_and_systemd_file_travels(installed: Installed) -> None:
    """Byte for byte, the sample with its licences included."""
    for name in ("configs", "systemd"):
        there, here = installed.packages / "streamlearn/_data" / name, ROOT / name
        files = {file.relative_to(here) for file in here.rglob("*") if file.is_file() and file.suffix != ".pyc"}
        travelled = {file.relative_to(there) for file in there.rglob("*") if file.is_file() and file.suffix != ".pyc"}
        assert travelled == files
        assert [file for file in sorted(files) if (there / file).read_bytes() != (here / file).read_bytes()] == []


def test_it_leaves_the_packages_beside_it_alone(installed: Installed, tmp_path: Path) -> None:
    """Python imports the other packages, and this wheel's modules rather than those of the checkout."""
    code = (
        "import configs, docs, systemd, tests, connectors, streamlearn; "
        "print(configs.NAME, docs.NAME, systemd.NAME, tests.NAME, connectors.__file__, streamlearn.__file__, sep='\\n')"
    )
    told = installed.run("python", "-c", code, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    ours = [str(installed.packages / name / "__init__.py") for name in ("connectors", "streamlearn")]
    assert told.stdout.splitlines() == [*(f"another {name}" for name in OTHERS), *ours]


def test_the_readmes_program_runs_as_printed(installed: Installed, tmp_path: Path) -> None:
    """In a folder of its own, with nothing but the wheel."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    told = installed.run("python", "-c", program, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_it_runs_a_packaged_configuration(installed: Installed, tmp_path: Path) -> None:
    """The quickstart trains on the first records of the sample, exits 0 and writes only to its state folder."""
    sample = installed.packages / "streamlearn/_data/configs/sample/superni.train.jsonl.gz"
    with gzip.open(sample) as lines, (tmp_path / "records.jsonl").open("wb") as records:
        records.writelines(line for _, line in zip(range(RECORDS), lines, strict=False))
    for file in sample.parents[1].rglob("*"):
        file.chmod(0o555 if file.is_dir() else 0o444)
    told = installed.run(
        "streamlearn",
        "run",
        "--config",
        "packaged:quickstart",
        cwd=tmp_path,
        STREAMLEARN_SOURCE__JSONL__PATH="records.jsonl",
        STREAMLEARN_SERVE__ENABLED="false",
        STREAMLEARN_BACKBONE__DTYPE="float32",
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"{RECORDS} records trained" in told.stdout + told.stderr
    assert sorted((tmp_path / "build/quickstart/snapshots").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"build", "records.jsonl"}
