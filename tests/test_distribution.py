"""What a release holds: every package and its data, no tests; one version everywhere.

`make dist` builds the distributions and names their folder in FEWBIT_DIST, so that they themselves are looked at too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import fewbit
import pytest

ROOT = Path(fewbit.__file__).parent
EVIDENCE = ("plots/bench", "plots/commands", "plots/numbers", "plots/studies")
# Folders of the repository beside the package, and those of the evidence, which takes a clone.
NOT_SHIPPED = ("tests", "build", "dist", "demo-output", "docs", *EVIDENCE)
SHIPPED = (
    *("__init__.py", "compact_json.py", "cli", "demo", "fewbit_gen", "figures", "integrations", "runtime", "tables"),
)
NO_PACKAGE = ("plots/results",)  # what measurements wrote
PAPERS = ("Few-bit Backward", "ActNN", "Backprop with Approximate Activations", "Value-aware Quantization")

if not (ROOT / "pyproject.toml").exists():  # the tests of an installed wheel
    pytest.skip("not the repository", allow_module_level=True)


def project():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def shipped_folders():
    """The folders below the root that belong to the package, with or without an `__init__.py`."""
    for folder, below, _ in os.walk(ROOT):
        here = Path(folder).relative_to(ROOT)
        below[:] = [
            name
            for name in below
            if not name.startswith((".", "__"))
            and not name.endswith(".egg-info")
            and str(here / name) not in NOT_SHIPPED
        ]
        yield here


def name_of(folder):
    return ".".join(("fewbit", *folder.parts))


def test_the_packages_are_the_folders_with_an_init():
    listed = project()["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed)
    assert set(listed) == {name_of(folder) for folder in shipped_folders() if (ROOT / folder / "__init__.py").exists()}


def test_ci_tries_every_python_and_the_oldest_and_the_newest_torch():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    about = project()["project"]
    (pythons,) = re.findall(r"python: \[(.*)\]", workflow)
    versions = [line.rpartition(" ")[2] for line in about["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert re.findall(r'"(.*?)"', pythons) == versions
    (least,) = re.findall(r"torch>=([\d.]+)", " ".join(about["optional-dependencies"]["torch"]))
    assert re.findall(r"torch: \"?([\w.]+)\"?}", workflow) == [f"{least}.0", "newest", "nightly"]
    assert "continue-on-error: ${{ matrix.torch == 'nightly' }}" in workflow  # which may break by itself


def data_files():
    """The files of the package besides Python's, as package and path in it."""
    for folder in shipped_folders():
        package = next(p for p in (folder, *folder.parents) if (ROOT / p / "__init__.py").exists())
        if folder == Path() or str(folder).startswith(NO_PACKAGE):
            continue
        for file in (ROOT / folder).iterdir():
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                yield name_of(package), str(file.relative_to(ROOT / package))


def test_every_data_file_is_package_data():
    patterns = project()["tool"]["setuptools"]["package-data"]
    found = list(data_files())
    assert len(found) > 30  # tables, pages, CUDA sources
    missing = [f"{package}: {file}" for package, file in found if not any(fnmatch(file, p) for p in patterns[package])]
    assert missing == []
    assert patterns["fewbit"] == ["py.typed", "__init__.pyi"]


def test_one_version():
    assert project()["project"]["dynamic"] == ["version"]
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [fewbit.__version__]
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == fewbit.__version__


def test_the_citation_has_the_four_papers():
    titles = re.findall(r'^ +title: "?(.*?)"?$', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert [next(paper for paper in PAPERS if title.startswith(paper)) for title in titles] == list(PAPERS)


def test_the_workflow_runs_what_ci_runs():
    assert "run: .ci/run\n" in (ROOT / ".github/workflows/ci.yml").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)


def built(suffix):
    folder = os.environ.get("FEWBIT_DIST")
    if not folder:
        pytest.skip("FEWBIT_DIST names no folder of distributions")
    (found,) = Path(folder).glob(f"*{suffix}")
    return found


def expected_files():
    """What the wheel and the source distribution have in common, as paths below the package."""
    packages = project()["tool"]["setuptools"]["packages"]
    folders = [ROOT.joinpath(*package.split(".")[1:]) for package in packages]
    files = {str(file.relative_to(ROOT)) for folder in folders for file in folder.glob("*.py")}
    root_files = {"py.typed", "__init__.pyi"}
    data = {str(Path(*package.split(".")[1:]) / file) for package, file in data_files()}
    return files | data | root_files


def test_the_wheel_has_the_package_and_nothing_else():
    with zipfile.ZipFile(built(".whl")) as wheel:
        names = set(wheel.namelist())
    about = {name for name in names if name.startswith(f"fewbit-{fewbit.__version__}.dist-info/")}
    assert {name.rpartition("/")[2] for name in about} >= {"METADATA", "LICENSE", "entry_points.txt"}
    assert names - about == {f"fewbit/{file}" for file in expected_files()}


def test_the_source_distribution_has_what_the_wheel_is_built_from():
    with tarfile.open(built(".tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    beside = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml"}
    assert names >= expected_files() | beside
    assert not [name for name in names if name.startswith(("tests", ".ci", ".github", "plots/results"))]


def test_types_of_public_names_are_known(tmp_path):
    """As `pyright --verifytypes fewbit --ignoreexternal` counts them, in an environment with the wheel."""
    checker = shutil.which("basedpyright", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if checker is None:
        pytest.skip("needs basedpyright")
    with zipfile.ZipFile(built(".whl")) as wheel:
        venv.create(tmp_path / "env", symlinks=os.name == "posix")
        (site,) = (tmp_path / "env").rglob("site-packages")
        wheel.extractall(site)
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (folder,) = (tmp_path / "env").glob("[bS][ic]*")  # bin, or Scripts
    search = os.pathsep.join([str(folder), os.environ["PATH"]])
    command = [checker, "--verifytypes", "fewbit", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": search}, capture_output=True, check=False)
    counted = json.loads(done.stdout)["typeCompleteness"]
    assert counted["exportedSymbolCounts"]["withKnownType"] > 5000, done.stderr
    assert counted["completenessScore"] >= 0.95
    face = [s for s in counted["symbols"] if s["name"].count(".") == 1]
    assert [s["name"] for s in face if s["isExported"] and not s["isTypeKnown"]] == []


def test_without_the_evidence_a_wheel_demonstrates_draws_tables_and_names_what_takes_a_clone(tmp_path):
    package = tmp_path / "fewbit"
    (package / "plots").mkdir(parents=True)
    for path in (*ROOT.glob("*"), *(ROOT / "plots").iterdir()):
        inside = path.relative_to(ROOT)
        if path.suffix in (".py", "") and str(inside) not in ("plots", *EVIDENCE) and path.name in SHIPPED:
            (package / inside).symlink_to(path)
    code = """if True:
        from fewbit.cli.main import main
        for arguments in (
            ["bench"],
            ["bench", "solve"],
            ["plot", "training", "--method", "blpa", "-o", "x.png"],
            ["plot", "training", "--help"],
            ["memory", "paper"],
        ):
            assert main(arguments) == 2, arguments
        assert main(["plot", "approximation", "relu", "--bits", "1", "-o", "relu.png"]) == 0
        import fewbit.cli.demo, fewbit.plots.demo.calibration, fewbit.plots.demo.digits, fewbit.plots.demo.training
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("comes with a clone of the repository, not with an installed wheel") == 5
